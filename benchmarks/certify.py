# SPDX-License-Identifier: Apache-2.0
"""Seconds that a certificate takes, part by part, with no graph kept from before.

    python benchmarks/certify.py [NAME ...]        of STRATEGIES; all without one

Writes results/certify.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from report import write_report

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "parallel_configs"
STRATEGIES = {
    "pangu_13b_dp4_tp8_pp2": ("pangu", "13b"),
    "codegeex_13b_dp192_tp8": ("codegeex", "13b"),
    "pangu_200b_dp16_tp8_pp16": ("pangu", "200b"),
}


def main() -> None:
    rows = []
    for name in sys.argv[1:] or STRATEGIES:
        family, size = STRATEGIES[name]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "tools/certify.py"), "--model", family, "--size", size, "--fast"]
            command += ["--strategy", str(CONFIGS / f"{name}.yaml"), "--out", f"{folder}/out"]
            command += ["--cluster", str(CONFIGS / "clusters/ascend910b.yaml")]
            start = time.perf_counter()
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "SPORELOOM_CACHE": f"{folder}/graphs"})
            total = time.perf_counter() - start
            values = json.loads(Path(folder, "out/certificate.json").read_text())
        parts = values["seconds"]
        meshes = len(values["proof"]["meshes"])
        rows.append(f"| {name} | {meshes} | {parts['proof']:.0f} | {parts['full_size']:.0f} | {total:.0f} |")
    lines = [
        f"MindSpore {version('mindspore')}. Seconds; the target is 240 for 13B with `--fast`.",
        "",
        "| strategy | small meshes | proof | full size, first, middle and last rank | all |",
        "|---|---|---|---|---|",
        *rows,
    ]
    write_report(
        ROOT / "benchmarks/results/certify.md", "The certificate", " ".join(["certify.py", *sys.argv[1:]]), lines
    )


if __name__ == "__main__":
    main()
