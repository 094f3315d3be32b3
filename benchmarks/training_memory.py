# SPDX-License-Identifier: Apache-2.0
"""Memory of one CPU process that trains 100M parameters, beside transformers. Writes benchmarks/results/training_memory.md.

    pip install -e '.[benchmark]', then python benchmarks/training_memory.py

The shapes and the step are those of benchmarks/modern.py. Each case is a process of its own; the kernel says the most memory
that it held (VmHWM). "plain" is the same step as MindSpore runs it by itself.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import modern
from report import ROOT, write_report

from sporeloom.core.lines import split_lines

RESULT = ROOT / "benchmarks" / "results" / "training_memory.md"
STEPS, TARGET = 4, 1.5
WAYS = {"ours": "sporeloom", "plain": "the same step, plain", "eager": "transformers, eager"}


class Plain(modern.Ours):
    """MindSpore runs the step without this package's changes to its graph."""

    def run_of(self, step):
        return step


def held_gb() -> float:
    """The most memory that this process has held."""
    lines = split_lines(Path("/proc/self/status").read_text(encoding="ascii"))
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9


def measure(name: str, shape: str) -> None:
    """Take a few steps; print the memory, the median time of all but the first two steps, and the version."""
    worker = {"ours": modern.Ours, "plain": Plain}.get(name, lambda: modern.Theirs(False))()
    step, taken = worker.train(shape, None), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    print(f"result {held_gb():.3f} {statistics.median(taken[2:]):.3f} {worker.version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "SHAPE"))
    if asked := parser.parse_args().worker:
        return measure(*asked)
    rows, versions = [], {}
    for shape in modern.SHAPES:
        held = {}
        for name in WAYS:
            command = [sys.executable, __file__, "--worker", name, shape]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
            line = next(line for line in split_lines(done.stdout) if line.startswith("result "))
            _, memory, seconds, versions[name] = line.split(" ", 3)
            held[name] = float(memory), float(seconds)
        for name, (memory, seconds) in held.items():
            ratio = memory / held["eager"][0]
            mark = " **missed**" if name == "ours" and ratio > TARGET else ""
            rows.append(f"| {shape} | {WAYS[name]} | {memory:.2f} | {ratio:.2f}{mark} | {1e3 * seconds:.0f} |")
            print(rows[-1], flush=True)
    about = (
        f"{', '.join(dict.fromkeys(versions.values()))}; fp32, {modern.TRAIN[0]} x {modern.TRAIN[1]} tokens, AdamW and "
        f"clipping, {STEPS} steps. Target: {TARGET} times transformers. Each case is a process of its own."
    )
    head = ["| shape | | VmHWM, GB | beside transformers | step, ms |", "|---|---|---|---|---|"]
    write_report(RESULT, "Memory of a training process", "training_memory.py", [about, "", *head, *rows])


if __name__ == "__main__":
    main()
