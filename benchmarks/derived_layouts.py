# SPDX-License-Identifier: Apache-2.0
"""What deriving layouts costs: one rank compiled with the rules of decoder.yaml, and with a rule for every operator.

In turns, each in a process of its own; collectives must be the same. Writes benchmarks/results/derived_layouts.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import write_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "derived_layouts.md"
CASES = [  # size, strategy, rank, turns
    ("tiny", "pangu_tiny_dp2_tp2", 3, 5),
    ("tiny", "pangu_tiny_tp2_pp2", 0, 5),
    ("13b", "pangu_13b_dp4_tp8_pp2", 37, 2),
]
RULES = ("decoder.yaml", "decoder_spelled_out.yaml")


def compile_with(size: str, strategy: str, rank: int, rules: str, folder: Path) -> tuple[float, list[str]]:
    """Seconds of the compilation, and the collectives."""
    config = ROOT / "parallel_configs"
    text = (config / f"{strategy}.yaml").read_text()
    path = folder / f"{strategy}.yaml"
    path.write_text(text.replace("rules: rules/decoder.yaml", f"rules: {config}/rules/{rules}"))
    assert str(config) in path.read_text()
    command = [
        sys.executable,
        "tools/dry_run.py",
        "--size",
        size,
        "--ranks",
        str(rank),
        "--strategy",
        str(path),
        "--json",
    ]
    environment = {**os.environ, "SPORELOOM_CACHE": "0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout[done.stdout.index("{") :])["ranks"][0]
    return report["compile_s"], sorted(json.dumps(c, sort_keys=True) for c in report["collectives"])


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size, strategy, rank, turns in CASES:
            seconds: dict[str, list[float]] = {rules: [] for rules in RULES}
            collectives = {}
            for _ in range(turns):
                for rules in RULES:
                    spent, collectives[rules] = compile_with(size, strategy, rank, rules, Path(folder))
                    seconds[rules].append(spent)
            derived, spelled_out = (statistics.median(seconds[rules]) for rules in RULES)
            same = "the same" if collectives[RULES[0]] == collectives[RULES[1]] else "NOT the same"
            ratio = f"{derived / spelled_out:.2f}"
            row = f"| {strategy}, rank {rank} | {derived:.1f} | {spelled_out:.1f} | {ratio} | {same} |"
            print(row, flush=True)
            rows.append(row)
    head = ["| strategy | derived, s | spelled out, s | ratio (at most 1.1) | collectives |", "|---|---|---|---|---|"]
    write_report(RESULTS, "What deriving layouts costs", "derived_layouts.py", [*head, *rows])


if __name__ == "__main__":
    main()
