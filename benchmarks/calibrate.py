# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured step times of small jobs on this machine. Writes benchmarks/results/calibrate.md.

python benchmarks/calibrate.py [--quick] [--cluster FILE] [--steps N] [--jobs N]

Calibrates the machine with 1, 2 and 4 processes at once, simulates the step of each job with the rates found, and trains it.
Nothing else should run meanwhile; the load of the machine is part of the result.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from report import ROOT, metrics, sporeloom, write_report

RESULT = ROOT / "benchmarks" / "results" / "calibrate.md"
TEXT = ROOT / "examples" / "small_town.txt"
ONE_DEVICE = "mesh: {dp: 1}\n"
MODELS = {
    # name: fields that differ from the built-in tiny model (1M parameters)
    "1M": {},
    "7M": {"hidden_size": 320, "num_heads": 10, "num_layers": 4},
    "25M": {"hidden_size": 512, "num_heads": 8, "num_layers": 6},
}
JOBS = [
    # model, built-in strategy, sequences of a step
    ("1M", None, 8),
    ("1M", "pangu_tiny_dp2", 8),
    ("1M", "pangu_tiny_tp2", 8),
    ("1M", "pangu_tiny_pp2", 8),
    ("1M", "pangu_tiny_dp4_zero", 8),
    ("1M", "pangu_tiny_dp2_tp2", 8),
    ("7M", None, 8),
    ("7M", "pangu_tiny_dp2", 8),
    ("7M", "pangu_tiny_tp2_pp2", 8),
    ("25M", None, 4),
    ("25M", "pangu_tiny_dp4_zero", 4),
    ("25M", "pangu_tiny_tp2", 4),
]
TARGET = 0.15
STEPS = 10
WARM_UP = 2
"""Steps that compile and fill caches, and are not counted."""
NAMES = {"matmul": "products", "attention": "attention", "memory": "passes", "launch": "launches"}


def predicted(folder, cluster, model, strategy, batch_size):
    """The simulated step."""
    flags = ["--size", "tiny", "--config", folder / f"{model}.json", "--batch-size", batch_size, "--ranks", 0, "--json"]
    path = strategy or folder / "one.yaml"
    return json.loads(sporeloom("dry-run", *flags, "--strategy", path, "--time", "--cluster", cluster))["time"]


def measured(folder, model, strategy, batch_size, steps):
    """Seconds of each step but the first ones."""
    out = folder / f"{model}-{strategy}"
    flags = ["--size", "tiny", "--config", folder / f"{model}.json", "--batch-size", batch_size, "--data", TEXT]
    parallel = ["--strategy", strategy, "--launch"] if strategy else []
    sporeloom("train", *flags, *parallel, "--steps", steps, "--output-dir", out)
    return [each["step_time_s"] for each in metrics(out)][WARM_UP:]


def row(name, time, seconds, load):
    """A line of the table, and the error."""
    real = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    error = time["seconds"] / real - 1
    path = time["critical_path"]
    other = sum(part for kind, part in path.items() if kind not in NAMES)
    cells = [f"{path.get(kind, 0.0) * 1e3:.0f}" for kind in NAMES] + [f"{other * 1e3:.0f}"]
    mark = "" if abs(error) <= TARGET else " **missed**"
    shown = f"{time['seconds'] * 1e3:.0f} | {real * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f}) | {error:+.0%}{mark}"
    return f"| {name} | {shown} | {load:.1f} | {' | '.join(cells)} |", error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cluster", type=Path, help="a file that calibrate has written, in place of a new one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=len(JOBS))
    asked = parser.parse_args()
    folder, rows, begin = Path(tempfile.mkdtemp(prefix="calibrate-")), [], os.getloadavg()[0]
    cluster = asked.cluster or folder / "cluster.yaml"
    if not asked.cluster:
        print(sporeloom("calibrate", "--launch", 4, "--out", cluster, *["--quick"] * asked.quick), flush=True)
    (folder / "one.yaml").write_text(ONE_DEVICE, encoding="utf-8")
    for name, fields in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(fields), encoding="utf-8")
    about = f"Before the calibration{', which was --quick,' * asked.quick} the load was {begin:.1f}."
    if asked.cluster:
        about = "The machine was calibrated before, in a run of its own."
    for model, strategy, batch_size in JOBS[: asked.jobs]:
        time = predicted(folder, cluster, model, strategy, batch_size)
        load = os.getloadavg()[0]
        seconds = measured(folder, model, strategy, batch_size, asked.steps)
        name = f"{model}, {(strategy or 'one process').removeprefix('pangu_tiny_')}, {batch_size} sequences"
        rows.append(row(name, time, seconds, load))
        print(rows[-1][0], flush=True)
        write(rows, asked, about)  # after each job: what was measured is kept


def command(asked):
    """The command line of this run, as far as it is not the default."""
    flags = [" --quick"] * asked.quick + [" --cluster FILE"] * bool(asked.cluster)
    return "calibrate.py" + "".join(flags) + (f" --steps {asked.steps}" if asked.steps != STEPS else "")


def write(rows, asked, about):
    """Write the report of the jobs so far."""
    errors = sorted(abs(error) for _, error in rows)
    good = sum(error <= TARGET for error in errors)
    head = [
        f"{good} of {len(rows)} jobs are within {TARGET:.0%}; median error {statistics.median(errors):.0%}, worst "
        f"{errors[-1]:.0%}. {len(JOBS) - len(rows)} of the {len(JOBS)} jobs were not run.",
        "",
        f"Times in ms: predicted, and the median of {asked.steps - WARM_UP} measured steps with the quartiles. Load of the "
        f"machine before the job's training; a quiet machine has less than 1. {about}",
    ]
    titles = ["job", "predicted", "measured", "error", "load", *NAMES.values(), "communication, idle"]
    lines = [*head, "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(line for line, _ in rows)]
    write_report(RESULT, "Predicted and measured steps on CPU processes", command(asked), lines)


if __name__ == "__main__":
    main()
