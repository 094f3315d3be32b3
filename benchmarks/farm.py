# SPDX-License-Identifier: Apache-2.0
"""One parity case of 4 processes again and again from the tests' farm: does any of them hang?

    python benchmarks/farm.py 100

Writes results/farm.md.
"""

import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from report import write_report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import farm  # noqa: E402 (of the tests)


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPORELOOM_CACHE"] = str(Path(folder) / "graphs")
        for i in range(times):
            start = time.perf_counter()
            path = ROOT / "parallel_configs" / "pangu_tiny_tp2_pp2.yaml"
            farm.call(
                "tests/parity/worker.py", "train", path, ["shallow"], Path(folder) / "case", processes=4, timeout=120
            )
            seconds.append(time.perf_counter() - start)
            print(f"{i + 1}: {seconds[-1]:.1f} s", flush=True)
    lines = [
        f"MindSpore {version('mindspore')}. PanGu tiny with two layers under tp2 pp2: five steps of AdamW and of SGD, every",
        "tensor gathered, in warm processes that stay.",
        "",
        "| runs | ended | first, compiled | median | slowest of the others |",
        "|---|---|---|---|---|",
        f"| {times} | {len(seconds)} | {seconds[0]:.1f} s | {sorted(seconds)[times // 2]:.1f} s | {max(seconds[1:]):.1f} s |",
    ]
    write_report(ROOT / "benchmarks" / "results" / "farm.md", "The farm of the tests", "farm.py 100", lines)


if __name__ == "__main__":
    main()
