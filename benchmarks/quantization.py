# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model on poets that it has not read, by number type of weights and of the KV cache.

Trains a small model on ../shared/data/zh_poetry.jsonl without a twentieth of the poets. With every format of weights, and
with a cache of int8, it computes the perplexity of their poems through the KV cache, and has the lm-evaluation-harness ask
which of four orders of its characters is the last line of a poem. Writes benchmarks/results/quantization.md.
`python benchmarks/quantization.py [--steps N] [--checkpoint FOLDER]`
"""

import argparse
import hashlib
import json
import math
import os
import random
import tempfile
from pathlib import Path

import numpy as np
from report import ROOT, sporeloom, write_report

from sporeloom.core.lines import split_lines

RESULT = Path(__file__).resolve().parent / "results" / "quantization.md"
POEMS = ROOT.parent / "shared" / "data" / "zh_poetry.jsonl"
NAMES = ("float32", "int8", "w8a8", "int4", "int4-g64", "int4-g32", "int4-asym", "int4-asym-g32")
CASES = [
    *((name, "auto") for name in NAMES),
    ("float32", "int8"),
    ("int8", "int8"),
    ("w8a8", "int8"),
    ("int4-g32", "int8"),
]
"""Weights and KV cache."""
TASK = """\
task: last_lines
dataset_path: json
dataset_kwargs:
  data_files: {validation: QUESTIONS}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{context}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""
NUM_CHOICES, MAX_CHARACTERS, MARKS = 4, 120, "，。？！；、"
MAX_TOKENS, BATCH, EVERY = 128, 8, 3
"""Tokens and sequences of a step; of the poems every third is read."""


def is_held_out(text: str) -> bool:
    """Whether the poet, in the second line, is one of those that are held out."""
    poet = text.split("\n")[1] if "\n" in text else text
    return hashlib.sha256(poet.encode()).digest()[0] % 20 == 0


def split(folder: Path) -> tuple[Path, list[str]]:
    """The file to train on, and the poems that are held out."""
    lines = split_lines(POEMS.read_text(encoding="utf-8"))
    held_out = [json.loads(line)["text"] for line in lines if is_held_out(json.loads(line)["text"])]
    path = folder / "poems.jsonl"
    known = [line for line in lines if not is_held_out(json.loads(line)["text"])]
    path.write_text("\n".join(known[::EVERY]) + "\n", encoding="utf-8")
    return path, held_out


def train(folder: Path, data: Path, steps: int) -> Path:
    """A checkpoint of a small model."""
    model = ("--size", "embedded_tiny", "--seq-len", MAX_TOKENS, "--batch-size", BATCH, "--learning-rate", 3e-3)
    sporeloom("train", "--data", data, *model, "--steps", steps, "--output-dir", folder / "run")
    return folder / "run" / "checkpoint"


def perplexity(checkpoint: Path, poems: list[str], weights: str, kv_cache: str) -> tuple[float, int, int]:
    """Of the poems' tokens after the first; the bytes of weights and of the cache."""
    import mindspore as ms  # noqa: PLC0415 (after what trains in processes of its own)

    from sporeloom.checkpoint.model_folder import load_config  # noqa: PLC0415
    from sporeloom.data.tokenizer import folder_tokenizer, text_prompt  # noqa: PLC0415
    from sporeloom.inference.mixed import cached  # noqa: PLC0415
    from sporeloom.inference.model import CACHE, load_model  # noqa: PLC0415
    from sporeloom.inference.score import negative_log_likelihood  # noqa: PLC0415
    from sporeloom.runtime.engine import Engine  # noqa: PLC0415
    from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

    ms.set_device("CPU")
    family, config = load_config(checkpoint)
    tokenizer = folder_tokenizer(family, checkpoint, config)
    engine, shape = Engine.start(SINGLE_DEVICE), (1, 256)
    net = load_model(checkpoint, family, config, SINGLE_DEVICE, shape, weights, kv_cache=kv_cache)
    decoding = cached(engine, net, config, *shape)
    total, count = 0.0, 0
    for poem in poems:
        ids = list(text_prompt(tokenizer, poem).tokens)[:MAX_TOKENS]
        rest, logits = ids, []
        while rest:
            chunk = decoding.next_chunks({0: rest}, True)[0]
            logits.append(decoding.step({0: chunk}, {}, every=True)[0])
            rest = rest[len(chunk) :]
        decoding.trim(0, 0)
        total += negative_log_likelihood(np.concatenate(logits)[None, :-1], np.asarray([ids[1:]])).sum()
        count += len(ids) - 1
    held = sum(parameter.nbytes for parameter in net.get_parameters() if CACHE not in parameter.name)
    return math.exp(total / count), held, decoding.cache_bytes


