# SPDX-License-Identifier: Apache-2.0
"""Time and memory of dry runs at full size, and time of plans.

python benchmarks/dry_run.py              writes results/dry_run.md
python benchmarks/dry_run.py --compare    `--fast` against whole compiles of every shipped strategy: results/dry_run_fast.md
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import write_report
from strategy_names import family_and_size

from sporeloom.dry_run.by_depth import reduced_depths
from sporeloom.models.family import size_config
from sporeloom.models.parameters import num_parameters
from sporeloom.strategy.loader import load_strategy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "dry_run.md"
COMPARED = RESULTS.with_name("dry_run_fast.md")
CONFIGS = ROOT / "parallel_configs"
DRY_RUNS = [  # what, arguments, seconds and GB allowed
    ("PanGu 13B, rank 37 of 64, 8 microbatches", ("13b", "pangu_13b_dp4_tp8_pp2", "37", 1), (60, 6)),
    ("PanGu 200B, rank 1000 of 2048, 32 microbatches", ("200b", "pangu_200b_dp16_tp8_pp16", "1000", 1), (240, 12)),
    ("PanGu 13B, all 64 ranks, two at a time", ("13b", "pangu_13b_dp4_tp8_pp2", "all", 2), (300, None)),
    ("PanGu 13B, rank 37, `--fast`", ("13b", "pangu_13b_dp4_tp8_pp2", "37", 1, "--fast"), (20, 6)),
    ("PanGu 200B, rank 1000, `--fast`", ("200b", "pangu_200b_dp16_tp8_pp16", "1000", 1, "--fast"), (30, 12)),
]
PLANS = [("200b", "ascend910a", 2048, 2048, 10), ("13b", "ascend910b", 64, 512, 1)]
UNLIKE = ("compile_s", "compiled_layers")
"""What a report says of its making."""
MEASURED = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def dry_run(
    size: str, strategy: str, ranks: str, jobs: int = 1, *more: str
) -> tuple[float, float, list[dict[str, Any]]]:
    """Seconds, GB of the largest process, and the report of each rank."""
    family = strategy.partition("_")[0]
    command = ["tools/dry_run.py", "--model", family, "--size", size, "--ranks", ranks, "--jobs", str(jobs), "--json"]
    command += ["--strategy", str(CONFIGS / f"{strategy}.yaml"), *more]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SPORELOOM_CACHE": "0"},
    )
    seconds = time.perf_counter() - start
    values = json.loads(done.stdout[done.stdout.index("{") :])
    return seconds, int(done.stderr.split()[-1]) / 2**20, values["ranks"]


def compared(path: Path) -> str | None:
    """A shipped strategy, a rank of each stage: from small depths and whole, which must say the same. Of 200B one rank; None:
    other models beyond 13B, and what is compiled whole in any case."""
    strategy, (family, size) = load_strategy(path), family_and_size(path.stem)
    model, of_stage = size_config(family, size), strategy.mesh.size // strategy.mesh.pp
    is_large = num_parameters(model) > 14e9
    if (is_large and size != "200b") or len(reduced_depths(model, strategy, 0)) == 1:
        return None
    first = range(0, strategy.mesh.size, of_stage)
    ranks = [str(first[-1])] if is_large else list(map(str, first))
    whole, fast = (dry_run(size, path.stem, ",".join(ranks), 1, *more) for more in ((), ("--fast",)))
    reports = [[{k: v for k, v in rank.items() if k not in UNLIKE} for rank in ran[2]] for ran in (whole, fast)]
    same = "yes" if reports[0] == reports[1] else "**NO**"
    line = f"| {path.stem} | {', '.join(ranks)} | {whole[0]:.1f} | {fast[0]:.1f} | {same} |"
    print(line, flush=True)
    return line


def compare() -> None:
    """Two strategies at a time."""
    with ThreadPoolExecutor(2) as pool:
        lines = [line for line in pool.map(compared, sorted(CONFIGS.glob("*.yaml"))) if line]
    head = [
        f"MindSpore {version('mindspore')}. Every shipped strategy of 13B and below that `--fast` derives, a rank of each",
        "stage, and one rank of 200B; compilation cache off, two strategies at a time. Reports are compared field by field,",
        "all but seconds and depths.",
        "",
        "| strategy | ranks | whole, s | `--fast`, s | same report |",
        "|---|---|---|---|---|",
    ]
    write_report(COMPARED, "Dry runs from small depths, and whole", "dry_run.py --compare", head + lines)


def main() -> None:
    if "--compare" in sys.argv[1:]:
        return compare()
    lines = [f"MindSpore {version('mindspore')}", ""]
    lines += ["| dry run | seconds | allowed | GB | allowed | of it compiling |", "|---|---|---|---|---|---|"]
    for what, arguments, (allowed, most) in DRY_RUNS:
        seconds, memory, ranks = dry_run(*arguments)
        compiled = {rank["compiled_as"]: rank["compile_s"] for rank in ranks}
        each = ", ".join(f"{s:.0f}" for s in compiled.values())
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
