# SPDX-License-Identifier: Apache-2.0
"""Time and memory of dry runs at full size, and time of plans.

Writes benchmarks/results/dry_run.md.
"""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from report import write_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "dry_run.md"
CONFIGS = ROOT / "parallel_configs"
DRY_RUNS = [  # what, arguments, seconds and GB allowed
    ("PanGu 13B, rank 37 of 64, 8 microbatches", ("13b", "pangu_13b_dp4_tp8_pp2", "37", 1), (60, 6)),
    ("PanGu 200B, rank 1000 of 2048, 32 microbatches", ("200b", "pangu_200b_dp16_tp8_pp16", "1000", 1), (240, 12)),
    ("PanGu 13B, all 64 ranks, two at a time", ("13b", "pangu_13b_dp4_tp8_pp2", "all", 2), (300, None)),
]
PLANS = [("200b", "ascend910a", 2048, 2048, 10), ("13b", "ascend910b", 64, 512, 1)]
MEASURED = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def dry_run(size: str, strategy: str, ranks: str, jobs: int) -> tuple[float, float, list[float]]:
    """Seconds, GB of the largest process, and each compilation's seconds."""
    command = ["tools/dry_run.py", "--model", "pangu", "--size", size, "--ranks", ranks, "--jobs", str(jobs), "--json"]
    command += ["--strategy", str(CONFIGS / f"{strategy}.yaml")]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MINDLOOM_KEPT_GRAPHS": "0"},
    )
    seconds = time.perf_counter() - start
    values = json.loads(done.stdout[done.stdout.index("{") :])
    compiled = {rank["compiled_as"]: rank["compile_s"] for rank in values["ranks"]}
    return seconds, int(done.stderr.split()[-1]) / 2**20, list(compiled.values())


def main() -> None:
    lines = [f"MindSpore {version('mindspore')}", ""]
    lines += ["| dry run | seconds | allowed | GB | allowed | of it compiling |", "|---|---|---|---|---|---|"]
    for what, arguments, (allowed, most) in DRY_RUNS:
        seconds, memory, compiled = dry_run(*arguments)
        each = ", ".join(f"{s:.0f}" for s in compiled)
        lines.append(f"| {what} | {seconds:.1f} | {allowed} | {memory:.2f} | {most or '-'} | {each} |")
        print(lines[-1], flush=True)
    lines += ["", "| plan | seconds | allowed |", "|---|---|---|"]
    for size, chip, devices, batch, allowed in PLANS:
        command = ["tools/plan.py", "--model", "pangu", "--size", size, "--devices", str(devices)]
        command += ["--cluster", str(CONFIGS / "clusters" / f"{chip}.yaml"), "--global-batch-size", str(batch)]
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=True)
        lines.append(f"| PanGu {size} on {devices} {chip} | {time.perf_counter() - start:.2f} | {allowed} |")
        print(lines[-1], flush=True)
    write_report(RESULTS, "Dry runs and plans", "dry_run.py", lines)


if __name__ == "__main__":
    main()
