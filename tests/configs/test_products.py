# SPDX-License-Identifier: Apache-2.0
"""FLOPs of plans are those of graphs: latent and sparse attention, residual streams, multi-token prediction."""

import dataclasses
import json
import math

import pytest
from conftest import ROOT, call

from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize
from sporeloom.planner.closed_forms import job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.step_time import flops_per_device
from sporeloom.strategy.loader import load_strategy

SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "seq_len": 64, "vocab_size": 256}
CASES = {
    "ultra_moe_tiny": {},
    "2_tiny": {
        "experts": None,
        "windows": [0, 5, 7],
        "indexer": {"layers": [0], "top_k": 16, "num_heads": 2, "head_dim": 16},
        "streams": {"num_streams": 4, "rounds": 4, "norm_layers": [1]},
    },
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", CASES)
def test_plans_count_the_flops_of_graphs(size, write):
    rules = "parallel_configs/rules/experts.yaml"
    path = write("s.yaml", f"mesh: {{dp: 2}}\nrules: {rules}\nrecompute: {{layers: all}}\n")
    path.write_text(path.read_text().replace(rules, str(ROOT / rules)))
    given = {**SMALL, **CASES[size]}
    asked = ("--size", size, "--strategy", path, "--config", write("m.json", json.dumps(given)), "--ranks", "all")
    values = call("tests/configs/graph_worker.py", "dry_run_values", list(map(str, asked)))
    config = ModelConfig(**{**size_config("pangu", size).to_dict(), **given})
    job = values["job"]
    dims, tokens = of_decoder(config), job["batch_size"] * config.seq_len
    planned = job_of(load_strategy(path), config, job["batch_size"])
    assert {rank["parameter_bytes"] for rank in values["ranks"]} == set(parameter_bytes(dims, planned))
    flops = {name: sum(rank["flops"].get(name, 0) for rank in values["ranks"]) for name in values["ranks"][0]["flops"]}
    again = flops.pop("recompute")
    more_rows = 0
    if config.experts:  # that experts have room for
        more_rows = dims.experts_per_token * (planned.expert_rows(dims) - 1) * dims.expert_parameters
    rows = 6 * tokens * (dims.expert_layers + config.num_mtp_layers) * more_rows
    assert sum(flops.values()) == pytest.approx(dims.model_flops(tokens) + rows, rel=0.01)
    model, with_recomputation = (2 * each for each in flops_per_device(dims, planned))
    assert model == pytest.approx(dims.model_flops(tokens))
    rows = 2 * tokens * dims.expert_layers * more_rows
    assert again <= (with_recomputation - model + rows) * 1.01  # graphs leave out what no gradient needs
    assert again >= 0.8 * (with_recomputation - model + rows)
    assert dims.model_flops(tokens) > 1.02 * dataclasses.replace(dims, products=None).model_flops(tokens)


def test_layers_of_multi_token_prediction_are_in_the_last_stage(write):
    rules = f"rules: {ROOT}/parallel_configs/rules/experts.yaml\npipeline: {{num_microbatches: 2}}\n"
    strategy = load_strategy(write("s.yaml", f"mesh: {{pp: 2, dp: 2, ep: 2}}\n{rules}"))
    config = ModelConfig(**{**size_config("pangu", "ultra_moe_tiny").to_dict(), **SMALL, "num_layers": 4})
    held = [0, 0]
    for parameter in parallelize(family_module("pangu", "model").ModelWithLoss(config), strategy).parameters:
        held[parameter.stage] += 4 * math.prod(parameter.local_shape)
    assert parameter_bytes(of_decoder(config), job_of(strategy, config, 4)) == held
