# SPDX-License-Identifier: Apache-2.0
"""What fine-tuning teaches tiny models: form (SFT, LoRA), preference (DPO), reward (GRPO, PPO). Three seeds each.

Writes benchmarks/results/align.md and align.png.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from mindspore import Tensor, set_device
from report import ROOT, metrics, sporeloom, write_report

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.lines import file_lines, split_lines
from sporeloom.data.examples import LineTokenizer, example_batch, read_lines
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer
from sporeloom.inference.model import load_model
from sporeloom.inference.score import negative_log_likelihood
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

RESULT = ROOT / "benchmarks" / "results" / "align.md"
SEEDS = (1, 2, 3)
HERE = ROOT / "examples" / "assistant"
TEMPLATE, REWARDS = HERE / "chat_template.jinja", HERE / "rewards.py"
FORM = re.compile(r" The \w+ is near the \w+\.$")
LENGTH = ("--seq-len", 120)
SFT = (*LENGTH, "--batch-size", 16, "--steps", 100, "--chat-template", TEMPLATE)
MATRICES = ("attention.*", "mlp.up", "mlp.down")
RL = ("--seq-len", 120, "--max-completion-length", 40, "--batch-size", 32, "--reward", f"{REWARDS}:names_the_lake")
RUNS = {
    "sft": ("sft", "answers.jsonl", (*SFT, "--learning-rate", 1e-3)),
    "lora": (
        "sft",
        "answers.jsonl",
        (*SFT, "--learning-rate", 1e-2, "--lora-r", 8, "--lora-targets", *MATRICES),
    ),
    "dpo": ("dpo", "preferences.jsonl", (*LENGTH, "--batch-size", 8, "--steps", 40, "--learning-rate", 2e-5)),
    "grpo": (
        "grpo",
        "prompts.jsonl",
        (*RL, "--num-generations", 4, "--steps", 24, "--learning-rate", 2e-4, "--beta", 0.04),
    ),
    "ppo": ("ppo", "prompts.jsonl", (*RL, "--steps", 64, "--learning-rate", 2e-4)),
}


def answers(checkpoint, folder):
    """Greedy answers to all prompts."""
    prompts = [json.loads(line)["prompt"][0]["content"] for line in file_lines(folder / "prompts.jsonl")]
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"user: {text}\nassistant:"}) + "\n" for text in prompts))
    said = sporeloom("generate", "--checkpoint", checkpoint, "--prompt-file", asked, "--max-new-tokens", 48, "--json")
    found = [json.loads(line)["text"] for line in split_lines(said) if line.startswith("{")]
    assert len(found) == len(prompts)
    return found


def in_form(checkpoint, folder):
    """Share of greedy answers that are sentences as those that were taught."""
    found = answers(checkpoint, folder)
    return sum(bool(FORM.fullmatch(answer)) for answer in found) / len(found)


def to_the_lake(checkpoint, folder):
    """Share of greedy answers that name the lake."""
    found = answers(checkpoint, folder)
    return sum("lake" in answer for answer in found) / len(found)


def log_probs(engine, checkpoint, pairs_file):
    """(pairs, 2): of the texts of pairs."""
    family, config = load_config(checkpoint)
    tokenizer = load_tokenizer(family, find_tokenizer(family, checkpoint), config)
    pairs = LineTokenizer(tokenizer).pairs(read_lines(pairs_file, (("prompt", "chosen", "rejected"),)))
    batch = example_batch([[text] for pair in pairs for text in (pair.chosen, pair.rejected)], LENGTH[1])
    net = load_model(checkpoint, family, config, SINGLE_DEVICE)
    logits = engine.run(net, Tensor(batch.tokens), Tensor(batch.positions)).asnumpy().reshape(*batch.tokens.shape, -1)
    return -(negative_log_likelihood(logits, batch.labels) * batch.loss_weights).sum(1).reshape(-1, 2)


def main():
    set_device("CPU")
    engine = Engine.start(SINGLE_DEVICE)
    folder = Path(tempfile.mkdtemp(prefix="align-"))
    subprocess.run([sys.executable, HERE / "make_data.py", folder], check=True)
    base = folder / "base" / "checkpoint"
    pretraining = ("--steps", 300, "--seq-len", 64, "--batch-size", 16, "--learning-rate", 3e-3, "--dropout", 0)
    sporeloom("train", "--data", folder / "town.txt", *pretraining, "--output-dir", folder / "base")
    rows, curves, seconds = {name: [] for name in RUNS}, {name: [] for name in RUNS}, {}
    before = in_form(base, folder)
    for seed in SEEDS:
        for name, (verb, data, flags) in RUNS.items():
            out, begun = folder / f"{name}-{seed}", time.perf_counter()
            source = base if verb == "sft" else folder / f"sft-{seed}" / "checkpoint"
            sporeloom(
                verb, "--from-checkpoint", source, "--data", folder / data, "--seed", seed, *flags, "--output-dir", out
            )
            seconds[name] = time.perf_counter() - begun
            steps = metrics(out)
            curves[name].append(steps)
            if verb == "sft":
                rows[name].append((before, in_form(out / "checkpoint", folder), steps[-1]["loss"]))
            elif verb == "dpo":
                held_out = folder / "preferences_held_out.jsonl"
                change = log_probs(engine, out / "checkpoint", held_out) - log_probs(engine, source, held_out)
                margins = change[:, 0] - change[:, 1]
                rows[name].append(((margins > 0).mean(), 0.1 * margins.mean(), steps[-1]["rewards/margins"]))
            else:
                last = steps[-5:]
                greedy = (to_the_lake(source, folder), to_the_lake(out / "checkpoint", folder))
                sampled = (steps[0]["reward"], np.mean([s["reward"] for s in last]))
                rows[name].append((*greedy, *sampled, max(s["kl"] for s in steps), last[-1]["kl"]))
            print(name, seed, rows[name][-1], f"{seconds[name]:.0f} s", flush=True)
    plot(curves)
    write_report(RESULT, "What fine-tuning teaches", "align.py", text(rows, seconds, adapters(curves)).split("\n"))


def adapters(curves):
    """A table: what adapters cost beside training the whole model."""
    lines = ["| seed 1 | trained parameters | AdamW's moments | median step |", "|---|---|---|---|"]
    model = size_config("pangu", "tiny")
    lora = LoRAConfig(r=8, target_modules=MATRICES)
    for name, shapes in (("sft", parameter_shapes(model)), ("lora", lora.shapes(model))):
        trained = sum(map(np.prod, shapes.values()))
        step = np.median([s["step_time_s"] for s in curves[name][0]])
        lines.append(f"| {name} | {trained:,} | {8 * trained / 1e6:.2f} MB | {step * 1e3:.0f} ms |")
    lines += ["", "| adapters of r 8, float32 | matrices | parameters | folder |", "|---|---|---|---|"]
    for family, size in (("pangu", "embedded_7b"), ("codegeex", "4_9b")):
        for matrices in (("attention.query", "attention.value"), ("attention.*",), ("attention.*", "mlp.*")):
            shapes = LoRAConfig(r=8, target_modules=matrices).shapes(size_config(family, size))
            count = sum(map(np.prod, shapes.values()))
            lines.append(f"| {family} {size} | {', '.join(matrices)} | {count:,} | {4 * count / 1e6:.0f} MB |")
    return "\n".join(lines)


def plot(curves):
    shown = {"sft": "loss", "lora": "loss", "dpo": "rewards/margins", "grpo": "reward", "ppo": "reward"}
    figure, axes = plt.subplots(1, 5, figsize=(16, 3), layout="constrained")
    for axis, (name, metric) in zip(axes, shown.items(), strict=True):
        for seed, steps in zip(SEEDS, curves[name], strict=True):
            axis.plot([s["step"] for s in steps], [s[metric] for s in steps], label=f"seed {seed}")
        axis.set(title=f"{name}: {metric}", xlabel="step")
    axes[0].legend()
    figure.savefig(Path(__file__).with_name("results") / "align.png", dpi=90)


def text(rows, seconds, adapters):
    def told(name, *formats):
        return "\n".join(
            f"| {name}, seed {seed} | " + " | ".join(f.format(v) for f, v in zip(formats, row, strict=True)) + " |"
            for seed, row in zip(SEEDS, rows[name], strict=True)
        )

    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    return f"""PanGu tiny (1.1 M parameters), pretrained for 300 steps on the made-up town of examples/assistant, then
taught. One run after another; start, compilation and writing are in the times: {times}.

![curves](align.png)

| answers in form (`The X is near the Y.`), greedy | base | taught | last loss |
|---|---|---|---|
{told("sft", "{:.0%}", "{:.0%}", "{:.3f}")}
{told("lora", "{:.0%}", "{:.0%}", "{:.3f}")}

| polite answers preferred | accuracy on held-out pairs | their margin | margin of the last step |
|---|---|---|---|
{told("dpo", "{:.0%}", "{:.2f}", "{:.2f}")}

| answers that name the lake | greedy, before | after | sampled, first step | last 5 steps | largest KL | last |
|---|---|---|---|---|---|---|
{told("grpo", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.3f}", "{:.3f}")}
{told("ppo", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.3f}", "{:.3f}")}

The share of answers that name the lake is the reward. KL is from the model the run began with, at the tokens it samples.

{adapters}
"""


if __name__ == "__main__":
    main()
