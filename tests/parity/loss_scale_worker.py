# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with a loss scale, for test_loss_scale."""

import dataclasses
from pathlib import Path

import mindspore as ms
import numpy as np

from sporeloom.certification.training import decoder_batches
from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.gather import gather_whole
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.loss_scale import LossScale
from sporeloom.train.optim import AdamW, set_number

CONFIG = {"vocab_size": 128, "hidden_size": 64, "seq_len": 32, "num_layers": 2}


def train(path, out, accumulate, runs):
    """{run: (losses, norms, scales, whether the first step changed anything)} of the rank that knows; the others' None.

    `runs`: run -> (first scale or None, dtype, steps). Writes what each run ends with to OUT/RUN.npz.
    """
    strategy = SINGLE_DEVICE if path == "one_device" else load_strategy(path)
    engine, told = Engine.start(strategy), {}
    for run, (scale, dtype, steps) in runs.items():
        told[run] = _train(engine, strategy, Path(out) / run, accumulate, scale, dtype, steps)
    return told if engine.is_log_rank else None


def _train(engine, strategy, out, accumulate, first, dtype, steps):
    config = dataclasses.replace(size_config("pangu", "tiny"), compute_dtype=dtype, **CONFIG)
    ms.set_seed(3)
    net = family_module("pangu", "model").ModelWithLoss(config)
    report = parallelize(net, strategy)
    optimizer = AdamW(net.trainable_params())
    step = TrainStep(
        *(wrap(net, strategy, accumulate), optimizer, report, engine.rank, engine.all_reduce()),
        **{"max_grad_norm": 1.0, "accumulate": accumulate, "loss_scale": first is not None},
    ).set_train()
    batches = list(decoder_batches(config, 8))[:steps]
    engine.prepare(step, *batches[0])
    state = [p for p in step.get_parameters() if not p.name.startswith(("optimizer_", "accu_grads"))]
    before = [parameter.asnumpy().copy() for parameter in state]
    scale, losses, norms, scales, changed = LossScale(first or 1.0), [], [], [], None
    for index, batch in enumerate(batches):
        optimizer.prepare(index + 1, 1e-3)
        if first is not None:
            set_number(step.loss_scale, scale.value)
        scales.append(scale.value)
        loss, norm = (float(value.asnumpy().reshape(())) for value in engine.run(step, *batch))
        losses.append(loss)
        norms.append(norm if np.isfinite(norm) else None)
        scale.follow(bool(np.isfinite(norm)))
        if index == 0:
            same = [np.array_equal(old, parameter.asnumpy()) for old, parameter in zip(before, state, strict=True)]
            changed = engine.max_over_ranks(int(not all(same)))
    weights = {parameter.name for parameter in report.parameters}
    whole = gather_whole(step, engine, report, out.with_name(f"{out.name}.parts"), weights.__contains__)
    if whole is not None:
        np.savez(out.with_name(f"{out.name}.npz"), **whole)
    return losses, norms, scales, bool(changed)
