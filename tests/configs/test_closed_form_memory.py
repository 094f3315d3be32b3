# SPDX-License-Identifier: Apache-2.0
"""The planner's memory of a device agrees with memory timelines where attention makes scores and drops some of them."""

import json

import pytest
from conftest import CONFIGS, call

WORKER = "tests/configs/closed_form_worker.py"
MODEL = {
    **{"hidden_size": 512, "num_layers": 4, "num_heads": 8, "seq_len": 1024, "vocab_size": 16384, "dropout_rate": 0.1},
    **{"compute_dtype": "bfloat16", "attention": "plain", "query_layer": False, "tied_embedding": True},
}
STRATEGIES = {
    "one pass": ("mesh: {dp: 2}\n", 1),
    "gradients of two passes": ("mesh: {dp: 2}\n", 2),
    "logits are sharded": ("mesh: {tp: 4}\nsequence_parallel: true\nrecompute: {layers: all, kind: selective}\n", 2),
    "state is sharded": ("mesh: {dp: 4}\noptimizer_parallel: {axis: dp, shard_accumulated_gradients: true}\n", 4),
    "layers are recomputed": ("mesh: {tp: 2}\nrecompute: {layers: all}\n", 4),
    "stages": ("mesh: {pp: 2, dp: 2}\npipeline: {num_microbatches: 4}\n", 1),
    "stages are recomputed": ("mesh: {pp: 2}\npipeline: {num_microbatches: 8}\nrecompute: {layers: all}\n", 1),
    "stages run down and up": (
        "mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 8, schedule: dualpipe_v, virtual_stages: 2}\n",
        1,
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_planner_counts_what_is_alive_at_the_peak(write, name):
    settings, accumulate = STRATEGIES[name]
    rules = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
    strategy, model = write("strategy.yaml", settings + rules), write("model.json", json.dumps(MODEL))
    flags = [
        "--strategy",
        str(strategy),
        "--ranks",
        "all",
        "--model",
        "pangu",
        "--size",
        "tiny",
        "--config",
        str(model),
    ]
    for live, planned in call(WORKER, "totals", [*flags, "--batch-size", "16", "--accumulate", str(accumulate)]):
        assert planned == pytest.approx(live, rel=0.12)
