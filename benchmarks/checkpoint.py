# SPDX-License-Identifier: Apache-2.0
"""Resharding a 2 GB checkpoint: speed and memory. What saving in the background costs a step.

Writes benchmarks/results/checkpoint.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from report import write_report

from sporeloom.checkpoint.content_hash import content_hash
from sporeloom.checkpoint.manifest import Manifest, StoredSlice, TensorEntry
from sporeloom.checkpoint.tensor_files import TensorDescription, write_tensor_by_tensor
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.tensor_slice import TensorSlice

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoint.md"
MODEL = ModelConfig(vocab_size=32768, hidden_size=1024, num_layers=11, num_heads=16, seq_len=1024)
STRATEGIES = ("pangu_tiny_tp4", "pangu_tiny_dp2_tp2_zero", "pangu_tiny_pp4")
TURNS, STEPS, EVERY = 3, 41, 20


def make_checkpoint(folder: Path) -> int:
    """Random weights and moments of MODEL in one file; returns the bytes."""
    folder.mkdir()
    shapes = {
        kind + name: shape for kind in ("", "adam_m.", "adam_v.") for name, shape in parameter_shapes(MODEL).items()
    }
    name, tensors = "rank-00000.safetensors", {}

    def arrays():
        rng = np.random.default_rng(0)
        for tensor, shape in shapes.items():
            array = rng.standard_normal(shape, np.float32)
            digest = f"{content_hash(array):016x}"
            tensors[tensor] = TensorEntry(
                shape, "float32", digest, (StoredSlice(name, TensorSlice.full(shape), digest),)
            )
            yield array

    write_tensor_by_tensor(folder / name, {n: TensorDescription("float32", s) for n, s in shapes.items()}, arrays())
    size = (folder / name).stat().st_size
    Manifest(1, tensors, {name: size}, {}, {"family": "pangu", **MODEL.to_dict()}, {}, {}).write(folder)
    return size


def peak_and_seconds(*arguments) -> tuple[float, float]:
    """Peak resident memory in MB of a command and everything it starts, one process at a time; seconds."""
    code = (
        "import resource, subprocess, sys, time; t = time.time(); subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.time() - t)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "GLOG_v": "3"},
    )
    kilobytes, seconds = done.stdout.split()[-2:]
    return int(kilobytes) / 1e3, float(seconds)


def resharding(folder: Path) -> list[str]:
    rows = ["| to | seconds | MB/s | peak memory, MB |", "|---|---|---|---|"]
    size = make_checkpoint(folder / "source") / 1e6
    for what in ("--full", "--full --verify", *STRATEGIES):
        flags = what.split() if what.startswith("--") else ["--strategy", ROOT / "parallel_configs" / f"{what}.yaml"]
        target = folder / "target"
        peak, seconds = peak_and_seconds("tools/reshard_checkpoint.py", folder / "source", target, *flags)
        rows.append(f"| {what} | {seconds:.1f} | {size / seconds:.0f} | {peak:.0f} |")
        print(rows[-1], flush=True)
        subprocess.run(["rm", "-r", target], check=True)
    return [
        f"{size:.0f} MB, {3 * len(parameter_shapes(MODEL))} tensors, the largest {32768 * 1024 * 4 / 1e6:.0f} MB.",
        "",
        *rows,
    ]


def saving(folder: Path) -> list[str]:
    """Whole runs take turns; the time between two steps' lines holds everything, the save included."""
    means: dict[str, list[float]] = {"no save": [], "async": [], "in the foreground": []}
    flags = {
        "no save": [],
        "async": ["--save-every", EVERY, "--async-save"],
        "in the foreground": ["--save-every", EVERY],
    }
    for _ in range(TURNS):
        for kind in means:
            means[kind].append(mean_step(folder, *flags[kind]))
            print(kind, f"{means[kind][-1]:.4f}", flush=True)
            subprocess.run(["rm", "-r", folder / "run"], check=True)
    base = means["no save"]
    rows = ["| saving every 20 steps | mean step, s (median of the runs) | against no save, by turn |", "|---|---|---|"]
    for kind, values in means.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        text = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        rows.append(f"| {kind} | {statistics.median(values):.4f} | {text} |")
    return rows


def mean_step(folder: Path, *flags) -> float:
    """Mean seconds of a step by the wall clock: TensorBoard notes when each was done."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 (slow to load)

    config = folder / "model.json"
    config.write_text(json.dumps({"hidden_size": 256, "num_layers": 6}))
    command = [
        sys.executable,
        "tools/train.py",
        "--data",
        "examples/small_town.txt",
        "--seq-len",
        "128",
        "--steps",
        STEPS,
    ]
    command += ["--batch-size", 4, "--config", config, "--output-dir", folder / "run", *flags]
    subprocess.run([*map(str, command)], cwd=ROOT, check=True, capture_output=True, env={**os.environ, "GLOG_v": "3"})
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    loss = events.Scalars("loss")
    return (loss[-1].wall_time - loss[0].wall_time) / (len(loss) - 1)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        moved = resharding(folder)
        subprocess.run(["rm", "-r", folder / "source"], check=True)
        saved = saving(folder)
    lines = [
        "## Resharding (targets: 200 MB/s, under 600 MB of memory)",
        "",
        *moved,
        "",
        "Seconds hold everything, Python's and MindSpore's start included.",
        "",
        "## Saving (target: async at most 1.10)",
        "",
        *saved,
    ]
    write_report(RESULTS, "Checkpoints", "checkpoint.py", lines)


if __name__ == "__main__":
    main()
