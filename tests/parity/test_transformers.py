# SPDX-License-Identifier: Apache-2.0
"""transformers opens what we write, gives our logits, and our scores of the lm-evaluation-harness.

Needs the extras `benchmark`, torch and transformers, and `eval`, with accelerate.
"""

import json

import numpy as np
import pytest
import tokenizers
from conftest import ROOT, shared, tool

from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer

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


LINES = [
    {"question": "The mill stands by the", "choices": ["river", "market place", "hills"], "answer": 0},
    {"question": "The farmers bring their grain. " * 12, "choices": ["The carts", "Autumn"], "answer": 1},
    {"question": "", "choices": ["The town", "honey"], "answer": 0},
]
TASK = """task: town
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""


def train(family, size, out):
    """A checkpoint of some steps, and it as transformers opens it."""
    asked = ("--model", family, "--size", size, "--steps", 30, "--seq-len", 64, "--learning-rate", 3e-3)
    done = tool("tools/train.py", "--data", ROOT / "examples/small_town.txt", *asked, "--output-dir", out)
    assert done.code == 0, done.output
    export_published(out / "checkpoint", out / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "theirs", dtype=torch.float32).eval()
    return out / "checkpoint", model


@pytest.mark.parametrize(("family", "size"), [("pangu", "embedded_tiny"), ("codegeex", "4_tiny")])
def test_the_harness_scores_requests_as_it_does_with_transformers(family, size, tmp_path):
    huggingface, instance = (pytest.importorskip(f"lm_eval.{name}") for name in ("models.huggingface", "api.instance"))
    (tmp_path / "town.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "town.yaml").write_text(TASK.replace("DATA", str(tmp_path / "town.jsonl")))
    folder, model = train(family, size, tmp_path / "run")
    asked = ("--checkpoint", folder, "--tasks", tmp_path / "town.yaml", "--output", tmp_path / "found.json")
    done = tool("tools/evaluate.py", "lm-eval", *asked)
    assert done.code == 0, done.output
    samples = json.loads((tmp_path / "found.json").read_text())["samples"]["town"]

    config = load_config(folder)[1]
    ours = load_tokenizer(family, find_tokenizer(family, folder), config)

    class Harness(huggingface.HFLM):
        """Theirs, but for the tokenizer, which is no tokenizer of transformers."""

        def tok_encode(self, string, *_, **__):
            return ours.encode(string)

        @property
        def prefix_token_id(self):
            return ours.eod_id

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, "x")), pad_token="x", eos_token="x"
    )
    theirs = Harness(model, tokenizer=words, max_length=config.seq_len, batch_size=1)
    for sample in samples:
        for argument, (answer,) in zip(sample["arguments"], sample["resps"], strict=True):
            request = instance.Instance("loglikelihood", sample["doc"], tuple(argument), 0)
            ((expected, is_greedy),) = theirs.loglikelihood([request], disable_tqdm=True)
            assert float(answer[0]) == pytest.approx(expected, rel=1e-6)
            assert str(answer[1]) == str(is_greedy)


def test_peft_opens_the_adapters_we_train_and_gives_our_logits(tmp_path):
    peft = pytest.importorskip("peft")
    folder, model = train("pangu", "embedded_tiny", tmp_path / "run")
    lines = [{"prompt": line["question"] or "Where?", "completion": f" {line['choices'][0]}."} for line in LINES] * 3
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = (
        "--lora-r",
        4,
        "--lora-targets",
        "attention.*",
        "mlp.*",
        "--steps",
        5,
        "--seq-len",
        64,
        "--learning-rate",
        1e-2,
    )
    flags = ("--from-checkpoint", folder, "--data", tmp_path / "answers.jsonl", "--batch-size", 4, *asked)
    done = tool("tools/sft.py", *flags, "--output-dir", tmp_path / "adapters")
    assert done.code == 0, done.output
    ids = np.random.default_rng(0).integers(10, load_config(folder)[1].vocab_size, (2, 33))
    np.save(tmp_path / "ids.npy", ids)
    adapters, logits = tmp_path / "adapters/checkpoint", tmp_path / "logits.npy"
    done = tool("tools/score.py", "--checkpoint", adapters, "--ids", tmp_path / "ids.npy", "--logits-out", logits)
    assert done.code == 0, done.output
    given = torch.tensor(ids)
    with torch.no_grad():
        before = model(given).logits.numpy()
        theirs = peft.PeftModel.from_pretrained(model, adapters)(given).logits.numpy()
    np.testing.assert_allclose(np.load(logits), theirs, rtol=0, atol=2e-5)
    assert np.abs(theirs - before).max() > 0.1
