# SPDX-License-Identifier: Apache-2.0
"""Perplexity of poets that a model has not read, by number type of weights and of the KV cache.

Trains a small model on ../shared/data/zh_poetry.jsonl without a twentieth of the poets, and computes the perplexity of their
poems through the KV cache, with every format of weights, and with a cache of int8. Writes benchmarks/results/quantization.md.
`python benchmarks/quantization.py [--steps N] [--checkpoint FOLDER]`
"""

import argparse
import hashlib
import json
import math
import os
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
        found = {}
        for case in CASES:
            found[case] = perplexity(checkpoint, poems, *case)
            print(*case, *found[case], flush=True)
    exact = found["float32", "auto"][0]
    lines = [
        f"A model of 1 million parameters (`--size embedded_tiny`), {arguments.steps} steps of {BATCH} x {MAX_TOKENS} tokens "
        f"on poems; perplexity of {len(poems)} poems by poets that it has not read, through the KV cache; load {load:.1f}. "
        "Embedding and head are int8 with w8a8 and every int4.",
        "",
        "| weights | KV cache | perplexity | against float32 | MB of weights | MB of cache (256 slots) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {weights} | {kv_cache} | {value:.3f} | {value / exact - 1:+.2%} | {held / 1e6:.2f} | {cache / 1e6:.3f} |"
        for (weights, kv_cache), (value, held, cache) in found.items()
    ]
    write_report(RESULT, "Accuracy of quantized weights and caches", "quantization.py", lines)


if __name__ == "__main__":
    main()
