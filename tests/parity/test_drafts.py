# SPDX-License-Identifier: Apache-2.0
"""Drafts and the prefix cache change no bit of an answer: sampled, greedy, with penalties, grammars, stop texts, adapters."""

import numpy as np
import pytest
from conftest import CONFIGS, call
from serving import adapter_folder

from sporeloom.models.adapters import LoRAConfig

WORKER = "tests/parity/drafts_worker.py"
LORA = LoRAConfig(r=4, lora_alpha=8.0, target_modules=("attention.query", "attention.value"))
pytestmark = pytest.mark.slow


def check(found, kind):
    """All ways give the answers of each request alone."""
    assert found["kind"] == kind
    for way in ("together", "drafts", "warm"):
        assert found[way] == found["alone"], way
    assert found["drafts alone"] == found["alone"][: len(found["drafts alone"])]
    assert 0 < found["accepted"] <= found["drafted"] and found["reused"] > 0
    assert len({str(each) for each in found["alone"]}) > len(found["alone"]) // 2


@pytest.fixture(scope="module")
def on_one_device(checkpoint):
    return call(WORKER, "mixed", str(checkpoint))


def test_one_device(on_one_device):
    check(on_one_device, "RaggedDecoder")


def test_a_mesh(checkpoint, on_one_device):
    strategy = CONFIGS / "pangu_tiny_tp2.yaml"
    (found,) = filter(None, call(WORKER, "mixed", str(checkpoint), str(strategy), processes=2))
    check(found, "CachedDecoder")
    for ours, other in zip(found["warm"], on_one_device["alone"], strict=True):
        assert [(token, reason) for token, _, reason, _ in ours] == [(token, reason) for token, _, reason, _ in other]
        scores = [[score for _, score, _, _ in each] for each in (ours, other)]
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)


def test_rows_that_go_through_adapters(checkpoint, tmp_path):
    modules = [str(adapter_folder(tmp_path / "adapter", checkpoint, LORA, 1))]
    check(call(WORKER, "mixed", str(checkpoint), None, modules, True, 9), "CachedDecoder")
