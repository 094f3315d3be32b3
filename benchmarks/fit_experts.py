# SPDX-License-Identifier: Apache-2.0
"""Fit what layers of experts make of a chip on published runs, beside the fit of dense models.

    python benchmarks/fit_experts.py published_moe_runs.csv

Chips that no dense run is known of get the efficiencies of H100, their products scaled by one more number. Writes the
`experts` of sporeloom/planner/fitted.yaml. Errors on runs that a fit has not seen: planner_errors.py.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import yaml
from fit_planner import rounded
from scipy.optimize import least_squares

from sporeloom.core.lines import first_line
from sporeloom.planner.cluster import FITTED, ExpertEfficiency, Overlap, chips, fitted_efficiency
from sporeloom.planner.published import UnpredictableError
from sporeloom.planner.published_experts import describe_experts, measured_experts, read_expert_rows
from sporeloom.planner.step_time import step_time

NEWER = ("b200", "b300", "gb200", "gb300")
"""Chips without dense runs among the published ones: each has a number of its own."""
NUMBERS = {  # where the fit begins, and its spread
    "products": (0.95, 0.2),  # DeepGEMM's README: 0.95 to 1.07 of one product of the same sizes
    "all_to_all": (0.85, 0.2),  # DeepEP's README: 0.8 to 0.9 of the links
    "passes": (4.0, 0.5),  # rows are put in order, and back: each reads and writes
    "layer_overhead_us": (100.0, 1.0),
    "newer": (1.0, 0.2),
    "newer_fp8": (1.9, 0.1),
    "newer_memory": (1.0, 0.2),
    "overlap": (0.9, 0.1),  # both passes of two microbatches at once, but for what the exchange takes of the cores
    **dict.fromkeys(NEWER, (1.0, 0.15)),
}
START, SPREAD = ([pair[i] for pair in NUMBERS.values()] for i in (0, 1))
"""The spread is how far, in log, a number may be from its start at the price of one such row error as `ROW`."""
ROW = 0.1
LIKE = "h100"


def newer_chips(dense):
    """Chips without dense runs: their data sheets are known, their efficiencies follow H100's."""
    return [chip for chip in chips() if chip not in dense]


def unpack(vector, newer, base):
    values = dict(zip(NUMBERS, map(float, np.exp(vector)), strict=True))
    speed, own = values.pop("newer"), {chip: values.pop(chip) for chip in NEWER}
    common = {
        "fp8": float(np.clip(values.pop("newer_fp8"), 1.0, 2.0)),
        "memory": min(values.pop("newer_memory") * base.memory, 0.95),
    }
    values["overlap"] = min(values["overlap"], 1.0)
    efficiencies = {
        chip: dataclasses.replace(base, matmul=min(speed * own[chip] * base.matmul, 0.95), **common) for chip in newer
    }
    return ExpertEfficiency(**values), efficiencies


def log_errors(pairs, experts, efficiencies, overlap):
    errors = []
    for run, seconds in pairs:
        cluster = dataclasses.replace(run.cluster, experts=experts, efficiency=efficiencies[run.cluster.chip])
        errors.append(np.log(step_time(run.dims, run.job, cluster, overlap).total / seconds))
    return np.array(errors)


def fit(pairs, newer, dense, overlap):
    """`dense`: efficiencies of the chips that dense runs are known of, by a fit of these, like `overlap`."""
    start, spread = np.log(START), np.array(SPREAD)

    def residuals(vector):
        experts, of_newer = unpack(vector, newer, dense[LIKE])
        rows = log_errors(pairs, experts, dense | of_newer, overlap) / ROW
        rows = np.sign(rows) * np.sqrt(2 * (np.sqrt(1 + rows**2) - 1))
        return np.concatenate([rows, (vector - start) / spread])

    return unpack(least_squares(residuals, start, max_nfev=200, x_scale=0.1).x, newer, dense[LIKE])


def pairs_of(path):
    """The rows that can be predicted."""
    pairs = []
    for row in read_expert_rows(path):
        try:
            pairs.append((describe_experts(row), measured_experts(row).seconds))
        except UnpredictableError as reason:
            print(row["id"], reason)
    return pairs


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("runs", type=Path)
    arguments = parser.parse_args()
    pairs = pairs_of(arguments.runs)
    head, _, text = FITTED.read_text().partition("\n")
    fitted = yaml.safe_load(text)
    newer = newer_chips({c for c in fitted["chips"] if c not in fitted.get("like_" + LIKE, [])})
    dense, overlap = {c: fitted_efficiency(c) for c in chips() if c not in newer}, Overlap.fitted()
    experts, efficiencies = fit(pairs, newer, dense, overlap)
    fitted["experts"] = rounded(experts, 3)
    fitted["like_" + LIKE] = newer
    fitted["chips"] |= {chip: rounded(efficiency, 3) for chip, efficiency in efficiencies.items()}
    errors = log_errors(pairs, experts, dense | efficiencies, overlap)
    for (run, seconds), error in sorted(zip(pairs, errors, strict=True), key=lambda pair: pair[1]):
        print(f"{run.id:45} {seconds:8.2f} s {np.expm1(error):+.0%}")
    print(fitted["experts"], efficiencies[newer[0]] if newer else "")
    print(f"{len(pairs)} runs, median {np.median(np.abs(np.expm1(errors))):.1%}")
    FITTED.write_text(head + "\n" + yaml.safe_dump(fitted, sort_keys=False))


if __name__ == "__main__":
    main()