def write_task(folder: Path, poems: list[str]) -> tuple[Path, int]:
    """A task of the harness: each poem without its last line, and that line among others of the same characters."""
    draw, questions = random.Random(0), []
    for before, end, last in (poem.rpartition("\n") for poem in poems if len(poem) <= MAX_CHARACTERS):
        places = [place for place, letter in enumerate(last) if letter not in MARKS]
        choices = {last}
        while len({last[place] for place in places}) > 3 and len(choices) < NUM_CHOICES:
            letters = list(last)
            for place, letter in zip(places, draw.sample([last[of] for of in places], len(places)), strict=True):
                letters[place] = letter
            choices.add("".join(letters))
        if len(choices) == NUM_CHOICES:
            shown = draw.sample(sorted(choices), NUM_CHOICES)
            questions.append({"context": before + end, "choices": shown, "answer": shown.index(last)})
    lines = [json.dumps(question, ensure_ascii=False) for question in questions]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "last_lines.yaml").write_text(
        TASK.replace("QUESTIONS", str(folder / "questions.jsonl")), encoding="utf-8"
    )
    return folder / "last_lines.yaml", len(questions)


def asked(task: Path, checkpoint: Path, weights: str, kv_cache: str) -> tuple[float, float, list[int]]:
    """Accuracy by the harness, its standard error, and the number of the chosen line of each question."""
    path = task.with_name(f"{weights}-{kv_cache}.json")
    flags = ("--checkpoint", checkpoint, "--weights", weights, "--kv-cache", kv_cache, "--output", path)
    sporeloom("evaluate", "lm-eval", "--tasks", task, *flags, HF_DATASETS_OFFLINE="1")
    told = json.loads(path.read_text(encoding="utf-8"))
    (scores,) = told["results"].values()
    (samples,) = told["samples"].values()
    chosen = [
        int(np.argmax([float(score) for score, _ in sample["filtered_resps"]]))
        for sample in sorted(samples, key=lambda sample: sample["doc_id"])
    ]
    return scores["acc,none"], scores["acc_stderr,none"], chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--poems", type=int, default=100, help="number of held-out poems")
    parser.add_argument("--checkpoint", type=Path, help="of an earlier training, which is not repeated")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        data, held_out = split(Path(scratch))
        checkpoint = arguments.checkpoint or train(Path(scratch), data, arguments.steps)
        poems = held_out[:: max(1, len(held_out) // arguments.poems)]
        task, num_questions = write_task(Path(scratch), held_out)
        found, scores = {}, {}
        for case in CASES:
            scores[case] = asked(task, checkpoint, *case)
            found[case] = perplexity(checkpoint, poems, *case)
            print(*case, *found[case], *scores[case][:2], flush=True)
    exact, chosen = found["float32", "auto"][0], scores["float32", "auto"][2]
    same = {case: float(np.mean(np.equal(of_case[2], chosen))) for case, of_case in scores.items()}
    lines = [
        f"A model of 1 million parameters (`--size embedded_tiny`), {arguments.steps} steps of {BATCH} x {MAX_TOKENS} tokens "
        f"on poems; load {load:.1f}. Perplexity of {len(poems)} poems by poets that it has not read, through the KV cache. "
        f"Accuracy by the lm-evaluation-harness: which of {NUM_CHOICES} orders of its characters is the last line of a poem, "
        f"{num_questions} questions by these poets ({1 / NUM_CHOICES:.0%} by chance); and the share of questions that get "
        "the same answer as from float32. Embedding and head are int8 with w8a8 and every int4.",
        "",
        "| weights | KV cache | perplexity | against float32 | accuracy | same answers | MB of weights | MB of 256 slots |",
        "|---" * 8 + "|",
    ]
    for case in CASES:
        value, held, cache = found[case]
        accuracy, error, _ = scores[case]
        lines.append(
            f"| {' | '.join(case)} | {value:.3f} | {value / exact - 1:+.2%} | {accuracy:.1%} ± {error:.1%} | "
            f"{same[case]:.1%} | {held / 1e6:.2f} | {cache / 1e6:.3f} |"
        )
    write_report(RESULT, "Accuracy of quantized weights and caches", "quantization.py", lines)


if __name__ == "__main__":
    main()
