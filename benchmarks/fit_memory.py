# SPDX-License-Identifier: Apache-2.0
"""How far predicted memory is from published figures, publishers left out, and the interval that follows.

    python benchmarks/fit_memory.py published_runs.csv

Fits one number, the pool of PyTorch's allocator for each byte in use: once on all figures, and once without each publisher,
whose runs it predicts then. Everything else is counted (sporeloom/planner/published_memory.py). Writes the number and the
interval to sporeloom/planner/memory_errors.yaml, and benchmarks/results/planner_memory.md.
"""

import argparse
import hashlib
import math
from collections import Counter
from pathlib import Path

import numpy as np
import yaml
from planner_errors import COVERAGE, RESULTS, by, figures, inside, publisher_of
from report import write_report

from sporeloom.core.elementary import log
from sporeloom.core.lines import first_line
from sporeloom.planner.errors import GB, MEMORY_ERRORS, memory_errors
from sporeloom.planner.published import UnpredictableError, describe, measured, read_rows
from sporeloom.planner.published_memory import ENGINES, engine_of, run_memory
from sporeloom.planner.validate import validate

POOLS = np.arange(1000, 1501) / 1000
"""Candidates for the pool of PyTorch's allocator for each byte in use."""
TARGETS = {"median": 0.07, "bias": 0.03}
FITS = 0.97
BEFORE = 'Before: median 17.8 %, 90th 50.4 %, bias -14.7 %; "fits" right for 297 of 333, 5 of 6 failures among them.'
"""Of the same rows, by the formulas of our own graphs with a tenth more for PyTorch's allocator (2026-11-29)."""
PRINTED = {"device": "of the device (nvidia-smi)", "reserved": "reserved by the allocator", "allocated": "in use"}
REASONS = """\
- OneFlow's pipelines hold 3 to 4 GB more than its buffers for activations explain, on each of four rows; the reason is not
  in the code that was read. Several processes hold 1.3 GB more than one, and only a part of that is NCCL's.
- Alpa's pipelines do not say which layers a stage has, nor the number of microbatches.
- torchtitan's 405B runs with one schedule or another differ by 10 GB, those with FSDP 1 and 8 by another 10 GB: not modelled.
- BigScience read nvidia-smi by hand at the second step: two of its rows with the same strategy are 44 and 38 GB.
- Two runs that failed are predicted to fit: of 184B by a few GB, and of 206B by far; one of 203B with the same strategy ran,
  and is printed with 67 GB. `glm2_6b` with all its weights trained cannot be on one device of 32 GB: the row's number of
  devices is doubtful.
- No memory of a run with experts is published, and none of them failed: that all are said to fit is a weak test.
"""


def pairs_of(path):
    """[run, predicted, published memory] of the runs that have one."""
    pairs = []
    for row in read_rows(path):
        try:
            run = describe(row)
            found = measured(row, run)
        except UnpredictableError:
            continue
        if found.memory_bytes:
            pairs.append((run, run_memory(run), found.memory_bytes))
    return pairs


def errors_of(pairs, pool):
    """log(predicted / measured) of each figure."""
    return [float(log(memory.shown(pool) / found)) for _, memory, found in pairs]


def fit(pairs):
    """The pool with the least sum of absolute log errors."""
    own = [pair for pair in pairs if pair[1].has_pool]
    return float(min(POOLS, key=lambda pool: sum(map(abs, errors_of(own, float(pool))))))


def name_of(run):
    return next(name for name, engine in ENGINES.items() if engine is engine_of(run))


def held_out_rows(pairs):
    """[id, publisher, engine, log error] of each row, predicted by the number of all other publishers; and these numbers."""
    rows, pools = [], {}
    for publisher in sorted({publisher_of(run.source) for run, *_ in pairs}):
        own = [pair for pair in pairs if publisher_of(pair[0].source) == publisher]
        pools[publisher] = fit([pair for pair in pairs if publisher_of(pair[0].source) != publisher])
        for (run, *_), error in zip(own, errors_of(own, pools[publisher]), strict=True):
            rows.append([run.id, publisher, name_of(run), round(error, 5)])
    return sorted(rows), pools


def interval(rows):
    """Bounds of measured / predicted memory between which COVERAGE of the rows lie, each publisher counting alike: what a
    plan is for has an engine of its own, as they have. Both bounds are equally far."""
    of_publisher = Counter(row[1] for row in rows)
    sizes = sorted((abs(row[3]), 1 / of_publisher[row[1]] / len(of_publisher)) for row in rows)
    shares = np.cumsum([weight for _, weight in sizes])
    size = sizes[int(np.argmax(shares >= COVERAGE - 1e-9))][0]
    return math.floor(math.exp(-size) * 1000) / 1000, math.ceil(math.exp(size) * 1000) / 1000


def errors_text(rows, pool):
    """Text of sporeloom/planner/memory_errors.yaml."""
    low, high = interval(rows)
    head = "# Written by benchmarks/fit_memory.py: the pool of PyTorch's allocator for each byte in use, bounds of measured\n"
    head += "# / predicted memory, and how far it is from figures of publishers that the fit has not seen.\n"
    engines = {name: figures(own) for name, own in {"all": rows, **by(rows, 2)}.items()}
    values = {"pytorch_pool": pool, "coverage": COVERAGE, "low": low, "high": high, "engines": engines}
    return head + yaml.safe_dump(values, sort_keys=False)


