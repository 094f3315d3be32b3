# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's few physical parameters per chip on published step times, and writes them.

python benchmarks/fit_planner.py RUNS.csv    writes sporeloom/planner/fitted.yaml

What is minimised: the absolute errors of log time of all rows (the squares of small ones), and how far each
chip's parameters are from those common to all, so that a chip with few rows stays near the others. Errors on runs that a
fit has not seen: planner_errors.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from sporeloom.core.lines import first_line
from sporeloom.planner.cluster import FITTED, Efficiency, Overlap, chips
from sporeloom.planner.published import Measurement, PublishedRun, UnpredictableError, describe, measured, read_rows
from sporeloom.planner.step_time import step_time

START = {"matmul": 0.7, "attention": 0.35, "memory": 0.7, "intra_node": 0.6, "inter_node": 0.5}
START |= {"layer_overhead_us": 60.0, "fp8": 1.9}
SPREAD = {"matmul": 0.2, "attention": 0.4, "memory": 0.2, "intra_node": 0.3, "inter_node": 0.4}
SPREAD |= {"layer_overhead_us": 0.5, "fp8": 0.1}
"""How far, in log, a chip may be from what is common to all at the price of one such row error as `ROW`."""
NAMES = list(START)
SAME_DIE = {"a100_40gb": "a100_80gb", "h100_96gb": "h100", "h200": "h100"}
"""Chips that differ in memory alone, or in power: they are near the other one rather than near all, at half the distance."""
SMALLER_BIN = np.log(313 / 376)
"""Log of the speed of products on Ascend 910B in the published runs, relative to its data sheet: Atlas 800T A2 has options of
313 and 376 TFLOP/s (Huawei's white paper), and MindFormers' tables name the faster part ("400T") for some runs only."""
NO_WGMMA = np.log(2 / 3)
"""Log of the speed on Hopper of attention kernels without its own matrix instructions, which the fitted runs have, relative
to those with them: 0.57 to 0.66 by length, heads of 128 (arXiv:2407.08608 figure 5, FlashAttention-2 and 3)."""
WIDE = np.array([0.1 if name == "fp8" else 0.5 for name in NAMES])
"""The same of what is common to all, from its start: peaks in fp8 are twice those in bf16; quantizing is counted apart."""
OVERLAP, OVERLAP_SPREAD = (0.0, 1.0, -1.0), (3.0, 3.0, 0.7)
"""Where the overlaps and the contention begin, as logits, and their spread."""
ROW = 0.1
STEP = 1e-5
"""Step aside, in log, of a slope."""
Pair = tuple[PublishedRun, Measurement]


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
    common, rest = vector[: len(NAMES)], vector[len(NAMES) : -len(OVERLAP)].reshape(-1, len(NAMES))
    efficiencies = {}
    for chip, own in zip(chips(), rest, strict=True):
        values = dict(zip(NAMES, np.exp(common + own), strict=True))
        for name in ("matmul", "attention", "memory", "intra_node", "inter_node"):
            values[name] = min(values[name], 0.95)
        values["fp8"] = float(np.clip(values["fp8"], 1.0, 2.0))
        efficiencies[chip] = Efficiency(**{name: float(value) for name, value in values.items()})
    gradients, weights, contention = map(float, 1 / (1 + np.exp(-vector[-len(OVERLAP) :])))
    return efficiencies, Overlap(gradients=gradients, weights=weights, contention=contention)


def log_errors(pairs: list[Pair], efficiencies: dict[str, Efficiency], overlap: Overlap) -> np.ndarray:
    """log(predicted / measured) of each row."""
    errors = []
    for run, found in pairs:
        cluster = dataclasses.replace(run.cluster, efficiency=efficiencies[run.cluster.chip])
        errors.append(np.log(step_time(run.dims, run.job, cluster, overlap).total / found.seconds))
    return np.array(errors)


def _nearness() -> tuple[np.ndarray, np.ndarray]:
    """Where the numbers of chips begin, relative to the common ones, and the matrix that makes distances of them."""
    names, size = list(chips()), len(NAMES)
    base = np.zeros(len(names) * size)
    distances = np.eye(len(base))
    base[names.index("ascend910b") * size + NAMES.index("matmul")] = SMALLER_BIN
    for chip in ("h100", *(like for like, other in SAME_DIE.items() if other == "h100")):
        base[names.index(chip) * size + NAMES.index("attention")] = NO_WGMMA
    for chip, other in SAME_DIE.items():
        for number in range(size):
            row, from_row = names.index(chip) * size + number, names.index(other) * size + number
            distances[row, row], distances[from_row, row] = 2, -2
    return base, distances


