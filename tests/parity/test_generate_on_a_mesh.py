# SPDX-License-Identifier: Apache-2.0
"""The same tokens under every mesh: greedy, sampled with a seed, with penalties, with int8 weights."""

import numpy as np
import pytest
from conftest import CONFIGS, call, in_process

from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/generate_worker.py"
NAMES = ("dp2_tp2", "tp2_pp2")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("小镇的早晨\n老人坐在河边钓鱼,孩子们在桥上跑来跑去\n春天\n")
    return path


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    found = call(WORKER, "generate", checkpoint, prompts, "one_device")
    assert found["float32 greedy"] != found["float32 sampled"] != found["float32 penalized"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_gives_the_tokens_of_one_device(checkpoint, prompts, expected, name):
    check(checkpoint, prompts, expected, CONFIGS / f"pangu_tiny_{name}.yaml")


def test_experts_that_ranks_share_out_give_the_tokens_of_one_device(checkpoint, prompts, tmp_path):
    experts = ("--num-experts", 4, "--noise", 0.05, "--out", tmp_path / "moe")
    assert in_process("tools/upcycle.py", "--checkpoint", checkpoint, *experts).code == 0
    alone = call(WORKER, "generate", tmp_path / "moe", prompts, "one_device")
    check(tmp_path / "moe", prompts, alone, CONFIGS / "pangu_pro_moe_tiny_ep2_tp2.yaml")


def check(checkpoint, prompts, expected, strategy):
    told = call(WORKER, "generate", checkpoint, prompts, strategy, processes=load_strategy(strategy).mesh.size)
    (found,) = (tokens for tokens in told if tokens)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith("log-probabilities"):
            np.testing.assert_allclose(np.concatenate(found[key]), np.concatenate(value), rtol=0, atol=1e-4)
        else:
            assert found[key] == value, key
