# SPDX-License-Identifier: Apache-2.0
"""Flip one bit in one rank, in what it receives or holds, and see whether `bisect` names the rank and the operator; with
`--cost`, measure what recording costs instead.

Writes results/flight_recorder.md. Ranks, messages, weights and optimizer state, and bits are drawn at random, seeded.
A bit of a message that rounding or a maximum removes changes nothing: both recordings are equal, and another one is drawn.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, metrics, write_report

sys.path.insert(0, str(ROOT / "tests"))

from farm import call

RESULTS = ROOT / "benchmarks" / "results" / "flight_recorder.md"
COSTS = ROOT / "benchmarks" / "results" / "flight_recorder_cost.md"
WORKER, STEP = "tests/parity/record_worker.py", 2
CASES = {"pangu_tiny_tp2": (2, 4, 4, 3), "pangu_tiny_tp4": (4, 16, 4, 3), "pangu_tiny_dp2_pp2": (4, 4, 4, 2)}
"""Strategy -> processes, rows of a batch, faults in messages, and faults in weights. With 16 rows sums are in parts, each by
another rank."""
TEXT, COST_STEPS = ROOT / "examples" / "small_town.txt", 20
SPARE = 8
"""Faults in messages that are drawn in addition, for those that change nothing."""


def draw(size, wanted, generator):
    kinds = ["message"] * (wanted["message"] + SPARE) + ["weight"] * wanted["weight"]
    return [
        {
            "rank": generator.randrange(size),
            "kind": kind,
            "which": generator.random(),
            "at": generator.random(),
            "bit": generator.randrange(32),
        }
        for kind in kinds
    ]


def expected(run, fault, answer):
    """How `bisect` begins: rank, and collective, parameter or message between stages."""
    begin = f"first difference: step {STEP}, rank {fault['rank']}: "
    if fault["kind"] == "weight":
        return f"{begin}parameter {answer}, "
    tag, _ = answer
    record = json.loads((run / "record" / f"rank-{fault['rank']}" / f"step-{STEP:08}" / "step.json").read_text())
    calls = [each for each in record["calls"] if repr(each["program"]) in tag]
    places = [each["place"] for run_of in calls for each in run_of["messages"].values() if each["tag"] in tag]
    places += [each["place"] for each in record["transfers"] if each["is_received"] and tag in each["tag"]]
    assert len(set(places)) == 1, (tag, places)
    return f"{begin}{places[0]}, "


def measure(strategy, size, rows, wanted, folder, generator):
    """Lines of the table, how many bits changed nothing, and how many answers are right."""
    faults = [None, *draw(size, wanted, generator)]
    runs = [folder / str(number) for number in range(len(faults))]
    path = ROOT / "parallel_configs" / f"{strategy}.yaml"
    answers = call(WORKER, "train", path, list(map(str, runs)), faults, rows, processes=size, timeout=600)
    lines, without_effect, num_right, left = [], 0, 0, dict(wanted)
    for number, (run, fault) in enumerate(zip(runs, faults, strict=True)):
        if fault is None or not left[fault["kind"]]:
            continue
        code, output = call(WORKER, "bisect", str(runs[0]), str(run))
        if code == 0:
            without_effect += 1
            continue
        left[fault["kind"]] -= 1
        answer = expected(run, fault, answers[fault["rank"]][number])
        is_right = answer in output
        num_right += is_right
        said = re.sub(r".*first difference: ", "", output.strip(), flags=re.DOTALL)
        lines.append(
            f"| `{strategy}` | {fault['rank']} | {fault['kind']} | {fault['bit']} | {said} | {'yes' if is_right else 'no'} |"
        )
        print(lines[-1], "" if is_right else f"wanted: {answer}", flush=True)
    return lines, without_effect, num_right


def steps_and_bytes(strategy, folder, keep):
    """Seconds of the fastest and the median step, bytes on disk after the run, and bytes of the largest step."""
    out = folder / f"kept-{keep}"
    words = ["train", "--data", TEXT, "--steps", COST_STEPS, "--batch-size", 8, "--seq-len", 128, "--record", keep]
    words += ["--strategy", strategy, "--launch", "--output-dir", out]
    subprocess.run([sys.executable, "-m", "sporeloom", *map(str, words)], cwd=ROOT, check=True, capture_output=True)
    seconds = [line["step_time_s"] for line in metrics(out)[2:]]
    files = [path for path in (out / "record").rglob("*") if path.is_file()]
    of_step = [sum(f.stat().st_size for f in step.iterdir()) for step in (out / "record").glob("rank-*/step-*")]
    size = sum(path.stat().st_size for path in files)
    return min(seconds), statistics.median(seconds), size, max(of_step, default=0)


def cost():
    """Write what recording costs, on disk and in time."""
    lines = ["| strategy | steps kept | fastest step | median step | on disk, all ranks | a step of a rank |"]
    lines += ["|---|---|---|---|---|---|"]
    for keep in (0, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            fastest, median, total, of_step = steps_and_bytes("pangu_tiny_tp2", Path(folder), keep)
        sizes = f"{total / 1e6:.1f} MB | {of_step / 1e6:.1f} MB"
        lines.append(f"| `pangu_tiny_tp2` | {keep} | {fastest:.2f} s | {median:.2f} s | {sizes} |")
        print(lines[-1], flush=True)
    head = [f"`train --record`, pangu tiny with 8 layers, {COST_STEPS} steps of 8 x 128 tokens on 2 CPU processes.", ""]
    write_report(COSTS, "What the flight recorder costs", "flight_recorder.py --cost", [*head, *lines])


def main():
    generator, begin, lines, without_effect, num_right = random.Random(1), time.monotonic(), [], 0, 0
    for strategy, (size, rows, messages, weights) in CASES.items():
        wanted = {"message": messages, "weight": weights}
        with tempfile.TemporaryDirectory() as folder:
            more, unseen, right = measure(strategy, size, rows, wanted, Path(folder), generator)
        lines, without_effect, num_right = [*lines, *more], without_effect + unseen, num_right + right
    head = [
        f"`bisect` names rank and operator, or parameter, of {num_right} of {len(lines)} flipped bits; {without_effect} more "
        f"bits changed nothing. {time.monotonic() - begin:.0f} s.",
        "",
        "| strategy | rank | in a | bit | answer | right |",
        "|---|---|---|---|---|---|",
    ]
    write_report(RESULTS, "A flipped bit in one rank", "flight_recorder.py", [*head, *lines])


if __name__ == "__main__":
    cost() if sys.argv[1:] == ["--cost"] else main()
