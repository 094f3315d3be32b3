# SPDX-License-Identifier: Apache-2.0
"""Networks as users write them, in the ways that users train them: each rank sees the loss of one device, and holds its part
of the same weights.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from conftest import call

from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/own_networks.py"
DP4, DP2_TP2 = {"dp": 4}, {"dp": 2, "tp": 2}
COLUMNS_AND_ROWS = {"rules": {"up.matmul": [["dp", None], ["tp", None]], "down.matmul": [["dp", "tp"], [None, "tp"]]}}
PIPELINE = {"pipeline": {"num_microbatches": 4}, "rules": {"layers": ["blocks.*"], "last_stage": ["mix", "head"]}}
FUNCTIONAL = {"MatMulExt": [["dp", None], [None, "tp"]], "MatMulExt_1": [["dp", "tp"], ["tp", None]]}
EXPERTS = {"rules": {product: [["tp", "dp", None], ["tp", None, None]] for product in ("up", "down")}}
CASES = [
    ("mlp", "step", DP4, None),
    ("mlp", "clipped gradients", DP2_TP2, COLUMNS_AND_ROWS),
    ("mlp", "accumulation", {"tp": 2, "dp": 2}, COLUMNS_AND_ROWS),
    ("plain", "model", DP2_TP2, COLUMNS_AND_ROWS),
    ("cnn", "step, judged", DP4, None),
    ("bag", "step", DP4, {"optimizer_parallel": {"axis": "dp"}}),
    ("lstm", "step", {"dp": 2}, None),
    ("mixture", "step", DP2_TP2, EXPERTS),
    ("functional", "step", DP2_TP2, {"rules": FUNCTIONAL}),
    ("gated", "step", "auto", {"devices": 4}),
    ("gated", "step, called", {"pp": 2, "dp": 2}, PIPELINE),
    ("tied", "clipped gradients", {"pp": 2}, {"pipeline": {"num_microbatches": 4, "schedule": "zero_bubble_h1"}}),
    ("plain", "model", {"pp": 2}, {"pipeline": {"num_microbatches": 2}}),
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "way", "mesh", "settings"), CASES)
def test_a_mesh_trains_as_one_device(name, way, mesh, settings, tmp_path):
    settings = {**settings, "out": str(tmp_path / "chosen.yaml")} if mesh == "auto" else settings
    processes = 4 if mesh == "auto" else math.prod(mesh.values())
    losses, whole = call(WORKER, "train", name, way, None)
    assert losses[3] < losses[0]
    held = set()
    for told, parts in call(WORKER, "train", name, way, mesh, settings, processes=processes):
        np.testing.assert_allclose(told, losses, rtol=1e-5, atol=1e-6)
        assert parts.keys() == whole.keys() or "pp" in mesh
        held |= parts.keys()
        for parameter, (bounds, values) in parts.items():
            expected = np.array(whole[parameter][1])[tuple(slice(*ends) for ends in bounds)]
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5, err_msg=parameter)
    assert held == whole.keys()
    if mesh == "auto":
        chosen = load_strategy(tmp_path / "chosen.yaml")
        assert (chosen.mesh.dp, chosen.mesh.tp) == (2, 2)
        assert [rule.pattern.rpartition(".")[0] for rule in chosen.rules.operators] == [
            f"blocks.{block}.{product}" for block in (0, 1) for product in ("gate", "up", "down")
        ]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("uneven", "auto_parallel: mesh.dp: a batch of 3 rows is not divisible by dp 2"),
        ("no tensor", "a parallel network takes Tensors, numbers and texts"),
        ("eager", "a parallel network runs in graph mode"),
        ("no such operator", "MatMulExt_2 matches no operator of the graph; did you mean "),
        ("uneven microbatches", "a batch of 10 does not divide into 4 microbatches; take 8 or 12"),
        ("while", "has an `if` or `while` on a Tensor"),
        ("mindspore", "auto_parallel: engine: MindSpore's partitioner is for the model families only"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(what, message):
    for told in call(WORKER, "refused", what, processes=2):
        assert message in told


def test_a_pipeline_predicts_though_only_its_last_stage_computes_in_bfloat16():
    expected = np.array(call(WORKER, "predicted", None))
    for told in call(WORKER, "predicted", {"mesh": {"pp": 2}, **PIPELINE}, processes=2):
        np.testing.assert_allclose(
            told, expected, rtol=0, atol=2**-7 * np.abs(expected).max()
        )  # three roundings of 2^-9


def test_a_rule_for_an_operator_by_its_kind_shards_it():
    """Half of both products: x w and h w', forward and both gradients but that of x."""
    flops = 2 * 16 * 12 * 32 * 2 + 2 * 16 * 32 * 5 * 3
    assert call(WORKER, "flops_of_functional", FUNCTIONAL, fresh=True) == flops // 2


@pytest.mark.parametrize(
    ("name", "mesh", "settings"),
    [
        ("bag", {"dp": 2}, {"optimizer_parallel": {"axis": "dp"}}),
        ("borrowed", {"pp": 2}, PIPELINE),
    ],
)
def test_one_device_reads_what_a_mesh_saved(name, mesh, settings, tmp_path):
    """Parts of optimizer parallel and stages of a pipeline; a parameter that nothing uses, and one that an optimizer updates
    in one stage, by itself, while another computes with it, too."""
    told = call(WORKER, "saved", name, tmp_path, mesh, settings, processes=2)
    read = call(WORKER, "saved", name, tmp_path)
    assert len(read) == 2 and sorted(path.name for path in tmp_path.iterdir()) == sorted(
        Path(file).name for file in read
    )
    for file, loss in read.items():
        # The loss of `bag` is a difference of numbers near 1, of which the last bit is 6e-8.
        np.testing.assert_allclose([each[file] for each in told], loss, rtol=1e-6, atol=6e-8)


def test_two_networks_of_one_process_keep_their_own_strategies():
    for first, second, alone in call(WORKER, "two", processes=4):
        np.testing.assert_allclose(first, alone[0], rtol=1e-5)
        np.testing.assert_allclose(second, alone[1], rtol=1e-5)
