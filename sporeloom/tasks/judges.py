# SPDX-License-Identifier: Apache-2.0
"""Auxiliary models of a task: the reference, and the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.examples import Example, ended_batch
from sporeloom.inference.model import load_model
from sporeloom.models.adapters import is_adapter
from sporeloom.models.family import family_module
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.replace import share_parameters
from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run
from sporeloom.train.loading import leave_undrawn, start_from

PREFIX = "reference."


class Reference:
    """The initial model, which gives log-probabilities of tokens: `net`, a network with an objective.

    Where adapters are trained its weights are the run's own, without the adapters; else it has a copy.
    """

    def __init__(self, engine: Engine, run: Run, network: nn.Cell, objective: nn.Cell):
        with no_init_parameters():
            net: nn.Cell = family_module(run.family, "model").ModelWithLoss(run.model, objective)
            if run.lora:  # new adapters change nothing; MindSpore needs a trainable parameter in every stage
                attach_adapters(net.model, run.lora)
        for parameter in net.get_parameters():
            parameter.name = PREFIX + parameter.name
        if run.lora:
            share_parameters(net.model, network.model, lambda parameter: not is_adapter(parameter.name))
        else:
            leave_undrawn(net.get_parameters())
        report = parallelize(net, run.strategy)
        self.net = net.set_train(False)
        if not run.lora:
            rows, length = run.sizes.of_step(0)
            ints = Tensor(np.zeros((rows, length)), ms.int32)
            engine.prepare(self.net, ints, ints, ints, Tensor(np.zeros((rows, length)), ms.float32))
            assert run.config.from_checkpoint
            start_from(self.net, engine, report, run.config.from_checkpoint, prefix=f"{PREFIX}model.")


class Judge:
    """A reward model, which gives the rewards of texts."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine = engine
        self.net = load_model(folder, *load_config(folder), engine.strategy)

    def rewards(self, texts: Sequence[Example], seq_len: int) -> NDArray[np.float64]:
        """Reward of each text, of at most `seq_len` tokens."""
        batch = ended_batch(texts, seq_len)
        output = self.engine.run(self.net, Tensor(batch.tokens), Tensor(batch.positions))
        source, values = self.engine.strategy.mesh.first_rank_of_last_stage, np.zeros(len(texts), np.float32)
        if self.engine.rank == source:
            values = (output.asnumpy().reshape(batch.tokens.shape) * batch.loss_weights).sum(1).astype(np.float32)
        return self.engine.broadcast(values, source).astype(np.float64)
