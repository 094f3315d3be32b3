# SPDX-License-Identifier: Apache-2.0
"""Every schedule of a pipeline equals one device, and each rank does what the list of passes says, no more and no less."""

import numpy as np
import pytest
from conftest import call

from sporeloom.strategy.config import V_SHAPED
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy.schedule import part_of_model, passes, split_passes, splits_backward

WORKER = "tests/parity/schedule_worker.py"
RULES = {"rules": "decoder"}
ZERO = {"optimizer_parallel": {}}
MESHES = {
    "pp2": ({"pp": 2}, {}),
    "pp4": ({"pp": 4}, {}),
    "pp2_tp2": ({"pp": 2, "tp": 2}, {}),
    "pp2_dp2_zero": ({"pp": 2, "dp": 2}, ZERO),
}
SCHEDULES = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "zero_bubble_h1": {"schedule": "zero_bubble_h1"},
    "1f1b_v2": {"virtual_stages": 2},
    "1f1b_v3": {"virtual_stages": 3},
    "seqpipe_v3": {"schedule": "seqpipe", "virtual_stages": 3},
    "gpipe_v3": {"schedule": "gpipe", "virtual_stages": 3},
    "zero_bubble_v": {"schedule": "zero_bubble_v", "virtual_stages": 2},
    "dualpipe_v": {"schedule": "dualpipe_v", "virtual_stages": 2},
}
CHOSEN = {
    "pp2": ("1f1b", "gpipe", "1f1b_v3", "dualpipe_v", "own"),
    "pp4": ("1f1b", "1f1b_v2", "dualpipe_v"),
    "pp2_tp2": ("zero_bubble_h1", "1f1b_v2", "seqpipe_v3", "own"),
    "pp2_dp2_zero": ("gpipe_v3", "zero_bubble_v"),
}
"""Every schedule on one of the meshes: another axis shards the passes, whatever their order."""
OWN = {"schedule": "tests/parity/own_schedule.csv", "virtual_stages": 2, "num_microbatches": 3}
"""Whose second stage has the first and the last part, and some of whose backward passes are taken apart."""
MICROBATCHES = (3, 4, 6)


def _cases():
    """Numbers of microbatches in turn, as many as there are stages or more."""
    cases = {}
    for i, (mesh, (axes, more)) in enumerate(MESHES.items()):
        for j, (schedule, pipeline) in enumerate(SCHEDULES.items()):
            pp, parts = axes["pp"], axes["pp"] * pipeline.get("virtual_stages", 1)
            count = MICROBATCHES[(i + j) % len(MICROBATCHES)]
            if schedule in V_SHAPED:
                count = max(count, 2 * pp) if pp == 2 else 12
            if parts <= 8 and count >= pp and schedule in CHOSEN[mesh]:
                settings = {"mesh": axes, **RULES, **more, "pipeline": {"num_microbatches": count, **pipeline}}
                cases[f"{mesh}_{schedule}_m{count}"] = settings
        if "own" in CHOSEN[mesh]:
            cases[f"{mesh}_own"] = {"mesh": axes, **RULES, **more, "pipeline": OWN}
    return cases


CASES = _cases()
SHORT = {name for name in CASES if name.startswith(("pp2_tp2_1f1b_v2", "pp2_dp2_zero_zero_bubble_v"))}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out, found = tmp_path_factory.mktemp("schedules"), {}

    def of(name):
        """Of each rank what it tells, and the gradients."""
        if name not in found:
            alike = [name] if name in SHORT or name not in CASES else [n for n in CASES if n not in SHORT]
            settings = {each: CASES.get(each, {}) for each in alike if _size(each) == _size(name)}
            layers = {each: _layers(each) for each in settings}
            told = call(WORKER, "train", settings, layers, out, processes=_size(name), timeout=600)
            for each in settings:
                of_ranks = [rank[each] for rank in told] if _size(name) > 1 else [told[each]]
                with np.load(out / f"{each}.npz") as archive:
                    found[each] = of_ranks, {key: archive[key] for key in archive.files}
        return found[name]

    return of


def _size(name):
    return strategy_of(CASES[name]).mesh.size if name in CASES else 1


def _layers(name):
    """A layer or two in each part of the model; of one device its name has the number."""
    if name not in CASES:
        return int(name.rpartition(" ")[2])
    strategy = strategy_of(CASES[name])
    return 4 if strategy.mesh.pp * strategy.pipeline.virtual_stages <= 4 else 8


def cases():
    return [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_loss_and_gradients_are_those_of_one_device(done, name):
    told, got = done(name)
    (one,), expected = done(f"one_device {_layers(name)}")
    for rank in told:  # all of them know
        np.testing.assert_allclose([rank["loss"], rank["norm"]], [one["loss"], one["norm"]], rtol=1e-6)
    largest = max(np.abs(value).max() for value in expected.values())
    for key, value in expected.items():  # the bias of keys has no gradient but rounding
        atol = 1e-5 * np.abs(value).max() + 1e-7 * largest
        np.testing.assert_allclose(got[key], value, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", cases())
def test_each_rank_does_what_the_schedule_says_and_holds_as_much(done, name):
    strategy, (told, _) = strategy_of(CASES[name]), done(name)
    mesh, pipeline = strategy.mesh, strategy.pipeline
    for rank, did in enumerate(told):
        stage = mesh.coordinate(rank, "pp")
        order = passes(stage, mesh.pp, pipeline.num_microbatches, pipeline.virtual_stages, pipeline.order)
        split, expected, held, most = split_passes(order), [], set(), 0
        for one in order:
            part = part_of_model(one.part, stage, mesh.pp, pipeline.order)
            expected.append([one.kind, part, one.microbatch])
            if one.kind == "backward" and split and one not in split:
                expected.append(["weights", part, one.microbatch])
            if one.kind == "forward":
                held.add((part, one.microbatch))
            elif one not in split:
                held.discard((part, one.microbatch))
            most = max(most, len(held))
        if splits_backward(pipeline.order):  # the first part gives nothing back: all of it is gradients of weights
            expected = [each for each in expected if each[:2] != ["backward", 0]]
        assert did["passes"] == expected
        assert did["held"] == most
