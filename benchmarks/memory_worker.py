# SPDX-License-Identifier: Apache-2.0
"""A job of benchmarks/memory.py: trains a few steps in CPU processes, each of which writes what it held; or predicts it."""

import ctypes
import gc
import json
import math
import sys
from pathlib import Path

STEPS = 3
MEMORY = Path("/proc/self")


def checked(folder: Path):
    """The validated dry run of the job in a folder."""
    from sporeloom.dry_run.config import DryRunConfig, check  # noqa: PLC0415 (after the number of threads is set)

    flags = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    return check(DryRunConfig(config=folder / "model.json", **(flags | {"strategy": Path(flags["strategy"])})))


def status(key: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, the most since `reset`."""
    lines = (MEMORY / "status").read_text(encoding="ascii").split("\n")
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def reset() -> int:
    """Give free memory back, begin a new maximum, and return what the process holds."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    (MEMORY / "clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def train(folder: Path) -> None:
    """Train and write RANK.json: bytes before the first step, and the most during the first and all steps."""
    import mindspore as ms  # noqa: PLC0415

    from sporeloom.certification.training import decoder_batches  # noqa: PLC0415
    from sporeloom.parallel.parallelize import parallelize, wrap  # noqa: PLC0415
    from sporeloom.parallel.step import TrainStep  # noqa: PLC0415
    from sporeloom.runtime.engine import Engine  # noqa: PLC0415
    from sporeloom.tasks.example import task_network  # noqa: PLC0415
    from sporeloom.train.optim import AdamW  # noqa: PLC0415

    run = checked(folder)
    engine = Engine.start(run.strategy)
    ms.set_seed(1)
    net = task_network(run.config.model, run.model, run.task)
    report, accumulate = parallelize(net, run.strategy), run.config.accumulate
    step = TrainStep(
        wrap(net, run.strategy, accumulate),
        AdamW(net.trainable_params()),
        report,
        engine.rank,
        engine.all_reduce(),
        max_grad_norm=1.0,
        accumulate=accumulate,
    ).set_train()
    batches = decoder_batches(run.model, run.batch_size, run.task.name)
    first = next(batches)
    engine.prepare(step, *first)
    held = {"before": reset()}
    for number in range(STEPS):
        step.optimizer.prepare(number + 1, 1e-4)
        loss = engine.run(step, *first)[0]
        held["first" if number == 0 else "most"] = status("VmHWM")
    held |= {"after": status("VmRSS"), "loss": float(loss.asnumpy())}
    (folder / f"rank_{engine.rank}.json").write_text(json.dumps(held), encoding="utf-8")
    engine.close()


def is_in_pool(label) -> bool:
    """Whether MindSpore's pool of a CPU process has it: parameters, inputs and sums over microbatches are arrays of NumPy."""
    from sporeloom.dry_run.memory.run import ON_HOST, RECEIVED  # noqa: PLC0415

    return label.kind not in ("parameter", "optimizer", "input") and label != ON_HOST and label.operator != RECEIVED


def predict(folder: Path) -> None:
    """Write the timeline of a rank of each stage."""
    from sporeloom.dry_run.memory.run import Platform, memory_timeline  # noqa: PLC0415
    from sporeloom.dry_run.partitioned import partition_model  # noqa: PLC0415
    from sporeloom.runtime.engine import LARGE  # noqa: PLC0415

    run = checked(folder)
    batch, accumulate = (run.batch_size, run.seq_len), run.config.accumulate
    partitioned = partition_model(run.config.model, run.model, run.strategy, batch, False, accumulate, run.task)
    elements = 3 * sum(math.prod(parameter.global_shape) for parameter in partitioned.report.parameters)  # with AdamW's
    platform = Platform(on_cpus=True, tiles_broadcasts=run.strategy.mesh.size > 1 or elements >= LARGE)
    found = {}
    for rank in range(run.strategy.mesh.size):
        timeline = memory_timeline(partitioned, rank, platform=platform).only(is_in_pool)
        found[rank] = {"live_bytes": timeline.live_bytes, "pool_bytes": timeline.pool_bytes}
    (folder / "predicted.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    {"train": train, "predict": predict}[sys.argv[1]](Path(sys.argv[2]))
