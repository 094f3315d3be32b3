# SPDX-License-Identifier: Apache-2.0
"""Fit what layers of experts make of a chip on published runs, beside the fit of dense models.

    python benchmarks/fit_experts.py published_moe_runs.csv [--hold-out 100]

Chips that no dense run is known of get the efficiencies of H100, their products scaled by one more number. Writes the
`experts` of sporeloom/planner/fitted.yaml; with --hold-out also the errors on rows a fit has not seen, to
benchmarks/results/planner_experts.md.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import yaml
from report import write_report
from scipy.optimize import least_squares

from sporeloom.planner.cluster import FITTED, ExpertEfficiency, chips, fitted_efficiency
from sporeloom.planner.published import UnpredictableError
from sporeloom.planner.published_experts import describe_experts, measured_experts, read_expert_rows
from sporeloom.planner.report import validation_report
from sporeloom.planner.step_time import step_time
from sporeloom.planner.validate import validate

RESULTS = Path(__file__).parent / "results" / "planner_experts.md"
NEWER = ("b200", "b300", "gb200", "gb300")
"""Chips without dense runs among the published ones: each has a number of its own."""
NUMBERS = {  # where the fit begins, and its spread
    "products": (0.7, 0.4),
    "all_to_all": (0.7, 0.7),
    "passes": (8.0, 0.5),
    "layer_overhead_us": (100.0, 1.0),
    "newer": (1.0, 0.2),
    "newer_fp8": (1.4, 0.2),
    "attention": (1.6, 0.4),
    "newer_attention": (1.0, 0.2),
    "newer_memory": (1.0, 0.2),
    "overlap": (0.1, 1.0),
    **dict.fromkeys(NEWER, (1.0, 0.15)),
}
START, SPREAD = ([pair[i] for pair in NUMBERS.values()] for i in (0, 1))
"""The spread is how far, in log, a number may be from its start at the price of one such row error as `ROW`."""
ROW = 0.1
LIKE = "h100"


def newer_chips(dense):
    """Chips without dense runs: their data sheets are known, their efficiencies follow H100's."""
    return [chip for chip in chips() if chip not in dense]


def unpack(vector, newer):
    values = dict(zip(NUMBERS, map(float, np.exp(vector)), strict=True))
    base = fitted_efficiency(LIKE)
    speed, own = values.pop("newer"), {chip: values.pop(chip) for chip in NEWER}
    common = {
        "fp8": float(np.clip(values.pop("newer_fp8"), 1.0, 2.0)),
        "attention": min(values.pop("newer_attention") * base.attention, 0.95),
        "memory": min(values.pop("newer_memory") * base.memory, 0.95),
    }
    values["overlap"] = min(values["overlap"], 0.9)
    efficiencies = {
        chip: dataclasses.replace(base, matmul=min(speed * own[chip] * base.matmul, 0.95), **common) for chip in newer
    }
    return ExpertEfficiency(**values), efficiencies


def log_errors(pairs, experts, newer):
    errors = []
    for run, seconds in pairs:
        more = {"efficiency": newer[run.cluster.chip]} if run.cluster.chip in newer else {}
        cluster = dataclasses.replace(run.cluster, experts=experts, **more)
        errors.append(np.log(step_time(run.dims, run.job, cluster).total / seconds))
    return np.array(errors)


def fit(pairs, newer):
    start, spread = np.log(START), np.array(SPREAD)

    def residuals(vector):
        rows = log_errors(pairs, *unpack(vector, newer)) / ROW
        rows = np.sign(rows) * np.sqrt(2 * (np.sqrt(1 + rows**2) - 1))
        return np.concatenate([rows, (vector - start) / spread])

    return unpack(least_squares(residuals, start, max_nfev=200, x_scale=0.1).x, newer)


def held_out_errors(pairs, newer, seed):
    order, count = np.random.default_rng(seed).permutation(len(pairs)), len(pairs) * 3 // 10
    held_out, rest = ([pairs[i] for i in part] for part in (order[:count], order[count:]))
    return np.abs(np.expm1(log_errors(held_out, *fit(rest, newer))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--hold-out", type=int, default=0, metavar="FITS")
    arguments = parser.parse_args()
    pairs = []
    for row in read_expert_rows(arguments.runs):
        try:
            pairs.append((describe_experts(row), measured_experts(row).seconds))
        except UnpredictableError as reason:
            print(row["id"], reason)
    head, _, text = FITTED.read_text().partition("\n")
    fitted = yaml.safe_load(text)
    newer = newer_chips({c for c in fitted["chips"] if c not in fitted.get("like_" + LIKE, [])})
    experts, efficiencies = fit(pairs, newer)
    fitted["experts"] = {k: round(v, 3) for k, v in dataclasses.asdict(experts).items()}
    fitted["like_" + LIKE] = newer
    fitted["chips"] |= {c: {k: round(v, 3) for k, v in dataclasses.asdict(e).items()} for c, e in efficiencies.items()}
    errors = log_errors(pairs, experts, efficiencies)
    for (run, seconds), error in sorted(zip(pairs, errors, strict=True), key=lambda pair: pair[1]):
        print(f"{run.id:45} {seconds:8.2f} s {np.expm1(error):+.0%}")
    print(fitted["experts"], efficiencies[newer[0]] if newer else "")
    print(f"{len(pairs)} runs, median {np.median(np.abs(np.expm1(errors))):.1%}")
    if arguments.hold_out:
        every = [held_out_errors(pairs, newer, seed) for seed in range(arguments.hold_out)]
        medians, highs = np.median(every, axis=1), np.quantile(every, 0.9, axis=1)
        (low, median, high), (least, p90, most) = (np.quantile(q, (0.25, 0.5, 0.75)) for q in (medians, highs))
        lines = [
            f"{len(every)} splits, each a fit that does not see {len(every[0])} rows (30 %). Of their errors of step time:",
            "",
            "| | median of a split's rows | 90th percentile of a split's rows |",
            "|---|---|---|",
            f"| split in the middle | {median:.1%} | {p90:.1%} |",
            f"| middle half of the splits | {low:.1%} .. {high:.1%} | {least:.1%} .. {most:.1%} |",
            f"| rows of all splits together | {np.median(every):.1%} | {np.quantile(every, 0.9):.1%} |",
        ]
        print(*lines, sep="\n")
        fitted["error_of_experts"] = {"median": round(float(median), 3), "p90": round(float(p90), 3)}
    FITTED.write_text(head + "\n" + yaml.safe_dump(fitted, sort_keys=False))
    if arguments.hold_out:
        shown = validation_report(validate(arguments.runs)).splitlines()
        lines += [
            "",
            f"All rows of {arguments.runs.name}, fitted on all of them:",
            "",
            *(f"    {line}" for line in shown),
        ]
        write_report(
            RESULTS,
            "The planner against published runs with experts",
            f"fit_experts.py RUNS.csv --hold-out {arguments.hold_out}",
            lines,
        )


if __name__ == "__main__":
    main()
