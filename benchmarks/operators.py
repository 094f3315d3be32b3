# SPDX-License-Identifier: Apache-2.0
"""Operators x layouts, forward and backward, by all ranks of small meshes, beside one device; writes results/operators.md.

Every function of `tests/parity/operator_functions.py` in every scheme of `tests/parity/operator_sweep.py`. MindSpore compiles
a group of functions for one device, natively as well, which gives the numbers to compare with; our partitioner shards that
graph for each scheme; the graphs of all ranks run in one process.
"""

import sys
import time

from report import ROOT, write_report

sys.path.insert(0, str(ROOT / "tests" / "parity"))

from operator_functions import FUNCTIONS
from operator_sweep import CLOSE, GROUPS, SCHEMES, sweep

RESULTS = ROOT / "benchmarks" / "results" / "operators.md"


def outcome(told):
    if isinstance(told, str):
        return "refused"
    off, kinds = told
    return "**wrong**" if off >= CLOSE else "whole" if kinds else "equal"


def lines_of(told, seconds):
    """`told`: {function: {scheme: outcome of `sweep`}}"""
    cases = [(name, scheme) for name in told for scheme in told[name]]
    counts = dict.fromkeys(("equal", "whole", "refused", "**wrong**"), 0)
    for name, scheme in cases:
        counts[outcome(told[name][scheme])] += 1
    largest = max(each[0] for of in told.values() for each in of.values() if not isinstance(each, str))
    yield (
        f"{len(told)} functions, one operator or a few each, in {len(SCHEMES)} layouts: {len(cases)} cases, forward and "
        f"backward with a loss of squares and cubes. **{counts['equal']} equal, {counts['whole']} equal with an operator "
        f"that every rank computed whole, {counts['refused']} refused, {counts['**wrong**']} wrong.** The largest difference "
        f"of a loss or a gradient is {largest:.1e} of its largest entry; {CLOSE:.0e} would be wrong. {seconds / 60:.0f} "
        "minutes of one core."
    )
    yield ""
    yield "| | mesh | x (8, 12) | parameters |"
    yield "|---|---|---|---|"
    for number, (scheme, (degrees, of_x, of_parameters)) in enumerate(SCHEMES.items(), 1):
        mesh = " ".join(f"{axis}{degree}" for axis, degree in degrees.items())
        of = "; ".join(f"{name} {shown(dims)}" for name, dims in of_parameters.items()) or "replicated"
        yield f"| {number}: {scheme} | {mesh} | {shown(of_x)} | {of} |"
    yield ""
    yield "`equal`; `whole`: equal, with operators that every rank computed whole; `refused`."
    yield ""
    yield f"| function | {' | '.join(map(str, range(1, len(SCHEMES) + 1)))} | computed whole, or why refused |"
    yield f"|---|{'---|' * len(SCHEMES)}---|"
    for name in sorted(told):
        of = [told[name][scheme] for scheme in SCHEMES]
        kinds = sorted({kind for each in of if not isinstance(each, str) for kind in each[1]})
        why = sorted({each for each in of if isinstance(each, str)})
        yield f"| {name} | {' | '.join(map(outcome, of))} | {'; '.join([*kinds, *why])} |"


def shown(dims):
    return "[" + ", ".join(" ".join(axes) or "-" for axes in dims) + "]"


def main():
    told, started = {name: {} for name in FUNCTIONS}, time.process_time()
    for group in GROUPS:
        for scheme, of in sweep(group, list(SCHEMES), native=True).items():
            for name, each in of.items():
                told[name][scheme] = each
        print(f"{group[0]} to {group[-1]}: {time.process_time() - started:.0f} s", flush=True)
    lines = list(lines_of(told, time.process_time() - started))
    write_report(RESULTS, "Operators in all layouts, beside one device", "operators.py", lines)
    print(lines[0])


if __name__ == "__main__":
    main()
