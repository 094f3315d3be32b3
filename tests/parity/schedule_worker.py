# SPDX-License-Identifier: Apache-2.0
"""One step of a tiny model in a pipeline, and what each rank did in which order; for test_schedules."""

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
from sporeloom.runtime.spmd.pipeline import StagePrograms
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import strategy_of
from sporeloom.train.optim import AdamW

MODEL = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "seq_len": 16, "dropout_rate": 0.1}
BATCH = 12


def train(cases, layers, out):
    """{name: loss, norm, what this rank ran and the most that it held}, by name of a case; NAME.npz has the gradients.

    `cases`: name -> settings of a strategy file; an empty mapping is one device. `layers`: name -> their number.
    """
    return {name: _train(settings, layers[name], Path(out) / f"{name}.npz") for name, settings in cases.items()}


def _train(settings, layers, out):
    strategy = strategy_of(settings) if settings else SINGLE_DEVICE
    engine = Engine.start(strategy)
    config = dataclasses.replace(size_config("pangu", "tiny"), **{**MODEL, "num_layers": layers})
    ms.set_seed(3)
    net = family_module("pangu", "model").ModelWithLoss(config)
    report = parallelize(net, strategy)
    optimizer = AdamW(net.trainable_params())
    step = TrainStep(wrap(net, strategy), optimizer, report, engine.rank, engine.all_reduce()).set_train()
    batch = next(decoder_batches(config, BATCH))
    engine.prepare(step, *batch)
    optimizer.prepare(1, 1e-3)
    with Traced() as trace:
        loss, norm = (float(value.asnumpy().reshape(())) for value in engine.run(step, *batch)[:2])
    moments = gather_whole(step, engine, report, out.with_suffix(".parts"), lambda name: name.startswith("adam_m."))
    if moments is not None:  # a tenth of the gradients
        np.savez(out, **moments)
    engine.close()
    return {"loss": loss, "norm": norm, **trace}


class Traced:
    """Within it every pass that computes something is written down, and of how many microbatches values are held."""

    def __enter__(self):
        self.run, told = StagePrograms.run, {"passes": [], "held": 0}

        def run(programs, one, microbatch, *given):
            self.run(programs, one, microbatch, *given)
            if one in programs.programs:
                told["passes"].append([one.kind, one.part, microbatch])
            givers = [(programs.cut.givers[name], i) for name, i in programs._values]
            mine = {(g.part, i) for g, i in givers if g.kind == "forward" and programs.stage_of(g) == programs.stage}
            told["held"] = max(told["held"], len(mine))

        StagePrograms.run = run
        return told

    def __exit__(self, *_):
        StagePrograms.run = self.run
