# SPDX-License-Identifier: Apache-2.0
"""Networks and scripts as users write them, sharded by `sporeloom.partition` on four processes: losses, other outputs and
weights of four steps are those of one device; or they are refused with what to change.
"""

import re
from pathlib import Path

import pytest
from conftest import call

WORKER = "tests/parity/user_networks.py"
FILES = ("user_losses.py", "user_models.py", "user_scripts.py")
NAMES = [
    name
    for file in FILES
    for name in re.findall(
        r'^    "([a-z0-9 ]+)": ', Path(__file__).with_name(file).read_text(encoding="utf-8"), re.MULTILINE
    )
]
ALSO_IN_SHORT = (
    *("gram matrix", "covariance", "argmax of columns", "scatter add", "segment max", "hard example mining"),
    *("written rms norm", "functional batch norm", "own gradient", "simclr", "either", "until", "numpy"),
    *("clip", "graph attention", "bert", "resnet", "mobilenet", "speech", "video"),
    *(
        "clipping by hand",
        "nested",
        "gradients of inputs",
        "dynamic scale",
        "gan",
        "queue",
        "moving average",
        "lamb",
        "checked gan",
    ),
)
"""Most of them, which show every kind of fault that was found."""
BY_ROWS = ("gram matrix", "functional batch norm", "simclr", "resnet", "gan")
"""Tried by rows alone, too: over four ranks."""
IN_STAGES = (
    "hard example mining",
    "ignored labels",
    "either",
    "bert",
    "resnet",
    "gan",
    "moving average",
    "nested",
    "checked gan",
)
"""Tried in a pipeline, too: those whose batch is divided into microbatches, and those whose is not."""
AT_ONCE = 15
"""In one job: to start processes, and to train each network on one device, takes longer than a mesh does."""

pytestmark = pytest.mark.slow


def jobs(names):
    return [list(names[i : i + AT_ONCE]) for i in range(0, len(names), AT_ONCE)]


SHORT, LONG = [n for n in NAMES if n in ALSO_IN_SHORT], [n for n in NAMES if n not in ALSO_IN_SHORT]
JOBS = [
    *((names, ("dp2 tp2",)) for names in jobs(SHORT)),
    *((names, ("pp2 dp2",)) for names in jobs(IN_STAGES)),
    *(pytest.param(names, ("dp2 tp2",), marks=pytest.mark.long) for names in jobs(LONG)),
    pytest.param(list(BY_ROWS), ("dp4",), marks=pytest.mark.long),
]


@pytest.mark.parametrize(
    ("names", "meshes"), JOBS, ids=lambda value: value[0] if isinstance(value, list) else ", ".join(value)
)
def test_they_train_as_on_one_device_or_say_why_not(names, meshes):
    for told in call(WORKER, "compare", names, meshes, processes=4, fresh=True, timeout=580):
        wrong = {name: found[1:3] for name, found in told.items() if not found[0]}
        assert not wrong


def test_a_fault_of_the_partitioner_is_told_by_a_checked_first_step():
    for told in call(WORKER, "planted", processes=4, fresh=True):
        assert "this is not what one device computes" in told and "bias" in told


def test_the_names_are_those_of_the_cases():
    assert set(call(WORKER, "names")) == set(NAMES) and {*ALSO_IN_SHORT, *IN_STAGES, *BY_ROWS} <= set(NAMES)
    assert len(NAMES) >= 50
