# SPDX-License-Identifier: Apache-2.0
"""CodeGeeX's tokenizer in MB/s, and HumanEval-X's own solutions, isolated: `python benchmarks/humaneval_x.py --data FOLDER`.

The released vocabulary is read from --tokenizer (vocab.json and merges.txt). Writes benchmarks/results/humaneval_x.md.
"""

import argparse
import os
import statistics
import subprocess
import sysconfig
import time
from pathlib import Path

from report import write_report

from codegeex.tokenizer import CodeGeeXTokenizer
from sporeloom.core.lines import first_line
from sporeloom.evaluation.config import read_problems
from sporeloom.evaluation.judge import judge_all
from sporeloom.evaluation.programs import NAMES, program
from sporeloom.evaluation.sandbox import Limits
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "humaneval_x.md"
TIMES = 5
VERSIONS = {
    "python": ("python3", "--version"),
    "cpp": ("g++", "--version"),
    "java": ("java", "--version"),
    "js": ("node", "--version"),
    "go": ("go", "version"),
    "rust": ("rustc", "--version"),
}


def tokenizer_speed(folder: Path) -> list[str]:
    """Encoding the standard library's own source, file by file, on one core."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {0})
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")]
    num_bytes = sum(len(text.encode()) for text in texts)
    speeds = []
    for _ in range(TIMES):
        tokenizer = CodeGeeXTokenizer(folder)  # anew: its cache of pieces starts empty
        start = time.perf_counter()
        num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        speeds.append(num_bytes / 1e6 / (time.perf_counter() - start))
    os.sched_setaffinity(0, range(os.cpu_count()))
    median = statistics.median(speeds)
    return [
        f"{num_bytes / 1e6:.1f} MB of the standard library, {num_tokens:,} tokens, one core, {TIMES} times, cache empty:",
        f"**{median:.1f} MB/s** (median; {min(speeds):.1f} .. {max(speeds):.1f}); target 5.",
    ]


def solutions(data: Path) -> list[str]:
    rows = ["| language | passed | seconds | failed | version |", "|---|---|---|---|---|"]
    for language in NAMES:
        try:
            toolchain = find_toolchain(language)
        except MissingToolchainError as error:
            rows.append(f"| {language} | skipped: {error} | | | |")
            continue
        problems = read_problems(data, language)
        programs = {program(p, language, p["canonical_solution"]): task for task, p in problems.items()}
        start = time.perf_counter()
        verdicts = {programs[p]: verdict for p, verdict in judge_all(list(programs), toolchain, Limits(), 20.0)}
        seconds = time.perf_counter() - start
        failed = sorted(task for task, verdict in verdicts.items() if not verdict.passed)
        version = first_line(subprocess.run(VERSIONS[language], capture_output=True, text=True).stdout)
        passed = f"{len(verdicts) - len(failed)} of {len(verdicts)}"
        rows.append(f"| {language} | {passed} | {seconds:.0f} | {', '.join(failed)} | {version} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/humaneval-x")
    parser.add_argument("--tokenizer", type=Path, default=ROOT.parent / "shared/golden/codegeex_tokenizer")
    arguments = parser.parse_args()
    speed = tokenizer_speed(arguments.tokenizer)
    print("\n".join(speed))
    lines = [
        *speed,
        "",
        "The benchmark's own solutions, two programs at a time (target: 164 Python problems in under 120 s):",
        "",
        *solutions(arguments.data),
        "",
        "JavaScript/112 and /155 contradict their own tests, Go/95 depends on the order of a map, Rust/50 needs `rand` 0.7",
        "where Debian has 0.8; `codegeex/README.md` says more.",
    ]
    write_report(RESULTS, "Code: the tokenizer, and programs run isolated", "humaneval_x.py", lines)


if __name__ == "__main__":
    main()