def _softened(rows: np.ndarray) -> np.ndarray:
    """Residuals whose squares are soft L1: an outlier costs its size, not its square."""
    rows = rows / ROW
    return np.sign(rows) * np.sqrt(2 * (np.sqrt(1 + rows**2) - 1))


def fit(pairs: list[Pair]) -> tuple[dict[str, Efficiency], Overlap]:
    """The parameters that explain `pairs` best."""
    start = np.concatenate([np.log([START[n] for n in NAMES]), np.zeros(len(chips()) * len(NAMES)), OVERLAP])
    spread, (base, nearness) = np.tile([SPREAD[name] for name in NAMES], len(chips())), _nearness()
    of_chip: dict[str, list[Pair]] = defaultdict(list)
    for run, found in pairs:
        of_chip[run.cluster.chip].append((run, found))
    size, places = len(NAMES), {chip: number for number, chip in enumerate(chips())}
    own_of = {chip: size * (1 + places[chip]) for chip in of_chip}
    """First column of a chip's own numbers."""

    def of_rows(chip: str, vector: np.ndarray) -> np.ndarray:
        efficiencies, overlap = unpack(vector)
        return _softened(log_errors(of_chip[chip], {chip: efficiencies[chip]}, overlap))

    def residuals(vector: np.ndarray) -> np.ndarray:
        rows = [of_rows(chip, vector) for chip in of_chip]
        common = (vector[:size] - start[:size]) / WIDE
        own = ((vector[size : -len(OVERLAP)] - base) @ nearness) / spread
        overlaps = (vector[-len(OVERLAP) :] - OVERLAP) / OVERLAP_SPREAD
        return np.concatenate([*rows, common, own, overlaps])

    def slopes(vector: np.ndarray) -> np.ndarray:
        """A row answers to its own chip's numbers, to the common ones exactly as to these, and to the overlaps."""
        found, behind = [], len(vector) - len(OVERLAP)
        for chip in of_chip:
            rows, of = of_rows(chip, vector), np.zeros((len(of_chip[chip]), len(vector)))
            for column in (*range(own_of[chip], own_of[chip] + size), *range(behind, len(vector))):
                aside = vector.copy()
                aside[column] += STEP
                of[:, column] = (of_rows(chip, aside) - rows) / STEP
            of[:, :size] = of[:, own_of[chip] : own_of[chip] + size]
            found.append(of)
        of_priors = np.zeros((len(vector), len(vector)))
        of_priors[:size, :size] = np.diag(1 / WIDE)
        of_priors[size:behind, size:behind] = nearness.T / spread[:, None]
        of_priors[behind:, behind:] = np.diag(1 / np.array(OVERLAP_SPREAD))
        return np.concatenate([*found, of_priors])

    return unpack(least_squares(residuals, start, slopes, max_nfev=60, x_scale=0.1, ftol=1e-5, xtol=1e-5).x)


MEASURED = ("float32", "launch_us", "graph_us")
"""Fields of an efficiency that are measured on a machine, not fitted."""


def rounded(fitted: Any, digits: int) -> dict[str, float]:
    """The numbers that are fitted."""
    found = dataclasses.asdict(fitted)
    return {name: round(value, digits) for name, value in found.items() if name not in MEASURED}


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=FITTED)
    arguments = parser.parse_args()
    pairs = pairs_of(read_rows(arguments.runs))
    efficiencies, overlap = fit(pairs)
    errors = np.abs(np.expm1(log_errors(pairs, efficiencies, overlap)))
    head = f"# Written by benchmarks/fit_planner.py from {len(pairs)} runs of {arguments.runs.name}.\n"
    values = yaml.safe_load(FITTED.read_text())  # which has what fit_experts.py found, too
    values["overlap"] = rounded(overlap, 3)
    for chip, efficiency in efficiencies.items():
        if chip not in values["like_h100"]:
            values["chips"][chip] = rounded(efficiency, 3)
    arguments.out.write_text(head + yaml.safe_dump(values, sort_keys=False))
    print(f"{len(pairs)} runs, median error {np.median(errors):.1%}, 90th percentile {np.quantile(errors, 0.9):.1%}")


if __name__ == "__main__":
    main()
