# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of one training step on one CPU process, beside the same model in PyTorch: `make bench`.

Two worker processes take turns in one run, so that a noisy machine is noisy for both; the ratio of their medians is the
claim. Both are also stated as a share of the machine's matrix-product peak, measured in the same run.
Writes benchmarks/results/train_step.md.
"""

import argparse
import itertools
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import numpy as np
from turns import Worker, serve

CONFIG = {"vocab_size": 8192, "hidden_size": 512, "num_layers": 6, "num_heads": 8, "seq_len": 512, "dropout_rate": 0.0}
BATCH, ROUNDS, STEPS_A_TURN = 4, 7, 2
RESULTS = Path(__file__).resolve().parent / "results" / "train_step.md"


def flops_of_step(c: dict) -> float:
    """Of the matrix products, forward and backward: 6 per parameter and token, and the attention's two products."""
    d, tokens = c["hidden_size"], BATCH * c["seq_len"]
    matrices = c["num_layers"] * 12 * d * d + c["vocab_size"] * d
    return 6 * matrices * tokens + 12 * c["num_layers"] * tokens * c["seq_len"] * d


def batch():
    rng = np.random.RandomState(0)
    samples = rng.randint(10, CONFIG["vocab_size"], (BATCH, CONFIG["seq_len"] + 1))
    samples[rng.rand(*samples.shape) < 0.01] = 9
    return samples


def ours():
    import mindspore as ms  # noqa: PLC0415 (each worker loads its own framework only)
    from mindspore import Tensor  # noqa: PLC0415

    from pangu.model import PanGuWithLoss  # noqa: PLC0415
    from sporeloom.data.batch import make_batch  # noqa: PLC0415
    from sporeloom.models.config import ModelConfig  # noqa: PLC0415
    from sporeloom.parallel.parallelize import parallelize  # noqa: PLC0415
    from sporeloom.parallel.step import TrainStep  # noqa: PLC0415
    from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415
    from sporeloom.train.optim import AdamW  # noqa: PLC0415

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    net = PanGuWithLoss(ModelConfig(**CONFIG))
    optimizer = AdamW(net.trainable_params(), bias_correction=True)
    step = TrainStep(net, optimizer, parallelize(net, SINGLE_DEVICE), rank=0, max_grad_norm=1.0).set_train()
    inputs = [Tensor(a) for a in make_batch(batch(), 9, 6)]

    def run(index):
        optimizer.prepare(index + 1, 1e-4)
        return float(step(*inputs)[0].asnumpy())

    return run, f"MindSpore {ms.__version__}"


def theirs():
    import torch  # noqa: PLC0415
    from torch_pangu import TorchPanGu  # noqa: PLC0415

    from sporeloom.data.batch import make_batch  # noqa: PLC0415

    torch.manual_seed(0)
    model = TorchPanGu(**{key: value for key, value in CONFIG.items() if key != "dropout_rate"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, labels, positions, weights = (torch.from_numpy(a) for a in make_batch(batch(), 9, 6))

    def run(_):
        loss = model(tokens.long(), labels.long(), positions.long(), weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return run, f"PyTorch {torch.__version__}"


def work(name: str) -> None:
    """A worker: asked, it takes a few steps and answers with seconds a step and the loss."""
    run, version = {"ours": ours, "theirs": theirs}[name]()
    indices = itertools.count()
    for _ in range(3):
        run(next(indices))

    def turn(_):
        start = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            loss = run(next(indices))
        return {"seconds": (time.perf_counter() - start) / STEPS_A_TURN, "loss": loss}

    serve(turn, version)


def matmul_peak() -> float:
    """FLOP/s of a large float32 product with NumPy's BLAS, the best of some."""
    a, b = (np.random.RandomState(i).rand(2048, 2048).astype(np.float32) for i in (0, 1))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=["ours", "theirs"])
    if name := parser.parse_args().worker:
        return work(name)
    workers = [Worker(__file__, "ours"), Worker(__file__, "theirs")]
    seconds, peaks = ([], []), []
    for _ in range(ROUNDS):
        for worker, taken in zip(workers, seconds, strict=True):
            taken.append(worker.ask()["seconds"])
        peaks.append(matmul_peak())
    for worker in workers:
        worker.close()
    report(workers, [statistics.median(taken) for taken in seconds], max(peaks), seconds)


def report(workers, medians, peak, seconds) -> None:
    tokens, flops = BATCH * CONFIG["seq_len"], flops_of_step(CONFIG)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    lines = [
        "# One training step on one CPU process",
        "",
        f"{date.today()}, {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, fp32; "
        f"PanGu with {CONFIG}, batch {BATCH}, {ROUNDS} alternating turns of {STEPS_A_TURN} steps. "
        "`python benchmarks/train_step.py`",
        "",
        f"Matrix-product peak (NumPy, 2048 cubed, best): {peak / 1e9:.0f} GFLOP/s.",
        "",
        "| | step, median | tokens/s | share of the peak |",
        "|---|---|---|---|",
    ]
    for worker, median in zip(workers, medians, strict=True):
        share = flops / median / peak
        lines.append(f"| {worker.version} | {median * 1e3:.0f} ms | {tokens / median:.0f} | {share:.0%} |")
    lines += [
        "",
        f"Ours is {medians[1] / medians[0]:.2f} x PyTorch by medians (by turn {min(ratios):.2f} .. {max(ratios):.2f}); "
        "the target is 1.0 x.",
    ]
    print("\n".join(lines))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
