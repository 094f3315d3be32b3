# SPDX-License-Identifier: Apache-2.0
"""A step that is derived from networks with fewer layers equals the one that is compiled at full depth: the graphs, and the
collectives, memory timelines and simulated times that follow from them."""

import json

import pytest
from conftest import CONFIGS, call

pytestmark = pytest.mark.slow

SMALL = {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 128, "seq_len": 32}
LLAMA = {
    **{
        "position": "rotary",
        "norm": "rms",
        "gated_mlp": True,
        "activation": "silu",
        "num_kv_heads": 2,
        "qkv_bias": False,
    },
    **{"mlp_bias": False, "output_bias": False, "tied_embedding": False, "query_layer": False},
}
LATENT = {"query_width": 48, "kv_width": 32, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "first_dense_layers": 1}
CASES = {  # strategy, rules, flags, model, number of graphs that are derived
    "recomputed, ZeRO, dropout, tied embeddings": (
        "mesh: {pp: 4, dp: 2}\npipeline: {num_microbatches: 4}\nrecompute: {layers: all}\noptimizer_parallel: {axis: dp}\n",
        ("decoder", "--compute-dtype", "bfloat16"),
        {"dropout_rate": 0.1},
        2,
    ),
    "virtual stages": (
        "mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 4, virtual_stages: 2}\nsequence_parallel: true\n"
        "recompute: {kind: selective, layers: all}\n",
        ("decoder",),
        {},
        2,
    ),
    "Llama's parts, ZeRO-3, accumulated gradients": (
        "mesh: {dp: 2, tp: 2}\noptimizer_parallel: {axis: dp, reshard_after_forward: true}\n",
        ("decoder", "--accumulate", "2"),
        LLAMA,
        2,
    ),
    "one graph, scaled loss": ("mesh: {dp: 2}\n", ("decoder", "--compute-dtype", "float16"), {"query_layer": False}, 1),
    "windows in every other layer": (
        "mesh: {pp: 2}\npipeline: {num_microbatches: 2}\n",
        ("decoder",),
        {
            **LLAMA,
            "num_kv_heads": None,
            "num_layers": 12,
            "latent": LATENT,
            "windows": [8 * (i % 2) for i in range(12)],
        },
        2,
    ),
    "the first layer is dense, the others have experts": (
        "mesh: {dp: 2, ep: 2}\n",
        ("experts",),
        {**LLAMA, "num_kv_heads": 4, "experts": MIXTURE},
        0,
    ),
    "recomputed irregularly": (
        "mesh: {pp: 2, dp: 2}\npipeline: {num_microbatches: 2}\nrecompute: {layers: [0, 1, 4, 6]}\n",
        ("decoder",),
        {},
        0,
    ),
    "inference": ("mesh: {tp: 2}\n", ("decoder", "--inference"), LLAMA, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_derived_equals_compiled(write, name):
    strategy, (rules, *flags), model, derived = CASES[name]
    path = write("strategy.yaml", f"{strategy}rules: {CONFIGS}/rules/{rules}.yaml\n")
    config = write("model.json", json.dumps(SMALL | model))
    given = ["--strategy", str(path), "--config", str(config), "--ranks", "0", *flags]
    found = call("tests/configs/fewer_layers_worker.py", "compared", given)
    assert found["differences"] == []
    assert found["derived"] == derived
