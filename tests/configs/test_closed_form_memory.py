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
FEW_SCORES = {"attention": "flash", "dropout_rate": 0.0, "num_layers": 2, "vocab_size": 32768}
WORDS = {
    "of a table": ("mesh: {tp: 2}\n", 8, {"tied_embedding": False}),
    "of a table, state is sharded": (
        "mesh: {dp: 2, tp: 2}\noptimizer_parallel: {axis: dp}\n",
        4,
        {"tied_embedding": False},
    ),
    "of a table that is the head": ("mesh: {tp: 2}\n", 8, {}),
}


def alive_and_planned(write, settings, accumulate, model):
    """Peak bytes of each stage."""
    rules = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
    strategy, model = write("strategy.yaml", settings + rules), write("model.json", json.dumps(model))
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
    return call(WORKER, "totals", [*flags, "--batch-size", "16", "--accumulate", str(accumulate)])


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_planner_counts_what_is_alive_at_the_peak(write, name):
    for live, planned in alive_and_planned(write, *STRATEGIES[name], MODEL):
        assert planned == pytest.approx(live, rel=0.12)


@pytest.mark.parametrize("name", WORDS)
def test_the_planner_counts_gradients_of_words_that_each_rank_adds_up(write, name):
    settings, accumulate, changes = WORDS[name]
    for live, planned in alive_and_planned(write, settings, accumulate, MODEL | FEW_SCORES | changes):
        assert planned == pytest.approx(live, rel=0.03)
