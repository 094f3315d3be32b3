# SPDX-License-Identifier: Apache-2.0
"""Costs of validation, trackers and the record of where sequences come from. Writes results/training_extras.md.

python benchmarks/training_extras.py [--rounds N]

Runs with and without take turns, and their medians are compared.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
from pathlib import Path

from report import ROOT, metrics, sporeloom, write_report

RESULT = ROOT / "benchmarks" / "results" / "training_extras.md"
CORPUS = ROOT / "examples" / "small_town.txt"
TRACKERS = [name for name in ("wandb", "mlflow", "swanlab", "trackio") if importlib.util.find_spec(name)]
STEPS, EVERY, ROWS, LENGTH = 40, 10, 8, 128
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}


def train(folder, *flags):
    """Median seconds of a step but the first ones, and the summary of the run."""
    sizes = ("--steps", STEPS, "--batch-size", ROWS, "--seq-len", LENGTH)
    sporeloom("train", "--data", CORPUS, *sizes, "--output-dir", folder, "--overwrite", *flags, **OFFLINE)
    steps = [line["step_time_s"] for line in metrics(folder)]
    return statistics.median(steps[2:]), json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def validation(folder, rounds):
    """Lines on validation: the step with and without, and seconds of a validated next to a trained token."""
    flags = ("--validation-data", f"town={CORPUS}", "--validate-every")
    ratios, costs = [], []
    for _ in range(rounds):
        plain, _ = train(folder / "plain")
        step, seldom = train(folder / "seldom", *flags, EVERY)
        _, often = train(folder / "often", *flags, EVERY // 2)  # compiles as much, and validates twice as often
        ratios.append(step / plain)
        more = often["time_s"]["validation"] - seldom["time_s"]["validation"]
        tokens = num_tokens(folder) * STEPS / EVERY
        costs.append(more / tokens / (often["time_s"]["compute"] / often["tokens"]))
    return [
        f"- A step of a run with validation takes {statistics.median(ratios):.3f} times one without.",
        f"- A validated token takes {statistics.median(costs):.2f} times a trained one, whose forward pass is a third of "
        "its products.",
    ]


def num_tokens(folder):
    """Number of tokens of the corpus."""
    out = folder / "tokens"
    if not out.exists():
        tokenizer = next((folder / "plain" / "checkpoint").glob("tokenizer*"))
        sporeloom("preprocess", "tokenize", CORPUS, "--tokenizer", tokenizer, "--out", out)
    return json.loads((out / "dataset.json").read_text(encoding="utf-8"))["num_tokens"]


def trackers(folder, rounds):
    """A line for each tracker that is installed: the step with and without."""
    lines = []
    for name in TRACKERS:
        pairs = [
            (train(folder / "plain")[0], train(folder / name, "--tracker", name, "--project", "costs")[0])
            for _ in range(rounds)
        ]
        lines.append(f"- {name}: a step takes {statistics.median(b / a for a, b in pairs):.3f} times one without.")
    return lines or ["- No tracker is installed here; TensorBoard is in every run."]


def origins(folder):
    """A line on the size of what names documents and bytes behind each sequence."""
    num_tokens(folder)
    sizes = {path.name: path.stat().st_size for path in sorted((folder / "tokens").iterdir())}
    ends, data = sizes["ends.bin"], sizes["tokens.bin"] + CORPUS.stat().st_size
    return [
        f"- ends.bin, where documents end, has {ends:,} bytes, {ends / data:.1%} of the {data:,} of text and tokens: 8 for "
        "each document. Files and bytes are found by reading the text again."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="extras-"))
    about = f"A tiny PanGu, {ROWS} sequences of {LENGTH} tokens, {STEPS} steps, medians of {rounds} pairs of runs."
    lines = [about, "", "Validation:", "", *validation(folder, rounds)]
    lines += ["", "Trackers (at most 1 % asked):", "", *trackers(folder, rounds)]
    lines += ["", "Where sequences come from (at most 5 % of the data asked):", "", *origins(folder)]
    write_report(RESULT, "Costs of validation, trackers and origins", "training_extras.py", lines)


if __name__ == "__main__":
    main()
