# SPDX-License-Identifier: Apache-2.0
"""Random-LTD: what a step costs by the tokens that middle layers see, and what a tiny model learns from fewer of them.

Needs ../shared/data (Chinese text; the last tenth is held out). Writes benchmarks/results/random_ltd.md and random_ltd.png.
"""

import json
import statistics
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from mindspore import Tensor, set_device
from report import ROOT, metrics, mindloom, write_report

from mindloom.checkpoint.model_folder import load_config
from mindloom.data.batch import make_batch
from mindloom.data.tokenizer import find_tokenizer, load_tokenizer
from mindloom.inference.model import load_model
from mindloom.inference.score import negative_log_likelihood
from mindloom.runtime.engine import Engine
from mindloom.strategy.config import SINGLE_DEVICE

TEXT = ROOT.parent / "shared" / "data" / "zh_poetry.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "random_ltd.md"
SEEDS = (1, 2, 3)
LENGTH, BATCH, LAYERS, LEAST, GROWS, STEPS = 128, 8, 8, 64, 300, 520
LONG, EQUAL = 500, 450  # steps without dropping; the second have as many layer-tokens as random-LTD's
RUNS = {
    "all tokens": ("--steps", LONG),
    "all tokens, fewer steps": ("--steps", EQUAL),
    "random-LTD": (
        *("--steps", STEPS, "--random-ltd-min-value", LEAST),
        *("--random-ltd-require-steps", GROWS, "--random-ltd-seq-per-step", 16),
    ),
}
WIDE = {"num_layers": 12, "hidden_size": 256, "num_heads": 8, "seq_len": 512}


def step_times(folder, text):
    """(tokens seen, median seconds of a step, layer-tokens of a step) of a wider model; all in one run."""
    config = folder / "wide.json"
    config.write_text(json.dumps(WIDE))
    flags = ("--random-ltd-min-value", 128, "--random-ltd-seq-per-step", 128, "--random-ltd-require-steps", 21)
    out, steps = folder / "wide", 28
    words = ("--seq-len", 512, "--batch-size", 4, "--steps", steps, "--dropout", 0, "--output-dir", out)
    mindloom("train", "--data", text, "--config", config, *words, *flags)
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
    lines = TEXT.read_text().splitlines()
    cut = len(lines) * 9 // 10
    text, held_out = folder / "train.jsonl", [json.loads(line)["text"] for line in lines[cut:]]
    text.write_text("".join(line + "\n" for line in lines[:cut][:6000]))
    model = folder / "model.json"
    model.write_text(json.dumps({"num_layers": LAYERS}))
    times = step_times(folder, text)
    common = ("--seq-len", LENGTH, "--batch-size", BATCH, "--dropout", 0, "--learning-rate", 2e-3, "--config", model)
    rows, curves = {name: [] for name in RUNS}, {name: [] for name in RUNS}
    for seed in SEEDS:
        for name, flags in RUNS.items():
            out = folder / f"{name.replace(' ', '-')}-{seed}"
            mindloom("train", "--data", text, "--seed", seed, *common, *flags, "--output-dir", out)
            steps = metrics(out)
            each = BATCH * LENGTH * LAYERS
            seen = [step.get("consumed_layer_tokens", (i + 1) * each) for i, step in enumerate(steps)]
            loss = held_out_loss(engine, out / "checkpoint", held_out)
            seconds = sum(sorted(step["step_time_s"] for step in steps)[:-10]) * len(steps) / (len(steps) - 10)
            rows[name].append((loss, seen[-1], seconds))
            curves[name].append((seen, [step["loss"] for step in steps]))
            print(name, seed, rows[name][-1], flush=True)
    plot(curves)
    write_report(RESULT, "Random layerwise token dropping", "random_ltd.py", told(rows, times))


def plot(curves):
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, color in zip(RUNS, ("tab:blue", "tab:green", "tab:orange"), strict=True):
        for number, (seen, losses) in enumerate(curves[name]):
            smooth = np.convolve(losses, np.ones(15) / 15, "valid")
            axis.plot(np.array(seen)[14:] / 1e6, smooth, color=color, alpha=0.7, label=None if number else name)
    axis.set(xlabel="layer-tokens, millions", ylabel="training loss, mean of 15 steps")
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
        f"PanGu tiny with {LAYERS} layers, {BATCH} sequences of {LENGTH} tokens a step. Without dropping {LONG} steps, or",
        f"{EQUAL}, which have as many layer-tokens as random-LTD: {STEPS}, in which the middle layers see {LEAST} tokens at",
        f"first and all of them after {GROWS}. Loss: of held-out text, all layers seeing everything.",
        "",
        "| seed | run | held-out loss | layer-tokens | seconds in steps |",
        "|---|---|---|---|---|",
    ]
    for number, seed in enumerate(SEEDS):
        for name in RUNS:
            loss, seen, seconds = rows[name][number]
            lines.append(f"| {seed} | {name} | {loss:.3f} | {seen:,} | {seconds:.0f} |")
    lines += ["", "![loss by layer-tokens](random_ltd.png)"]
    return lines


if __name__ == "__main__":
    main()
