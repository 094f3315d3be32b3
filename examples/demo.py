# SPDX-License-Identifier: Apache-2.0
"""`make demo`: PanGu-alpha (tiny) learns six poems, on one device and with 4 processes (dp2 tp2, optimizer parallel).

Shows the losses of the first steps side by side, and fails where they differ by more than 1e-5. The 4 processes then go on
until the poems are learned by heart; given the beginning of one, on one device and with 4 processes, the model recites the
rest. Fails where the texts differ.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "out" / "demo"
STRATEGY = ROOT / "parallel_configs" / "pangu_tiny_dp2_tp2_zero.yaml"
COMPARED, STEPS, SHOWN_EVERY, TOLERANCE = 40, 160, 5, 1e-5
PROMPT = "床前明月光"


def train(name: str, steps: int, *arguments: str) -> list[float]:
    """Run tools/train.py into OUT/name. Returns the loss of each step."""
    output = OUT / name
    command = ["tools/train.py", "--data", str(HERE / "tang_poems.txt"), "--model", "pangu", "--size", "tiny"]
    command += ["--steps", str(steps), "--seq-len", "32", "--learning-rate", "5e-4", "--adam-epsilon", "1e-6"]
    command += ["--warmup-steps", "15", "--decay-steps", str(STEPS)]
    command += ["--output-dir", str(output), *arguments]
    run(command)
    with (output / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file]


def generate(*arguments: str) -> str:
    """Run tools/generate.py on what 4 processes trained. Returns the text."""
    checkpoint = str(OUT / "four_processes" / "checkpoint")
    command = ["tools/generate.py", "--checkpoint", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "40"]
    text = run([*command, *arguments], subprocess.PIPE)
    print(PROMPT, end="")
    print(text, end="", flush=True)
    return text


def run(command: list[str], stdout: int | None = None) -> str:
    """Run a tool, its command shown first. Returns what it printed if `stdout` is a pipe."""
    print(f"\n$ python {' '.join(command)}".replace(str(ROOT) + "/", ""), flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False, stdout=stdout, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def main() -> None:
    one = train("one_device", COMPARED)
    tokenizer = str(OUT / "one_device" / "checkpoint" / "tokenizer.model")
    four = train("four_processes", STEPS, "--tokenizer", tokenizer, "--strategy", str(STRATEGY), "--launch")
    print(f"\n{'step':>4}  {'one device':>12}  {'4 processes':>12}  {'relative difference':>19}")
    differences = [abs(a - b) / abs(a) for a, b in zip(one, four[:COMPARED], strict=True)]
    for step in [1, *range(SHOWN_EVERY, COMPARED + 1, SHOWN_EVERY)]:
        print(f"{step:4}  {one[step - 1]:12.6f}  {four[step - 1]:12.6f}  {differences[step - 1]:19.1e}")
    print(f"\nlargest relative difference {max(differences):.1e}")
    if max(differences) > TOLERANCE or four[-1] >= four[0]:
        sys.exit(f"error: 4 processes should equal one device within {TOLERANCE} and the loss should fall")
    print(f"4 processes equal one device within {TOLERANCE}; they went on to a loss of {four[-1]:.3f}")
    texts = [generate(), generate("--strategy", str(STRATEGY), "--launch")]
    if texts[0].strip() != texts[1].strip():
        sys.exit("error: 4 processes should continue the text as one device does")
    print(f"\nthe same text again. The checkpoint is in {OUT / 'four_processes' / 'checkpoint'}")


if __name__ == "__main__":
    main()
