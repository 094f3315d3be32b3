# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill graphs of full-size models compile for Ascend and communicate what they must: no more, no less."""

import json

import pytest
from conftest import CONFIGS, run

CODE = """
import json, sys
from collections import Counter
import numpy as np
from mindloom.family import size_config
from mindloom.inference.model import build_model
from mindloom.runtime.compile import partition
from mindloom.runtime.lowering import collective_nodes
from mindloom.strategy.loader import load_strategy

name, size, rank, length, int8 = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "int8"
strategy, config = load_strategy(name, for_inference=True), size_config("pangu", size)
rows, slots = 2 * strategy.mesh.dp, 256
net = build_model("pangu", config, strategy, (rows, slots), int8)
shapes = [(rows, length), (rows, length), (rows,), (rows, config.num_heads, length, 3)]
graph = partition(net, strategy, rank, [(shape, np.int32) for shape in shapes])
counts = Counter(primitive.op_type for _, primitive in collective_nodes(graph.model))
print(json.dumps({"counts": counts, "parameters": graph.parameters}))
"""

pytestmark = pytest.mark.slow


def compiled(name, size, rank, length, weights="float32"):
    outcome = run("-c", CODE, CONFIGS / f"{name}.yaml", size, rank, length, weights)
    assert outcome.code == 0, outcome.output[-3000:]
    return json.loads(outcome.output.strip().splitlines()[-1])


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("length", [1, 256])
def test_pangu_13b_on_8_devices(length, weights):
    found = compiled("pangu_13b_tp8", "13b", 7, length, weights)
    lookups = 1 if weights == "float32" else 2  # of int8 rows and of their scales
    assert found["counts"] == {"AllReduce": lookups + 2 * 40, "AllGather": 1}
    assert found["parameters"]["layers.0.attention.cache.keys"] == [2, 40 // 8, 256, 128]
    assert found["parameters"]["layers.0.mlp.up.weight"] == [4 * 5120 // 8, 5120]
    assert found["parameters"]["embedding.word.weight"] == [40000 // 8, 5120]


def test_pangu_200b_as_it_was_trained():
    mesh_last = 2048 - 1
    found = compiled("pangu_200b_dp16_tp8_pp16", "200b", mesh_last, 1)
    assert found["counts"]["AllReduce"] == 2 * 4  # 64 layers on 16 stages
    assert found["counts"]["Receive"] >= 1
    assert "Send" not in found["counts"]
    assert found["parameters"]["query_layer.attention.cache.keys"] == [2, 128 // 8, 256, 128]
