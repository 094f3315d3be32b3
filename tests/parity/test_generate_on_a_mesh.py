# SPDX-License-Identifier: Apache-2.0
"""The same tokens under every mesh: greedy, sampled with a seed, with penalties, with int8, int4 and W8A8, int8 caches."""

import itertools
import json

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, call

from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/generate_worker.py"
NARROW = {"dp2_tp2": ("int4-asym-g64, KV int8", "w8a8"), "tp2_pp2": ("int8", "int4-g32")}
"""Formats under each mesh: each of a network of its own."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("小镇的早晨\n老人坐在河边钓鱼,孩子们在桥上跑来跑去\n春天\n")
    return path


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    found = call(WORKER, "generate", checkpoint, prompts, "one_device", *itertools.chain(*NARROW.values()))
    assert found["float32 greedy"] != found["float32 sampled"] != found["float32 penalized"]
    return found


@pytest.mark.parametrize("name", NARROW)
def test_a_mesh_gives_the_tokens_of_one_device(checkpoint, prompts, expected, name):
    kinds = ("float32", *NARROW[name])
    of_kinds = {key: value for key, value in expected.items() if key.startswith(tuple(f"{kind} " for kind in kinds))}
    assert len(of_kinds) == 2 * (3 + len(NARROW[name]))
    check(checkpoint, prompts, of_kinds, CONFIGS / f"pangu_tiny_{name}.yaml", *NARROW[name])


LATENT = {
    "ultra_moe_tiny": {},
    "2_tiny": {
        "experts": None,
        "windows": [0, 5, 7],
        "indexer": {"layers": [0, 1], "top_k": 6, "num_heads": 2, "head_dim": 16, "loss_coefficient": 0.001},
        "streams": {"num_streams": 4, "rounds": 2, "norm_layers": [1]},
    },
}


@pytest.mark.parametrize("size", LATENT)
def test_experts_latents_convolutions_and_sparse_attention_give_the_tokens_of_one_device(size, prompts, tmp_path):
    """Prompts and answers are longer than windows and than what sparse attention chooses."""
    small = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, **LATENT[size]}
    (tmp_path / "model.json").write_text(json.dumps(small))
    text = ROOT / "examples" / "small_town.txt"
    model = call(WORKER, "random_checkpoint", tmp_path, size, tmp_path / "model.json", text)
    kinds = ("int8",) if size == "ultra_moe_tiny" else ()
    alone = call(WORKER, "generate", model, prompts, "one_device", *kinds)
    assert len({token for text in alone["float32 sampled"] for token in text}) > 20
    name = "pangu_pro_moe_tiny_ep2_tp2" if size == "ultra_moe_tiny" else "pangu_tiny_tp2"
    check(model, prompts, alone, CONFIGS / f"{name}.yaml", *kinds)


def check(checkpoint, prompts, expected, strategy, *kinds):
    told = call(WORKER, "generate", checkpoint, prompts, strategy, *kinds, processes=load_strategy(strategy).mesh.size)
    (found,) = (tokens for tokens in told if tokens)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith("log-probabilities"):
            np.testing.assert_allclose(np.concatenate(found[key]), np.concatenate(value), rtol=0, atol=1e-4)
        else:
            assert found[key] == value, key
