# SPDX-License-Identifier: Apache-2.0
"""The planner's closed form agrees with graphs of latent attention, convolutions and sinks, sparse attention, residual
streams and multi-token prediction within 5 %: the time of a simulated step, and the activations of its memory timeline."""

import json

import pytest
from conftest import CONFIGS, call

pytestmark = pytest.mark.slow

WORKER = "tests/configs/closed_form_worker.py"
LATENT = {"query_width": 1024, "kv_width": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
INDEXER = {"layers": [0, 1], "top_k": 2048, "num_heads": 24, "head_dim": 128}
BASE = {
    "compute_dtype": "bfloat16",
    "num_layers": 2,
    "windows": [],
    "experts": None,
    "num_mtp_layers": 0,
    "latent": LATENT,
    "indexer": None,
    "streams": None,
}
PLAIN = {"attention": "plain"}
PARTS = {
    "latent": {},
    "latent_plain": PLAIN,
    "convolutions_and_sinks": {"latent": {**LATENT, "conv_width": 3, "num_sinks": 128}},
    "trained_indexer": {"indexer": {**INDEXER, "loss_coefficient": 0.01}},
    "streams": {"streams": {"num_streams": 4, "rounds": 4, "norm_layers": [1]}},
    "multi_token_prediction": {"num_mtp_layers": 1},
}
ALL = PARTS["convolutions_and_sinks"] | {"indexer": INDEXER} | PARTS["streams"] | PARTS["multi_token_prediction"]
ONE = "mesh: {dp: 1}\n"
MESHES = {
    "tp": "mesh: {tp: 4}\n",
    "sp": "mesh: {tp: 4}\nsequence_parallel: true\n",
    "cp": "mesh: {cp: 2}\n",
    "cp_plain": "mesh: {cp: 2}\n",
    "recompute": f"{ONE}recompute: {{layers: all}}\n",
    "pp": "mesh: {pp: 2}\npipeline: {num_microbatches: 8}\n",
}


def compared(write, given, settings):
    rules = f"rules: {CONFIGS / 'rules/experts.yaml'}\n"
    strategy, model = write("strategy.yaml", settings + rules), write("model.json", json.dumps({**BASE, **given}))
    batch = ["--batch-size", "8", *([] if "pp" in settings else ["--accumulate", "8"])]
    named = ["--model", "pangu", "--size", "2_flash", "--config", str(model), "--seq-len", "4096"]
    return call(WORKER, "both", ["--strategy", str(strategy), "--ranks", "all", *named, *batch])


def check(found):
    simulated, planned = found["seconds"]
    assert planned == pytest.approx(simulated, rel=0.05)
    for held, by_formula in found["activations"]:
        assert by_formula == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(part, write):
    check(compared(write, PARTS[part], ONE))


@pytest.mark.parametrize("mesh", MESHES)
def test_all_parts_together(mesh, write):
    check(compared(write, ALL | (PLAIN if mesh == "cp_plain" else {}), MESHES[mesh]))
