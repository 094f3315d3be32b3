# SPDX-License-Identifier: Apache-2.0
"""`make demo`: PanGu-alpha (tiny) on a small Chinese text, on one device and with 4 processes (dp2 tp2, optimizer parallel).

Shows both losses step by step, and fails where they differ by more than 1e-5.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "out" / "demo"
STRATEGY = ROOT / "parallel_configs" / "pangu_tiny_dp2_tp2_zero.yaml"
STEPS, SHOWN_EVERY, TOLERANCE = 40, 5, 1e-5


def train(name: str, *arguments: str) -> list[float]:
    """Run tools/train.py into OUT/name. Returns the loss of each step."""
    output = OUT / name
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "--data", str(HERE / "small_town.txt")]
    command += ["--model", "pangu", "--size", "tiny", "--steps", str(STEPS), "--learning-rate", "5e-4"]
    command += ["--output-dir", str(output), *arguments]
    print(f"\n$ python {' '.join(command[1:])}".replace(str(ROOT) + "/", ""), flush=True)
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    with (output / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file]


def main() -> None:
    one = train("one_device")
    tokenizer = str(OUT / "one_device" / "checkpoint" / "tokenizer.model")
    four = train("four_processes", "--tokenizer", tokenizer, "--strategy", str(STRATEGY), "--launch")
    print(f"\n{'step':>4}  {'one device':>12}  {'4 processes':>12}  {'relative difference':>19}")
    differences = [abs(a - b) / abs(a) for a, b in zip(one, four, strict=True)]
    for step in [1, *range(SHOWN_EVERY, STEPS + 1, SHOWN_EVERY)]:
        print(f"{step:4}  {one[step - 1]:12.6f}  {four[step - 1]:12.6f}  {differences[step - 1]:19.1e}")
    print(f"\nthe loss fell from {four[0]:.3f} to {four[-1]:.3f}; largest relative difference {max(differences):.1e}")
    if max(differences) > TOLERANCE or four[-1] >= four[0]:
        sys.exit(f"error: 4 processes should equal one device within {TOLERANCE} and the loss should fall")
    print(
        f"4 processes equal one device within {TOLERANCE}. The checkpoint is in {OUT / 'four_processes' / 'checkpoint'}"
    )


if __name__ == "__main__":
    main()
