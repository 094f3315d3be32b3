# SPDX-License-Identifier: Apache-2.0
"""A loss scale changes nothing but what float16 can hold; a step that overflows changes nothing at all, on any rank."""

import numpy as np
import pytest
from conftest import CONFIGS, call, fewer_microbatches

from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/loss_scale_worker.py"
RUNS = {
    "plain": (None, "float32", 3),
    "scaled": (65536.0, "float32", 3),
    "overflow": (1e38, "float32", 3),
    "half": (65536.0, "float16", 3),
    "bfloat16": (None, "bfloat16", 3),
}
CASES = {"one_device": 1, "pangu_tiny_dp2_tp2_zero": 2, "pangu_tiny_tp2_pp2": 1}
"""Strategies, and parts the batch is accumulated of."""
HALVES = {"one_device": ["half", "bfloat16"], "pangu_tiny_dp2_tp2_zero": ["half"], "pangu_tiny_tp2_pp2": ["bfloat16"]}
BITS = {"half": 11, "bfloat16": 8}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(what the log rank told, folder of the weights) of a strategy, run when it is first asked for."""
    done = {}

    def load(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            alone = name == "one_device"
            path = name if alone else fewer_microbatches(CONFIGS / f"{name}.yaml", folder)
            processes = 1 if alone else load_strategy(path).mesh.size
            # One device in bfloat16 compiles for 1, and a process that compiled for more remembers that.
            runs = {run: how for run, how in RUNS.items() if run not in BITS or run in HALVES[name]}
            told = call(WORKER, "train", path, folder, CASES[name], runs, processes=processes, fresh=alone)
            done[name] = (told if alone else next(each for each in told if each)), folder
        return done[name]

    return load


@pytest.mark.parametrize("name", CASES)
def test_a_power_of_two_changes_no_float32_step(results, name):
    told, folder = results(name)
    # With accumulation over processes kernels may choose other threads: equal sums in another order.
    tolerance = 0 if CASES[name] == 1 else 1e-6
    plain, scaled = np.load(folder / "plain.npz"), np.load(folder / "scaled.npz")
    assert plain.files == scaled.files and len(plain.files) > 20
    for tensor in plain.files:
        np.testing.assert_allclose(scaled[tensor], plain[tensor], rtol=0, atol=tolerance, err_msg=tensor)
    np.testing.assert_allclose(told["scaled"][0], told["plain"][0], rtol=tolerance)
    np.testing.assert_allclose(told["scaled"][1], told["plain"][1], rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_changes_nothing_on_any_rank_halves_the_scale_and_goes_on(results, name):
    told, _ = results(name)
    losses, norms, scales, changed = told["overflow"]
    assert norms[0] is None and not changed
    assert scales == [1e38, 5e37, 5e37] and all(norms[1:])
    _, _, _, changed = told["plain"]
    assert changed
    # The second step is then the first one that counts, on the second batch.
    np.testing.assert_allclose(losses, results("one_device")[0]["overflow"][0], rtol=1e-5)
    np.testing.assert_allclose(norms[1:], results("one_device")[0]["overflow"][1][1:], rtol=1e-5)


@pytest.mark.parametrize(("name", "run"), [(name, run) for name, runs in HALVES.items() for run in runs])
def test_a_half_type_on_a_mesh_is_that_type_on_one_device(results, name, run):
    """A sum of products is rounded to 2^-11 of itself in float16, 2^-8 in bfloat16; over meshes its parts are rounded apart.
    A loss is a mean of hundreds of tokens and its error smaller by the root of that; a norm likewise."""
    told, alone, bits = results(name)[0][run], results("one_device")[0][run], BITS[run]
    np.testing.assert_allclose(told[0], alone[0], rtol=2**-bits / 16)
    np.testing.assert_allclose(told[1], alone[1], rtol=2**-bits)
    single = results("one_device")[0]["plain"]
    np.testing.assert_allclose(told[0], single[0], rtol=2**-bits)
    assert told[0] != single[0]
