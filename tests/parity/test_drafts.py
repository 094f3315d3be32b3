# SPDX-License-Identifier: Apache-2.0
"""Drafts and the prefix cache change no bit of an answer: sampled, greedy, with penalties, grammars, stop texts, adapters."""

import dataclasses
import shutil

import numpy as np
import pytest
from conftest import CONFIGS, call
from serving import adapter_folder

from sporeloom.checkpoint.model_folder import load_config, save_checkpoint
from sporeloom.data.tokenizer import find_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.parameters import parameter_shapes

WORKER = "tests/parity/drafts_worker.py"
LORA = LoRAConfig(r=4, lora_alpha=8.0, target_modules=("attention.query", "attention.value"))
pytestmark = pytest.mark.slow


def random_draft(folder, checkpoint, **fields):
    """A smaller model with other weights and the same tokenizer."""
    family, config = load_config(checkpoint)
    config = dataclasses.replace(config, **{"num_layers": 1, "seq_len": 2 * config.seq_len, **fields})
    draw = np.random.default_rng(7)
    shapes = parameter_shapes(config).items()
    weights = {name: draw.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes}
    file = find_tokenizer(family, checkpoint)
    save_checkpoint(folder, weights, family, config, lambda partial: shutil.copy(file, partial))
    return folder


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
    check(call(WORKER, "mixed", str(checkpoint), None, modules, "int8"), "CachedDecoder")


EVERY_PLACE = [1, 1, 1]
"""Different logits of each of three tokens."""


def test_each_place_of_a_batch_gives_the_same_bits(checkpoint, tmp_path):
    """At once by kernels, or one after another by MindSpore's operators, whose products depend on the place."""
    modules = [str(adapter_folder(tmp_path / "adapter", checkpoint, LORA, 1))]
    told = call(WORKER, "places", str(checkpoint), [("float32", "auto", "1"), ("int8", "int8", "0")], None, modules)
    assert told == [[EVERY_PLACE, True], [EVERY_PLACE, False]]


def test_so_does_each_place_on_a_mesh(checkpoint, tmp_path):
    modules = [str(adapter_folder(tmp_path / "adapter", checkpoint, LORA, 1))]
    arguments = str(checkpoint), [("int4-g32", "int8", "1")], str(CONFIGS / "pangu_tiny_tp2.yaml"), modules
    (told,) = filter(None, call(WORKER, "places", *arguments, processes=2))
    assert told == [[EVERY_PLACE, True]]


def check_models(found, right, least):
    """No answer is another one; drafts of the model itself are right where the most likely token is chosen, those of random
    weights hardly ever.

    Args:
        right: fraction of the model's own greedy drafts, at least.
        least: number of drafted tokens that shows anything.
    """
    for name in found.keys() - {"mixed", "greedy"}:
        answers, counts = found[name]["answers"], found[name]["counts"]
        assert answers["mixed"] == answers["warm"] == found["mixed"] and answers["greedy"] == found["greedy"], name
        assert all(drafted > least for drafted, *_ in counts.values()) and counts["warm"][2] > 0, counts
        drafted, accepted, _ = counts["greedy"]
        assert accepted < 0.5 * drafted if name == "other" else accepted >= right * drafted, counts


def test_a_model_that_drafts_for_itself_and_one_with_other_weights(checkpoint, tmp_path):
    other = random_draft(tmp_path / "other", checkpoint)
    check_models(call(WORKER, "by_models", str(checkpoint), [str(checkpoint), str(other)], None, 2), 1.0, 40)


def test_models_that_draft_on_a_mesh(checkpoint, tmp_path):
    """On the second rank, which is the one that chooses; one of them in bfloat16."""
    other = random_draft(tmp_path / "other", checkpoint, compute_dtype="bfloat16")
    strategy = CONFIGS / "pangu_tiny_pp2.yaml"
    found = call(WORKER, "by_models", str(checkpoint), [str(checkpoint), str(other)], str(strategy), processes=2)
    check_models(next(filter(None, found)), 0.95, 10)
