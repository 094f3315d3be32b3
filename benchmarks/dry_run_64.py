# SPDX-License-Identifier: Apache-2.0
"""Seconds that dry runs of all distinct ranks take, cold and warm, and bytes that a rank sends. Writes results/dry_run_64.md.

python benchmarks/dry_run_64.py           13B on 64 devices, 32 microbatches
python benchmarks/dry_run_64.py --large   200B on 2048 devices, too
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import ROOT, sporeloom, write_report

from sporeloom.strategy.loader import load_strategy

RESULTS = ROOT / "benchmarks" / "results" / "dry_run_64.md"
CONFIGS = ROOT / "parallel_configs"
JOBS = [  # size, strategy, microbatches, flags
    ("13b", "pangu_13b_dp4_tp8_pp2", 32, ()),
    ("13b", "pangu_13b_dp4_tp8_pp2", 32, ("--compute-dtype", "bfloat16", "--fast")),
]
LARGE = [("200b", "pangu_200b_dp16_tp8_pp16", 32, ("--fast",))]
ALLOWED = "30, 5"
"""Seconds allowed for 13B as a whole, cold and warm."""
SENT = {"AllReduce": 2.0, "AllGather": 1.0, "ReduceScatter": 1.0, "AlltoAll": 1.0, "Send": 1.0, "Receive": 0.0}
"""Bytes sent for each byte of the unsharded tensor, by the ring algorithm on many ranks."""


def strategy_file(folder: Path, name: str, microbatches: int) -> Path:
    text = (CONFIGS / f"{name}.yaml").read_text()
    before = load_strategy(CONFIGS / f"{name}.yaml").pipeline.num_microbatches
    text = text.replace(f"num_microbatches: {before}", f"num_microbatches: {microbatches}")
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("rules: rules/", f"rules: {CONFIGS}/rules/"))
    return path


def ranks(size: str, strategy: Path, cache: Path, *more: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds, and the reports of one rank of each stage."""
    mesh = load_strategy(strategy).mesh
    first = ",".join(str(mesh.ranks_of_stage(stage).start) for stage in range(mesh.pp))
    asked = ("dry-run", "--model", "pangu", "--size", size, "--strategy", strategy, "--ranks", first, "--json")
    start = time.perf_counter()
    printed = sporeloom(*asked, "--jobs", 2, *more, SPORELOOM_CACHE=str(cache))
    return time.perf_counter() - start, json.loads(printed[printed.index("{") :])["ranks"]


def sent(rank: dict[str, Any]) -> float:
    return sum(c["bytes_per_step"] * SENT[c["kind"]] for c in rank["collectives"])


def main(jobs: list[tuple[str, str, int, tuple[str, ...]]]) -> None:
    lines = [
        f"MindSpore {version('mindspore')}. A rank of each stage; the ranks of a stage are alike. Bytes: of the rank that",
        "sends most.",
        "",
        "| job | cold, s | warm, s | allowed | GB sent in a step |",
        "|---|---|---|---|---|",
    ]
    for size, name, microbatches, more in jobs:
        with tempfile.TemporaryDirectory() as folder:
            path = strategy_file(Path(folder), name, microbatches)
            cold, _ = ranks(size, path, Path(folder) / "cache", *more)
            warm, found = ranks(size, path, Path(folder) / "cache", *more)
        job = f"{name}, {microbatches} microbatches" + "".join(f" {word}" for word in more)
        allowed, most = "-" if more else ALLOWED, max(map(sent, found)) / 1e9
        lines.append(f"| {job} | {cold:.1f} | {warm:.1f} | {allowed} | {most:.2f} |")
        print(lines[-1], flush=True)
    write_report(RESULTS, "Dry runs of all distinct ranks", " ".join(["dry_run_64.py", *sys.argv[1:]]), lines)


if __name__ == "__main__":
    main([*JOBS, *(LARGE if "--large" in sys.argv else [])])
