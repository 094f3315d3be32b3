# SPDX-License-Identifier: Apache-2.0
"""Random-LTD: what a step costs by the tokens that middle layers see, and what a tiny model learns from fewer of them.

Needs ../shared/data (Chinese text; the last tenth is held out). Writes benchmarks/results/random_ltd.md and random_ltd.png.
"""

import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from mindspore import Tensor, set_device
from report import ROOT, metrics, sporeloom, write_report

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.lines import file_lines
from sporeloom.data.batch import make_batch
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer
from sporeloom.inference.model import load_model
from sporeloom.inference.score import negative_log_likelihood
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

TEXT = ROOT.parent / "shared" / "data" / "zh_poetry.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "random_ltd.md"
SEEDS = (1, 2, 3)
MODEL = {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 1024, "seq_len": 64}
LENGTH, BATCH, LEAST, GROWS, STEPS = MODEL["seq_len"], 16, 32, 2000, 4000
EQUAL = 3437  # steps without dropping that have as many layer-tokens as random-LTD's
RATE, OTHER_RATES = 2e-3, (1e-3,)
RANDOM_LTD = "random-LTD"
DROPPING = (
    *("--random-ltd-min-value", LEAST, "--random-ltd-seq-per-step", 16),
    *("--random-ltd-require-steps", GROWS),
)
RUNS = {  # name -> steps and flags
    "all tokens": (STEPS, ("--learning-rate", RATE)),
    "all tokens, fewer steps": (EQUAL, ("--learning-rate", RATE)),
    RANDOM_LTD: (STEPS, ("--learning-rate", RATE, *DROPPING)),
}
FIRST_SEED_ALONE = {f"all tokens, rate {rate:g}": (STEPS, ("--learning-rate", rate)) for rate in OTHER_RATES}
WIDE = {"num_layers": 12, "hidden_size": 256, "num_heads": 8, "seq_len": 512}


def step_times(folder, text):
    """(tokens seen, median seconds of a step, layer-tokens of a step) of a wider model; all in one run."""
    config = folder / "wide.json"
    config.write_text(json.dumps(WIDE))
    flags = ("--random-ltd-min-value", 128, "--random-ltd-seq-per-step", 128, "--random-ltd-require-steps", 21)
    out, steps = folder / "wide", 28
    words = ("--seq-len", 512, "--batch-size", 4, "--steps", steps, "--dropout", 0, "--output-dir", out)
    sporeloom("train", "--data", text, "--config", config, *words, *flags)
    found, before = {}, 0
    for step in metrics(out):
        found.setdefault(step["kept_tokens"], []).append((step["step_time_s"], step["consumed_layer_tokens"] - before))
        before = step["consumed_layer_tokens"]
    # The first of each waits for the graph.
    return [(kept, statistics.median(t for t, _ in of[1:]), of[0][1]) for kept, of in found.items()]


def held_out_loss(engine, checkpoint, texts):
    """Nats a token, of whole windows."""
    family, config = load_config(checkpoint)
    tokenizer = load_tokenizer(family, find_tokenizer(family, checkpoint), config)
    tokens = np.array([i for text in texts for i in (*tokenizer.encode_document(text), tokenizer.eod_id)])
    rows = (len(tokens) - 1) // LENGTH // 32 * 32
    windows = np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in range(rows)])
    net, losses = load_model(checkpoint, family, config, SINGLE_DEVICE), []
    for part in windows.reshape(-1, 32, LENGTH + 1)[:20]:
        batch = make_batch(part, config.eod_id, None)
        logits = engine.run(net, Tensor(batch.tokens), Tensor(batch.positions)).asnumpy()
        losses.append(negative_log_likelihood(logits.reshape(*batch.tokens.shape, -1), batch.labels).mean())
    return float(np.mean(losses))


