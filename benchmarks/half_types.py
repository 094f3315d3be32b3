# SPDX-License-Identifier: Apache-2.0
"""How closely 200 steps in float16 and bfloat16 follow float32. Needs ../shared/data: so many Chinese poems that no
run knows them by heart, where a relative difference means little. Writes benchmarks/results/half_types.md.
"""

import tempfile
from pathlib import Path

import numpy as np
from report import ROOT, metrics, sporeloom, write_report

RESULT = ROOT / "benchmarks" / "results" / "half_types.md"
TEXT = ROOT.parent / "shared" / "data" / "zh_poetry.jsonl"
STEPS, WINDOW, BOUND = 200, 20, 0.01
RUNS = {
    "float16": ("--compute-dtype", "float16", "--loss-scale", 4096),
    "float16, scale from 2^32": ("--compute-dtype", "float16"),
    "bfloat16": ("--compute-dtype", "bfloat16"),
}
COMMON = ("--seq-len", 64, "--batch-size", 8, "--steps", STEPS, "--dropout", 0, "--learning-rate", 1e-3)


def losses(folder, name, flags):
    out = folder / name.replace(" ", "-").replace(",", "")
    sporeloom("train", "--data", TEXT, *COMMON, *flags, "--output-dir", out)
    return np.array([step["loss"] for step in metrics(out)])


def main():
    folder = Path(tempfile.mkdtemp(prefix="half-types-"))
    reference = losses(folder, "float32", ())
    lines = [
        f"PanGu tiny, {STEPS} steps of 8 sequences of 64 tokens of Chinese poems, one CPU device; the loss goes",
        f"from {reference[0]:.3f} to {reference[-1]:.3f} in float32. Differences from float32, relative.",
        "",
        f"| type | last step | means of {WINDOW} steps, worst | single steps, worst | steps beyond 1 % |",
        "|---|---|---|---|---|",
    ]
    for name, flags in RUNS.items():
        found = losses(folder, name, flags)
        each = np.abs(found / reference - 1)
        means = np.abs(found.reshape(-1, WINDOW).mean(1) / reference.reshape(-1, WINDOW).mean(1) - 1)
        beyond = int((each > BOUND).sum())
        lines.append(f"| {name} | {each[-1]:.2%} | {means.max():.2%} | {each.max():.2%} | {beyond} of {STEPS} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "float16 with a scale that is lowered from 2^32 passes over its first steps, so it is some steps behind.",
        "CPUs compute bfloat16 as float32 that is rounded after every operator.",
    ]
    write_report(RESULT, "Half precision beside float32", "half_types.py", lines)


if __name__ == "__main__":
    main()
