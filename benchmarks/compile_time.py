# SPDX-License-Identifier: Apache-2.0
"""Seconds until a graph is ready, compiled and from the compilation cache: `python benchmarks/compile_time.py`.

PanGu tiny on 4 processes side by side: partition by MindSpore's front end and choice of CPU kernels, as tools/train.py
reports it. Then whole commands, cold and warm: --resume, generate --launch, a dry run of 13B. Writes
results/compile_time.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from report import write_report

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = [
    "dp2_tp2_zero",
    "dp2_tp2_sp",
    "tp2_pp2",
    "tp2_pp2_recompute",
    "tp2_pp2_interleaved",
    "dp2_pp2_zero",
    "pp4",
]
TRAIN = ["tools/train.py", "--data", "examples/tang_poems.txt", "--launch"]


def run(graphs: Path, *command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds of a command with this compilation cache, and what it left."""
    environment = {**os.environ, "SPORELOOM_CACHE": str(graphs)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    return time.perf_counter() - start, done


def compile_seconds(strategy: str, folder: Path) -> list[float]:
    """Cold and warm, as the tool says it."""
    command = [*TRAIN, "--steps", "2", "--strategy", f"parallel_configs/pangu_tiny_{strategy}.yaml"]
    outputs = [
        run(folder / "graphs", *command, "--output-dir", str(folder / f"{strategy}{i}"))[1].stderr for i in range(2)
    ]
    return [float(re.search(r"compiled in ([\d.]+) s", output).group(1)) for output in outputs]


def whole_commands(folder: Path) -> dict[str, list[float]]:
    """What -> seconds of the whole command, cold and warm."""
    strategy = ["--strategy", "parallel_configs/pangu_tiny_tp2_pp2.yaml"]
    out, none = folder / "resumed", Path("0")
    train = [*TRAIN, *strategy, "--save-every", "2", "--output-dir", str(out)]
    run(none, *train, "--steps", "2")
    generate = [
        "tools/generate.py",
        "--checkpoint",
        out / "checkpoint",
        "--prompt",
        "床前明月光",
        *strategy,
        "--launch",
    ]
    dry_run = ["tools/dry_run.py", "--size", "13b", "--ranks", "37", "--json"]
    dry_run += ["--strategy", "parallel_configs/pangu_13b_dp4_tp8_pp2.yaml"]
    figures = {}
    for what, commands in {
        "train --resume, tp2 pp2, 2 steps": [[*train, "--resume", "--steps", str(steps)] for steps in (4, 6)],
        "generate --launch, tp2 pp2, 64 tokens": [generate] * 2,
        "dry run, PanGu 13B, rank 37 of 64": [dry_run] * 2,
    }.items():
        done = [run(folder / "kept", *command) for command in commands]
        figures[what] = [seconds for seconds, _ in done]
        if "dry run" in what:
            first, second = (json.loads(d.stdout[d.stdout.index("{") :]) for _, d in done)
            assert _without_times(first) == _without_times(second), "a cached graph says something else"
        elif "generate" in what:
            assert done[0][1].stdout == done[1][1].stdout, "a cached graph gives other tokens"
    return figures


def _without_times(values: object) -> object:
    if isinstance(values, dict):
        return {key: _without_times(value) for key, value in values.items() if key != "compile_s"}
    return [_without_times(value) for value in values] if isinstance(values, list) else values


def main() -> None:
    lines = [
        f"MindSpore {version('mindspore')}. Until a rank is ready, 4 processes of PanGu tiny at once; the target is 8 s cold."
    ]
    lines += ["", "| strategy | compiled, s | from the cache, s |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        for strategy in STRATEGIES:
            cold, warm = compile_seconds(strategy, Path(name))
            lines.append(f"| {strategy} | {cold:.1f} | {warm:.1f} |")
            print(lines[-1], flush=True)
        lines += ["", "| whole command | cold, s | warm, s |", "|---|---|---|"]
        for what, (cold, warm) in whole_commands(Path(name)).items():
            lines.append(f"| {what} | {cold:.1f} | {warm:.1f} |")
            print(lines[-1], flush=True)
    write_report(ROOT / "benchmarks" / "results" / "compile_time.md", "Compile time", "compile_time.py", lines)


if __name__ == "__main__":
    main()