def main():
    set_device("CPU")
    engine, folder = Engine.start(SINGLE_DEVICE), Path(tempfile.mkdtemp(prefix="random-ltd-"))
    lines = file_lines(TEXT)
    cut = len(lines) * 9 // 10
    text, held_out = folder / "train.jsonl", [json.loads(line)["text"] for line in lines[cut:]]
    text.write_text("".join(line + "\n" for line in lines[:cut]))
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL))
    times = step_times(folder, text)
    jobs = [(seed, name, RUNS[name]) for seed in SEEDS for name in RUNS]
    jobs += [(SEEDS[0], name, run) for name, run in FIRST_SEED_ALONE.items()]

    def train(job):
        seed, name, (steps, flags) = job
        out = folder / f"{name.replace(' ', '-')}-{seed}"
        common = ("--seq-len", LENGTH, "--batch-size", BATCH, "--dropout", 0, "--config", model, "--seed", seed)
        sporeloom("train", "--data", text, *common, "--steps", steps, *flags, "--output-dir", out, OMP_NUM_THREADS="1")
        return out

    rows, curves = [], {name: [] for name in RUNS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a core for each
        for (seed, name, _), out in zip(jobs, pool.map(train, jobs), strict=True):
            steps, each = metrics(out), BATCH * LENGTH * MODEL["num_layers"]
            seen = [step.get("consumed_layer_tokens", (i + 1) * each) for i, step in enumerate(steps)]
            rows.append((seed, name, held_out_loss(engine, out / "checkpoint", held_out), seen[-1]))
            if name in RUNS:
                curves[name].append((seen, [step["loss"] for step in steps]))
            print(rows[-1], flush=True)
    plot(curves)
    write_report(RESULT, "Random layerwise token dropping", "random_ltd.py", told(rows, times))


def plot(curves):
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, color in zip(RUNS, ("tab:blue", "tab:green", "tab:orange"), strict=True):
        for number, (seen, losses) in enumerate(curves[name]):
            smooth = np.convolve(losses, np.ones(100) / 100, "valid")
            axis.plot(np.array(seen)[99:] / 1e6, smooth, color=color, alpha=0.7, label=None if number else name)
    axis.set(xlabel="layer-tokens, millions", ylabel="training loss, mean of 100 steps", ylim=(3.2, 4.6))
    axis.legend()
    figure.savefig(RESULT.with_suffix(".png"), dpi=90)


def told(rows, times):
    full = times[-1]
    lines = [
        f"A step of PanGu with {WIDE['num_layers']} layers of {WIDE['hidden_size']}, 4 sequences of 512 tokens; those "
        "between the first and the last layer see so many of them:",
        "",
        "| tokens seen | median step | of the whole | layer-tokens, of the whole |",
        "|---|---|---|---|",
        *(f"| {k} | {t * 1e3:.0f} ms | {t / full[1]:.2f} | {n / full[2]:.2f} |" for k, t, n in times),
        "",
        f"PanGu with {MODEL['num_layers']} layers of {MODEL['hidden_size']}, {BATCH} sequences of {LENGTH} tokens a step.",
        f"Of {STEPS} steps with random-LTD the layers between the first and the last see {LEAST} tokens at first,",
        f"all of them after {GROWS}. {EQUAL} steps without dropping have as many layer-tokens. Learning rate {RATE:g},",
        "others for one seed; cosine. Loss: of held-out text, all layers seeing everything.",
        "",
        "| seed | run | held-out loss | layer-tokens |",
        "|---|---|---|---|",
        *(f"| {seed} | {name} | {loss:.3f} | {seen:,} |" for seed, name, loss, seen in rows),
        "",
        "Means of the seeds: "
        + ", ".join(f"{statistics.mean(loss for _, of, loss, _ in rows if of == name):.3f} for {name}" for name in RUNS)
        + ".",
    ]
    lines += ["", "![loss by layer-tokens](random_ltd.png)"]
    return lines


if __name__ == "__main__":
    main()
