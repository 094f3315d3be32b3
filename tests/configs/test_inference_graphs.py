# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill graphs of models of full width communicate what they must: no more, no less."""

import pytest
from conftest import CONFIGS, call

pytestmark = pytest.mark.slow


def compiled(name, size, num_layers, rank, length, weights="float32"):
    path = CONFIGS / f"{name}.yaml"
    return call("tests/configs/graph_worker.py", "inference", path, size, num_layers, rank, length, weights)


@pytest.mark.parametrize(("length", "weights"), [(1, "int8"), (1, "int4"), (256, "float32")])
def test_pangu_13b_on_8_devices(length, weights):
    found = compiled("pangu_13b_tp8", "13b", 6, 7, length, weights)
    scales = 0 if weights == "float32" else 1  # a number for each row of the embedding, which is gathered
    assert found["counts"] == {"AllReduce": 1 + 2 * 6, "AllGather": 1 + scales}
    assert found["parameters"]["layers.0.attention.cache.keys"] == [2, 40 // 8, 256, 128]
    up, down = ([4 * 5120 // 8, 5120], [5120, 4 * 5120 // 8])
    if weights == "int4":
        up, down = ([*up[:1], up[1] // 32, 16], [*down[:1], down[1] // 32, 16])
        assert found["parameters"]["layers.0.mlp.down.scale"] == [5120, 4 * 5120 // 8 // 128]
    assert found["parameters"]["layers.0.mlp.up.weight"] == up
    assert found["parameters"]["layers.0.mlp.down.weight"] == down
    assert found["parameters"]["embedding.word.weight"] == [40000 // 8, 5120]


def test_pangu_200b_on_the_mesh_it_was_trained_on():
    mesh_last = 2048 - 1
    found = compiled("pangu_200b_dp16_tp8_pp16", "200b", 16, mesh_last, 1)
    assert found["counts"]["AllReduce"] == 2  # one layer on each of 16 stages
    assert found["counts"]["Receive"] >= 1
    assert "Send" not in found["counts"]
    assert found["parameters"]["query_layer.attention.cache.keys"] == [2, 128 // 8, 256, 128]
