# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import CONFIGS, call


@pytest.mark.slow
def test_recompute_repeats_the_products(write):
    rules = f"mesh: {{tp: 2}}\nrules: {CONFIGS / 'rules/decoder.yaml'}\n"
    counts = {}
    for name, more in {"plain": "", "twice": "{layers: all}", "selective": "{kind: selective}"}.items():
        text = rules + (f"recompute: {more}\n" if more else "")
        counts[name] = call("tests/configs/graph_worker.py", "recompute", write(f"{name}.yaml", text))
    assert counts["twice"]["BatchMatMul"] > counts["plain"]["BatchMatMul"]
    assert counts["twice"]["MatMul"] > counts["plain"]["MatMul"]
    # Selective: the scores' product and softmax again, nothing else.
    assert counts["selective"]["MatMul"] == counts["plain"]["MatMul"]
    assert counts["selective"]["BatchMatMul"] == counts["plain"]["BatchMatMul"] + 2
    assert counts["selective"]["Softmax"] == counts["plain"]["Softmax"] + 2
