# SPDX-License-Identifier: Apache-2.0
"""Rows of one batch that go through different adapters get what each adapter merged into the model gives."""

import numpy as np
import pytest
from conftest import CONFIGS, call
from serving import adapter_folder

from sporeloom.models.adapters import LoRAConfig
from sporeloom.strategy.loader import load_strategy

WORKER = "tests/parity/multi_lora_worker.py"
LORAS = (
    LoRAConfig(r=4, lora_alpha=8.0, target_modules=("attention.query", "attention.value")),
    LoRAConfig(r=2, lora_alpha=3.0, use_rslora=True, target_modules=("attention.*", "mlp.up", "mlp.down")),
)
DEVIATION = 0.16
"""Of the adapters' weights. With 0.2 they outweigh the model: where rounding changed its weights by 6e-8 of themselves, the
log-probability of one token changed by 6e-6, and of those around it by 1e-6."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def modules(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    drawn = enumerate(LORAS)
    return [str(adapter_folder(folder / str(seed), checkpoint, lora, seed, DEVIATION)) for seed, lora in drawn]


@pytest.fixture(scope="module")
def prompts():
    draw = np.random.default_rng(5)
    begin = draw.integers(10, 200, 34).tolist()  # two chunks that a row holds for whoever comes next
    return [begin + draw.integers(10, 200, more).tolist() for more in (1, 6)]


@pytest.fixture(scope="module")
def requests(prompts):
    return [(prompt, adapter) for prompt in prompts for adapter in (0, 1, 2, 1, 0, 2)]


@pytest.fixture(scope="module")
def expected(checkpoint, modules, prompts, requests):
    found = call(WORKER, "merged", [str(checkpoint), *modules], prompts)
    assert len({str([tokens for tokens, _ in texts]) for texts in found}) >= 2
    assert len({round(texts[0][1][0], 2) for texts in found}) == 3
    return [found[adapter][prompts.index(prompt)] for prompt, adapter in requests]


def equal(found, expected, tolerance):
    for (tokens, scores), (others, other_scores) in zip(found, expected, strict=True):
        assert tokens == others
        np.testing.assert_allclose(scores, other_scores, rtol=0, atol=tolerance)


def test_one_device(checkpoint, modules, requests, expected):
    found = call(WORKER, "together", str(checkpoint), modules, requests)
    equal(found["together"], expected, 5e-6)
    equal(found["alone"], found["together"], 0.0)
    assert found["reused"] > 0


def test_with_quantized_weights(checkpoint, modules, requests):
    """int4; int8: test_drafts."""
    weights = "int4-g32"
    found = call(WORKER, "together", str(checkpoint), modules, requests, None, weights)
    plain = call(WORKER, "merged", [str(checkpoint)], [prompt for prompt, adapter in requests if adapter == 0], weights)
    equal([each for each, (_, adapter) in zip(found["together"], requests, strict=True) if not adapter], plain[0], 1e-5)
    equal(found["alone"], found["together"], 0.0)
    assert len({round(found["together"][place][1][0], 2) for place in (0, 1, 2)}) == 3


@pytest.mark.parametrize("name", ["dp2_tp2", "tp2_pp2"])
def test_a_mesh(checkpoint, modules, requests, expected, name):
    strategy = CONFIGS / f"pangu_tiny_{name}.yaml"
    size = load_strategy(strategy).mesh.size
    (found,) = filter(None, call(WORKER, "together", str(checkpoint), modules, requests, str(strategy), processes=size))
    equal(found["together"], expected, 5e-6)
