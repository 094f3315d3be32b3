# SPDX-License-Identifier: Apache-2.0
"""Drafts change no bit of an answer of models with int8 or int4 matrices, in bfloat16, or with adapters."""

import pytest
from conftest import call
from serving import adapter_folder
from test_drafts import WORKER, random_draft

from sporeloom.models.adapters import LoRAConfig

LORA = LoRAConfig(r=4, lora_alpha=8.0, target_modules=("attention.query", "attention.value"))
HALF = {"compute_dtype": "bfloat16"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "weights", "fields", "has_adapters"),
    [
        ("ngram", "int4", {}, True),
        ("model", "float32", HALF, True),
        ("model", "int8", {}, False),
    ],
)
def test_no_bit_of_an_answer_changes(kind, weights, fields, has_adapters, checkpoint, tmp_path):
    folder = random_draft(tmp_path / "model", checkpoint, **fields)
    modules = [str(adapter_folder(tmp_path / "adapter", folder, LORA, 1))] if has_adapters else []
    found = call(WORKER, "combined", str(folder), kind, weights, modules)
    assert found["drafts"] == found["plain"]
    assert 0 < found["accepted"] <= found["drafted"]
