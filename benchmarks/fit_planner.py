# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's few physical parameters per chip on published step times, and writes them.

python benchmarks/fit_planner.py RUNS.csv                writes sporeloom/planner/fitted.yaml
python benchmarks/fit_planner.py RUNS.csv --hold-out 6   and the errors of six fits on the 30 % of rows each has not seen,
                                                         with those of the whole fit, to benchmarks/results/planner.md

What is minimised: the absolute errors of log time of all rows (the squares of small ones), and how far each
chip's parameters are from those common to all, so that a chip with few rows stays near the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml
from report import write_report
from scipy.optimize import least_squares

from sporeloom.planner.cluster import FITTED, Efficiency, Overlap, chips
from sporeloom.planner.published import Measured, PublishedRun, UnpredictableError, describe, measured, read_rows
from sporeloom.planner.report import validation_report
from sporeloom.planner.step_time import step_time
from sporeloom.planner.validate import validate

RESULTS = Path(__file__).parent / "results" / "planner.md"

START = {"matmul": 0.7, "attention": 0.35, "memory": 0.7, "intra_node": 0.6, "inter_node": 0.5}
START |= {"layer_overhead_us": 60.0, "fp8": 1.4}
SPREAD = {"matmul": 0.2, "attention": 0.4, "memory": 0.2, "intra_node": 0.3, "inter_node": 0.4}
SPREAD |= {"layer_overhead_us": 1.0, "fp8": 0.2}
"""How far, in log, a chip may be from what is common to all at the price of one such row error as `ROW`."""
ROW = 0.1
NAMES = list(START)
Pair = tuple[PublishedRun, Measured]


def pairs_of(rows: list[dict[str, str]]) -> list[Pair]:
    """The rows that can be predicted and have a time."""
    pairs = []
    for row in rows:
        try:
            run = describe(row)
            found = measured(row, run)
        except UnpredictableError:
            continue
        if found.seconds and not run.dims.num_experts:  # see fit_experts.py
            pairs.append((run, found))
    return pairs


def unpack(vector: np.ndarray) -> tuple[dict[str, Efficiency], Overlap]:
    """Parameters of each chip and the overlaps, from the fit's numbers: logs, a chip's relative to the common ones."""
    common, rest = vector[: len(NAMES)], vector[len(NAMES) : -2].reshape(-1, len(NAMES))
    efficiencies = {}
    for chip, own in zip(chips(), rest, strict=True):
        values = dict(zip(NAMES, np.exp(common + own), strict=True))
        for name in ("matmul", "attention", "memory", "intra_node", "inter_node"):
            values[name] = min(values[name], 0.95)
        values["fp8"] = float(np.clip(values["fp8"], 1.0, 2.0))
        efficiencies[chip] = Efficiency(**{name: float(value) for name, value in values.items()})
    gradients, weights = 1 / (1 + np.exp(-vector[-2:]))
    return efficiencies, Overlap(gradients=float(gradients), weights=float(weights))


def log_errors(pairs: list[Pair], efficiencies: dict[str, Efficiency], overlap: Overlap) -> np.ndarray:
    """log(predicted / measured) of each row."""
    errors = []
    for run, found in pairs:
        cluster = dataclasses.replace(run.cluster, efficiency=efficiencies[run.cluster.chip])
        errors.append(np.log(step_time(run.dims, run.job, cluster, overlap).total / found.seconds))
    return np.array(errors)


