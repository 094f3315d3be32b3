# SPDX-License-Identifier: Apache-2.0
"""Operators and networks as users write them, sharded by `sporeloom.partition` on four processes, forward and backward."""

import re
from pathlib import Path

import pytest
from conftest import call

WORKER = "tests/parity/spmd_networks.py"
SOURCE = Path(__file__).with_name("spmd_functions.py").read_text()
NAMES = [name for name in re.findall(r"^def (\w+)\(x\)", SOURCE, re.MULTILINE) if name != "images"]
GROUPS = [NAMES[:12]]
"""On processes of their own; all of them, and more, in one process: see test_operator_sweep."""
SCHEMES = ["rows and columns"]
OF_NETWORKS = ["rows over all, parameters too"]
NETWORKS = ("mixture", "cnn", "encoder", "images")
CLOSE = 5e-6

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_functions_train_as_on_one_device(names):
    for told in call(WORKER, "compare", names, SCHEMES, processes=4, fresh=True, timeout=580):
        for scheme in SCHEMES:
            worst, _ = told[scheme]
            assert not {name: off for name, off in worst.items() if off >= CLOSE}, scheme


@pytest.fixture(scope="module")
def networks():
    """Of each rank: name -> what it tells."""
    return call(WORKER, "compare_each", NETWORKS, OF_NETWORKS, processes=4, fresh=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_on_one_device(name, networks):
    for told in networks:
        for scheme in OF_NETWORKS:
            worst, _ = told[name][scheme]
            assert worst[name] < CLOSE, (scheme, worst)