def table(rows, column, head):
    lines = [
        f"| {head} | figures | median | 80th | 90th | bias | inside the interval of all others' |",
        "|---" * 7 + "|",
    ]
    for name, own in {"all": rows, **by(rows, column)}.items():
        others = [row for row in rows if row[column] != name]
        one = figures(own)
        sizes = " | ".join(f"{one[key]:.1%}" for key in ("median", "p80", "p90"))
        lines.append(f"| {name} | {len(own)} | {sizes} | {one['bias']:+.1%} | {inside(own, interval(others)):.0%} |")
    return lines


def target_lines(rows, fits):
    one, share = figures(rows), fits["share_right"]
    lines = ["| target | value | reached |", "|---|---|---|"]
    for key, target in TARGETS.items():
        missed = "" if abs(one[key]) <= target else ", missed"
        lines.append(f"| {key} | {target:.0%} | {one[key]:.1%}{missed} |")
    return [*lines, f'| "fits" right | {FITS:.0%} | {share:.1%}{"" if share >= FITS else ", missed"} |']


def fits_lines(path):
    fits = validate(path)["fits"]
    wrong = [*fits["said_not_to_fit_but_ran"], *fits["said_to_fit_but_failed"]]
    counted = [
        f"- {what}: {one['right']} of {one['rows']} right ({one['share_right']:.1%}); said to fit but failed: "
        f"{one['fits_wrong']} of {one['fits_wrong'] + one['does_not_fit_right']}; said not to fit but ran: "
        f"{one['does_not_fit_wrong']}; undecided, as what is recomputed is not published: {one['undecided']}"
        for what, one in (
            ("all runs that ran or failed", fits),
            ("all that decides memory is published", fits["all_published"]),
            ("some of it is assumed", fits["partly_assumed"]),
        )
    ]
    return fits, [*counted, f"- wrong: {', '.join(wrong)}"]


def about(path, pairs, pool, pools):
    """Which figures, and what was fitted."""
    kinds = Counter(engine_of(run).figure for run, *_ in pairs)
    printed = "; ".join(f"{count} {PRINTED[kind]}" for kind, count in kinds.items())
    others = ", ".join(f"{value:.3f} without {name}" for name, value in pools.items())
    return [
        f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}. {len(pairs)} published figures: "
        f"{printed}. No accelerator here.",
        "",
        "Each is predicted without the publisher's own rows. One number is fitted, the pool of PyTorch's allocator for each "
        f"byte in use: {pool:.3f} on all rows; {others}. What an engine holds otherwise than our graphs is read in "
        "its code, with all rows in view: an engine that nobody has read is predicted worse than this. Errors are relative "
        "to the measured memory; bias: the median with its sign, + more than measured.",
    ]


def report_lines(path, pairs, rows, pool, pools):
    fits, judged = fits_lines(path)
    low, high = interval(rows)
    whole = np.expm1(errors_of(pairs, pool))
    each = zip(rows, sorted(pairs, key=lambda pair: pair[0].id), strict=True)
    lines = [
        *about(path, pairs, pool, pools),
        "",
        *table(rows, 1, "publisher"),
        "",
        *table(rows, 2, "engine"),
        "",
        f"Measured / predicted of {COVERAGE:.0%} of the figures, publishers counting alike: {low:.2f} .. {high:.2f}, where "
        f"{inside(rows, (low, high)):.0%} of the rows are. With the number that has seen all "
        f"rows the median is {np.median(np.abs(whole)):.1%}, the bias {np.median(whole):+.1%}. {BEFORE}",
        "",
        *target_lines(rows, fits),
        "",
        "Whether runs fit, by memory in use, as PyTorch's allocator gives back freed blocks before it fails. Nearly all of "
        "them ran, so that the share says little about runs that fail:",
        "",
        *judged,
        "",
        "## Known to be off",
        "",
        REASONS.rstrip(),
        "",
        "## Every figure",
        "",
        "| run | engine | measured, GB | predicted | error |",
        "|---|---|---|---|---|",
        *(
            f"| {run.id} | {row[2]} | {size / GB:.1f} | {size / GB * np.exp(row[3]):.1f} | {np.expm1(row[3]):+.1%} |"
            for row, (run, _, size) in each
        ),
    ]
    return lines, judged, fits


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("runs", type=Path)
    path = parser.parse_args().runs
    pairs = pairs_of(path)
    rows, pools = held_out_rows(pairs)
    pool = fit(pairs)
    MEMORY_ERRORS.write_text(errors_text(rows, pool), encoding="utf-8")
    memory_errors.cache_clear()
    lines, judged, fits = report_lines(path, pairs, rows, pool, pools)
    title, command = "Predicted memory against published figures", "fit_memory.py published_runs.csv"
    write_report(RESULTS / "planner_memory.md", title, command, lines)
    print(*table(rows, 1, "publisher"), *table(rows, 2, "engine"), *target_lines(rows, fits), *judged, sep="\n")


if __name__ == "__main__":
    main()
