# SPDX-License-Identifier: Apache-2.0
"""The heart: every tiny model on 4 real processes equals one device, whatever the strategy.

Losses of five steps within 1e-5 relative; the first step's gradients within 1e-5 of the model's largest gradient entry;
weights after five steps of plain SGD within 1e-5. Adam's weights are judged by the losses they give: it amplifies pure
rounding where the true gradient is zero, as for the key bias.
"""

import json

import numpy as np
import pytest
from conftest import CONFIGS, call

from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/worker.py"
# Every strategy, every option and every model, in pairs that differ in what is sharded, not in all their products.
CASES = [
    "pangu_tiny_dp4+offload+embedded+shallow",
    "pangu_tiny_dp2_tp2+clip+shallow",
    "pangu_tiny_dp2_tp2_zero+accumulate+dropout+ultra+shallow",
    "pangu_tiny_dp4_zero+again+dropout+shallow",
    "pangu_tiny_dp2_tp2_zero+again+palm+shallow",  # keys and values are on all four, sharded over two
    "pangu_tiny_dp2_pp2+again+clip+shallow",
    "pangu_tiny_dp2_pp2_zero+shards+clip+shallow",
    "pangu_switch_tiny_dp4_ep2_zero+again+accumulate+moe+shallow",
    "pangu_tiny_dp2_tp2_sp+copies+dropout+shallow",
    "pangu_tiny_tp2_pp2+copies+flash+embedded+shallow",
    "pangu_tiny_tp2_pp2_selective+dropout+codegeex+after_query+shallow",
    "pangu_tiny_pp4+codegeex4",
    "pangu_tiny_tp2_pp2_interleaved+codegeex4",
    "pangu_tiny_tp4+flash+codegeex4+shallow",  # two ranks share one of two heads of keys and values
    "pangu_tiny_cp2_tp2+flash+embedded+shallow",
    "pangu_tiny_dp2_cp2_ulysses+dropout+shallow",
    "pangu_tiny_dp2_tp2_sp+dropping+dropout+embedded+shallow",
    "pangu_pro_moe_tiny_ep2_tp2+moge+shallow",
    "pangu_pro_moe_tiny_ep2_pp2+moe+shallow",  # the last stage has no experts
    "pangu_pro_moe_tiny_ep2_tp2+latent_moe+shallow",
    # Masks with windows, sinks and chosen tokens; multi-token prediction in the last stage.
    "pangu_tiny_tp2_pp2_recompute+two+flash+shallow",
    "pangu_tiny_cp2_tp2+latent_indexer+flash+shallow",
    "pangu_pro_moe_tiny_ep2_tp2+moge+cp_for_tp+shallow",  # experts drop tokens
    "pangu_pro_moe_tiny_ep2_tp2+dropless+no_ep+shallow",  # each rank sorts its rows by expert
    "pangu_pro_moe_tiny_ep2_tp2+dropless+shallow",  # ranks gather each other's tokens
    "pangu_pro_moe_tiny_ep2_tp2+hash_dropless+ep_over_tp+shallow",  # texts of two domains
]
IN_SHORT = [
    "pangu_tiny_dp2_tp2+clip+shallow",
    "pangu_tiny_dp2_tp2_zero+accumulate+dropout+ultra+shallow",
    "pangu_tiny_dp2_tp2_sp+copies+dropout+shallow",
    "pangu_tiny_dp2_cp2_ulysses+dropout+shallow",
    "pangu_pro_moe_tiny_ep2_tp2+moge+shallow",
    "pangu_pro_moe_tiny_ep2_tp2+dropless+no_ep+shallow",
    "pangu_tiny_tp2_pp2+copies+flash+embedded+shallow",
    "pangu_tiny_dp2_pp2_zero+shards+clip+shallow",
    "pangu_pro_moe_tiny_ep2_tp2+latent_moe+shallow",
]
LIKE_WITHOUT = (
    "accumulate",
    "copies",
    "flash",
    "offload",
    "again",
    "shards",
    "ep_over_tp",
    "no_ep",
    "cp_for_tp",
)
"""Options of a mesh: one device is compared without them."""
ACCUMULATED = "one_device+accumulate+shallow"

pytestmark = pytest.mark.slow


