# SPDX-License-Identifier: Apache-2.0
"""Steps of CPU processes that share cores, with threads that leave them to others and with those of MindSpore, which poll.
Writes benchmarks/results/quiet_threads.md.

python benchmarks/quiet_threads.py [--rounds N] [--steps N]

Both take turns, so that other work on the machine hits them alike. All numbers of both must be the same bits.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import tempfile
from pathlib import Path

from report import ROOT, metrics, sporeloom, write_report

RESULT = ROOT / "benchmarks" / "results" / "quiet_threads.md"
TEXT = ROOT / "examples" / "small_town.txt"
ROUNDS, STEPS, WARM_UP = 3, 12, 2
JOBS = [
    # fields that differ from the built-in tiny model of 1M parameters, built-in strategy, sequences of a step
    ("1M", {}, "pangu_tiny_dp2", 8),
    ("1M", {}, "pangu_tiny_dp4_zero", 8),
    ("7M", {"hidden_size": 320, "num_heads": 10, "num_layers": 4}, "pangu_tiny_tp2_pp2", 8),
]
NUMBERS = ("loss", "grad_norm")


def trained(folder, name, fields, strategy, batch_size, steps, switch):
    """Seconds of each step, processor seconds of the whole run, and a hash of its numbers and weights."""
    config, out = folder / f"{name}.json", Path(tempfile.mkdtemp(dir=folder)) / "out"
    config.write_text(json.dumps(fields), encoding="utf-8")
    flags = ["--size", "tiny", "--config", config, "--batch-size", batch_size, "--data", TEXT, "--steps", steps]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    where = ["--strategy", strategy, "--launch", "--output-dir", out]
    sporeloom("train", *flags, *where, SPORELOOM_QUIET_THREADS=switch)
    after, found = resource.getrusage(resource.RUSAGE_CHILDREN), metrics(out)
    content = hashlib.sha256((out / "checkpoint" / "model.safetensors").read_bytes())
    content.update(repr([[each[number] for number in NUMBERS] for each in found]).encode())
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [each["step_time_s"] for each in found][WARM_UP:], busy, content.hexdigest()


def row(folder, name, fields, strategy, batch_size, asked):
    """A line of the table, from runs of both in turns."""
    seconds, busy, contents, load = {"0": [], "1": []}, {"0": [], "1": []}, set(), os.getloadavg()[0]
    for number in range(asked.rounds):
        for switch in ("0", "1") if number % 2 == 0 else ("1", "0"):
            steps, processor, content = trained(folder, name, fields, strategy, batch_size, asked.steps, switch)
            seconds[switch] += steps
            busy[switch].append(processor)
            contents.add(content)
    if len(contents) > 1:
        raise SystemExit(f"{name}, {strategy}: numbers or weights differ")
    step = {switch: statistics.median(found) for switch, found in seconds.items()}
    low, _, high = zip(*(statistics.quantiles(seconds[switch], n=4) for switch in ("0", "1")), strict=True)
    shown = [f"{step[s] * 1e3:.0f} ({a * 1e3:.0f} to {b * 1e3:.0f})" for s, a, b in zip("01", low, high, strict=True)]
    processor = [statistics.median(busy[switch]) for switch in ("0", "1")]
    cells = [f"{name}, {strategy.removeprefix('pangu_tiny_')}", *shown, f"{step['1'] / step['0']:.2f}"]
    return f"| {' | '.join(cells)} | {processor[0]:.1f} | {processor[1]:.1f} | {load:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    rows = []
    titles = ["job", "polling, ms a step", "sleeping, ms a step", "ratio", "processor s, polling", "sleeping", "load"]
    head = [
        f"Medians (quartiles) of the steps of {asked.rounds} runs of each, without the first {WARM_UP} steps; processor "
        "seconds of all processes of a run, with start and compilation; load of the machine before the first run. Losses, "
        "norms and weights are the same bits.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    given = {"rounds": ROUNDS, "steps": STEPS}
    flags = "".join(f" --{k} {getattr(asked, k)}" for k, v in given.items() if getattr(asked, k) != v)
    with tempfile.TemporaryDirectory(prefix="quiet-threads-") as folder:
        for name, fields, strategy, batch_size in JOBS:
            rows.append(row(Path(folder), name, fields, strategy, batch_size, asked))
            print(rows[-1], flush=True)
            write_report(RESULT, "Idle threads of CPU processes", f"quiet_threads.py{flags}", [*head, *rows])


if __name__ == "__main__":
    main()
