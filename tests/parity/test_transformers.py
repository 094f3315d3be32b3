# SPDX-License-Identifier: Apache-2.0
"""transformers opens what we write, and gives our logits. Needs the extra `benchmark`: torch and transformers."""

import numpy as np
import pytest
from conftest import shared

from mindloom.checkpoint.huggingface import export_published, import_published, open_published

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

CASES = {
    "openpangu_embedded_case_a/tied": "LlamaForCausalLM",
    "openpangu_embedded_case_a/untied": "LlamaForCausalLM",
    "codegeex2_case_a": "GlmForCausalLM",
    "codegeex4_case_a": "GlmForCausalLM",
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_opens_what_is_written(name, tmp_path):
    import_published(open_published(shared(f"golden_modern/{name}")), tmp_path / "ours")
    export_published(tmp_path / "ours", tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager").eval()
    assert type(model).__name__ == CASES[name]
    golden = np.load(shared(f"golden_modern/{name}/golden.npz"))
    with torch.no_grad():
        logits = model(torch.tensor(golden["input_ids"].astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-4)