def cases(chosen):
    """As parameters of a test, of which `make test` takes a few."""
    return [pytest.param(case, marks=[] if case in IN_SHORT else [pytest.mark.long]) for case in chosen]


def options_of(case):
    return "".join("+" + option for option in case.split("+")[1:] if option not in LIKE_WITHOUT)


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What a case did, run when it is first asked for: case, optimizer -> (numbers, tensors)."""
    out, done = tmp_path_factory.mktemp("parity"), set()

    def load(case, optimizer):
        name, *options = case.split("+")
        alone = name == "one_device"
        if case not in done:
            path = name if alone else CONFIGS / f"{name}.yaml"
            call(WORKER, "train", path, options, out / case, processes=1 if alone else 4)
            done.add(case)
        numbers = json.loads((out / f"{case}.{optimizer}.json").read_text())
        with np.load(out / f"{case}.{optimizer}.npz") as archive:
            return numbers, {name: archive[name] for name in archive.files}

    load.folder = out
    return load


@pytest.mark.parametrize("case", cases(CASES))
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_losses_and_gradient_norms_of_five_steps(results, case, optimizer):
    got, _ = results(case, optimizer)
    expected, _ = results("one_device" + options_of(case), optimizer)
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["norms"], expected["norms"], rtol=1e-4)
    assert expected["losses"][-1] != expected["losses"][0]
    if "counts" not in expected:
        return
    for given, counts in zip(got["counts"], expected["counts"], strict=True):
        for row, expected_row in zip(given, counts, strict=True):
            if len(row) == 1:  # of an indexer: its divergence, the difference of larger numbers
                np.testing.assert_allclose(row, expected_row, rtol=1e-5, atol=1e-8)
            else:  # of experts: what each was given, and what was dropped
                np.testing.assert_array_equal(row[:-1], expected_row[:-1])
    dropped = [row[-2] for counts in expected["counts"] for row in counts if len(row) > 1]
    takes_all = any(option == "latent_moe" or "dropless" in option for option in case.split("+"))
    assert not dropped or any(dropped) != takes_all  # their experts have no capacity


@pytest.mark.parametrize("case", cases(CASES))
def test_gradients_of_the_first_step(results, case):
    got, expected = results(case, "AdamW")[1], results("one_device" + options_of(case), "AdamW")[1]
    largest = max(np.abs(value).max() for value in expected.values())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() <= 1e-5 * largest, name


@pytest.mark.parametrize("case", cases(CASES))
def test_weights_after_five_steps_of_sgd(results, case):
    got, expected = results(case, "SGD")[1], results("one_device" + options_of(case), "SGD")[1]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", cases(CASES))
def test_no_operator_is_computed_whole_by_all_ranks(results, case):
    results(case, "SGD")
    found = json.loads((results.folder / f"{case}.sharded.json").read_text())
    assert not found["unsharded"]


def test_accumulating_on_one_device_equals_the_whole_batch(results):
    for optimizer in ("AdamW", "SGD"):
        got, expected = results(ACCUMULATED, optimizer), results("one_device+shallow", optimizer)
        np.testing.assert_allclose(got[0]["losses"], expected[0]["losses"], rtol=1e-5)


def test_every_strategy_is_met_with_and_without_grouped_heads():
    met = {case.partition("+")[0] for case in CASES}
    assert {path.stem for path in CONFIGS.glob("pangu_*tiny_*.yaml") if load_strategy(path).mesh.size == 4} <= met
    for grouped in (False, True):
        models = {"embedded", "ultra", "codegeex4", "palm"}
        cases = [case.split("+") for case in CASES if bool(models & set(case.split("+"))) == grouped]
        strategies = [load_strategy(CONFIGS / f"{name}.yaml") for name, *_ in cases]
        assert all(any(s.mesh.degree(axis) > 1 for s in strategies) for axis in ("dp", "tp", "pp"))
        assert any(s.optimizer_parallel for s in strategies)
        assert any(s.sequence_parallel for s in strategies)


def test_clipping_was_active(results):
    numbers, _ = results("one_device+clip+shallow", "SGD")
    assert min(numbers["norms"]) > 0.5
    unclipped, _ = results("one_device+shallow", "SGD")
    assert abs(numbers["losses"][-1] - unclipped["losses"][-1]) > 1e-3
