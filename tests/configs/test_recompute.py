# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from conftest import CONFIGS, run

CODE = """
import dataclasses, json, sys
import numpy as np
from mindspore import nn
from mindloom.parallel.parallelize import parallelize
from mindloom.parallel.step import TrainStep
from mindloom.runtime.compile import partition
from mindloom.strategy.loader import load_strategy
from mindloom.train.optim import SGD
from pangu.config import SIZES
from pangu.model import PanGuWithLoss

strategy = load_strategy(sys.argv[1])
net = PanGuWithLoss(dataclasses.replace(SIZES["tiny"], dropout_rate=0.1, num_layers=2))
report = parallelize(net, strategy)
step = TrainStep(net, SGD(net.trainable_params()), report, 0).set_train()
graph = partition(step, strategy, 0, [((4, 16), np.int32)] * 3 + [((4, 16), np.float32), ((4, 16), np.int32)])
kinds = {p.name: p.op_type for p in graph.model.primitives}
nodes = [n for g in (graph.model.graph, *graph.model.functions) for n in g.node]
names = [kinds.get(n.op_type.removeprefix("REF::")) for n in nodes if not n.domain.startswith("Gradients")]
print(json.dumps({name: names.count(name) for name in ("BatchMatMul", "MatMul", "Softmax")}))
"""


@pytest.mark.slow
def test_recompute_repeats_the_products(write):
    rules = f"mesh: {{tp: 2}}\nrules: {CONFIGS / 'rules/decoder.yaml'}\n"
    counts = {}
    for name, more in {"plain": "", "twice": "{layers: all}", "selective": "{kind: selective}"}.items():
        text = rules + (f"recompute: {more}\n" if more else "")
        outcome = run("-c", CODE, write(f"{name}.yaml", text))
        assert outcome.code == 0, outcome.output
        counts[name] = json.loads(outcome.output.strip().splitlines()[-1])
    assert counts["twice"]["BatchMatMul"] > counts["plain"]["BatchMatMul"]
    assert counts["twice"]["MatMul"] > counts["plain"]["MatMul"]
    # Selective: the scores' product and softmax again, nothing else.
    assert counts["selective"]["MatMul"] == counts["plain"]["MatMul"]
    assert counts["selective"]["BatchMatMul"] == counts["plain"]["BatchMatMul"] + 2
    assert counts["selective"]["Softmax"] == counts["plain"]["Softmax"] + 2
