# SPDX-License-Identifier: Apache-2.0
"""`--fast`: a stage extrapolated from one and two layers equals the stage compiled at full depth.

The published sizes are compared with full compilations by benchmarks/dry_run.py, which takes a quarter of an hour.
"""

import pytest
from conftest import CONFIGS, call

pytestmark = pytest.mark.slow

RULES = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
CASES = {  # strategy, layers, rank
    "no pipeline, some layers recomputed, sharded by the optimizer": (
        "mesh: {dp: 4}\noptimizer_parallel: {axis: dp, shard_size: 2}\nrecompute: {layers: [0, 2]}\n",
        5,
        3,
    ),
    "a stage in the midst, selective": (
        "mesh: {pp: 4, tp: 2}\npipeline: {num_microbatches: 4, stages: {num_layers: [1, 4, 1, 1]}}\n"
        "recompute: {kind: selective, per_stage: [1, 3, 0, 0]}\nsequence_parallel: true\n",
        7,
        3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derived_equals_compiled(write, name):
    strategy, layers, rank = CASES[name]
    path = write("s.yaml", strategy + RULES)
    model = {"num_layers": layers, "hidden_size": 64, "num_heads": 8, "vocab_size": 128, "seq_len": 32}
    whole, fast = call("tests/configs/graph_worker.py", "by_depth", path, model, rank)
    assert max(fast.pop("compiled_layers")) < len(whole["layers"])
    assert whole.pop("compiled_layers") == []
    for report in (whole, fast):
        report.pop("compile_s")
    assert fast == whole