def fit(pairs: list[Pair]) -> tuple[dict[str, Efficiency], Overlap]:
    """The parameters that explain `pairs` best."""
    start = np.concatenate([np.log([START[n] for n in NAMES]), np.zeros(len(chips()) * len(NAMES)), [0.0, 1.0]])
    spread = np.tile([SPREAD[name] for name in NAMES], len(chips()))
    of_chip: dict[str, list[Pair]] = defaultdict(list)
    for run, found in pairs:
        of_chip[run.cluster.chip].append((run, found))

    @functools.lru_cache(maxsize=4 * len(chips()))  # a step aside in one chip's numbers leaves the others' rows
    def errors(chip: str, efficiency: Efficiency, overlap: Overlap) -> np.ndarray:
        return log_errors(of_chip[chip], {chip: efficiency}, overlap)

    def residuals(vector: np.ndarray) -> np.ndarray:
        efficiencies, overlap = unpack(vector)
        rows = np.concatenate([errors(chip, efficiencies[chip], overlap) for chip in of_chip]) / ROW
        rows = np.sign(rows) * np.sqrt(
            2 * (np.sqrt(1 + rows**2) - 1)
        )  # soft L1: an outlier costs its size, not its square
        common = (vector[: len(NAMES)] - start[: len(NAMES)]) / 0.5
        return np.concatenate([rows, common, vector[len(NAMES) : -2] / spread, (vector[-2:] - start[-2:]) / 3])

    return unpack(least_squares(residuals, start, max_nfev=60, x_scale=0.1).x)


def held_out_errors(pairs: list[Pair], seed: int) -> np.ndarray:
    """Relative errors on a random 30 % of the rows, with parameters fitted on the others."""
    order, count = np.random.default_rng(seed).permutation(len(pairs)), len(pairs) * 3 // 10
    held_out, rest = ([pairs[i] for i in part] for part in (order[:count], order[count:]))
    return np.abs(np.expm1(log_errors(held_out, *fit(rest))))


def write_results(pairs: list[Pair], runs: Path, fits: int) -> dict[str, float]:
    """The errors on rows a fit has not seen, for several splits, and of the fit of all rows. Returns the medians of the
    splits' medians and 90th percentiles."""
    found = []
    lines = ["| 30 % held out, seed | rows | median error of step time | 90th percentile |", "|---|---|---|---|"]
    for seed in range(fits):
        errors = held_out_errors(pairs, seed)
        found.append((np.median(errors), np.quantile(errors, 0.9)))
        lines.append(f"| {seed} | {len(errors)} | {np.median(errors):.1%} | {np.quantile(errors, 0.9):.1%} |")
        print(lines[-1], flush=True)
    shown = validation_report(validate(runs)).splitlines()
    lines += ["", f"All rows of {runs.name}, fitted on all of them:", "", *(f"    {line}" for line in shown)]
    write_report(RESULTS, "The planner against published runs", "fit_planner.py RUNS.csv --hold-out 6", lines)
    median, p90 = np.median(found, axis=0)
    return {"median": round(float(median), 3), "p90": round(float(p90), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=FITTED)
    parser.add_argument("--hold-out", type=int, default=0, metavar="FITS")
    arguments = parser.parse_args()
    pairs = pairs_of(read_rows(arguments.runs))
    efficiencies, overlap = fit(pairs)
    errors = np.abs(np.expm1(log_errors(pairs, efficiencies, overlap)))
    head = f"# Written by benchmarks/fit_planner.py from {len(pairs)} runs of {arguments.runs.name}.\n"
    values = yaml.safe_load(FITTED.read_text())  # which has what fit_experts.py found, too
    values["overlap"] = {k: round(v, 3) for k, v in dataclasses.asdict(overlap).items()}
    for chip, efficiency in efficiencies.items():
        if chip not in values["like_h100"]:
            values["chips"][chip] = {k: round(v, 3) for k, v in dataclasses.asdict(efficiency).items()}
    arguments.out.write_text(head + yaml.safe_dump(values, sort_keys=False))
    if arguments.hold_out:  # which reads what was just written
        values["error"] = write_results(pairs, arguments.runs, arguments.hold_out)
        arguments.out.write_text(head + yaml.safe_dump(values, sort_keys=False))
    print(f"{len(pairs)} runs, median error {np.median(errors):.1%}, 90th percentile {np.quantile(errors, 0.9):.1%}")


if __name__ == "__main__":
    main()
