# SPDX-License-Identifier: Apache-2.0
"""The Cells that dry runs compile, without weights: a model's training step or forward pass, a step of a custom network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from sporeloom.models.cells import ExpertCell, FlashCell, GroupedProductCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import TrainedTask
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.tasks.example import task_network
from sporeloom.train.narrow_states import adamw
from sporeloom.train.optim import AdamW


class DryRunCell(NamedTuple):
    """A Cell to compile."""

    cell: nn.Cell
    """A `TrainStep`, or the model alone."""
    report: Report
    inputs: Sequence[tuple[Shape, Any]]
    """Global shapes and NumPy dtypes."""

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that are trained; none of a model alone."""
        return {p.name for p in self.cell.optimizer.parameters} if isinstance(self.cell, TrainStep) else set()


def model_cell(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    batch: tuple[int, int],
    inference: bool,
    accumulate: int,
    task: TrainedTask,
) -> DryRunCell:
    """Build a model's training step, or the model for inference.

    Args:
        batch: sequences of a step over all ranks, and their tokens.
    """
    inputs: list[tuple[Shape, Any]] = [(batch, np.int32)] * 2
    with no_init_parameters():
        net = family_module(family, "model").Model(model) if inference else task_network(family, model, task)
        report = parallelize(net, strategy, whole=not inference)
        for _, cell in net.cells_and_names():
            if isinstance(cell, FlashCell):
                cell.flash_on_cpu = True  # the graph is that of devices, also for a mesh of one
            if isinstance(cell, GroupedProductCell):
                cell.operator_on_cpu = True
            if inference and isinstance(cell, ExpertCell):
                cell.sorts_rows = False  # as `sporeloom.inference.model` has it
        if inference:
            return DryRunCell(net.set_train(False), report, inputs)
        inputs += [(batch, np.int32), *[(batch, np.float32)] * (1 + net.loss.num_inputs)]
        inputs += [(batch, np.int32), (batch, np.float32)] * (net.num_mtp if isinstance(net, DecoderWithLoss) else 0)
        inputs += [(batch, np.int32)] if model.dropout_rate else []
        step = TrainStep(
            wrap(net, strategy, accumulate),
            adamw(net.trainable_params(), task.optimizer_state_dtype, on_host=strategy.optimizer_on_host),
            report,
            rank=0,
            max_grad_norm=1.0,
            accumulate=accumulate,
            loss_scale=model.compute_dtype == "float16",
        )
    return DryRunCell(step.set_train(), report, inputs)


def custom_cell(make: Callable[[], nn.Cell], strategy: Strategy, inputs: Sequence[tuple[Shape, Any]]) -> DryRunCell:
    """Build a step of AdamW of a custom network, which returns its loss, as `auto_parallel` runs it.

    Args:
        make: makes the network.
    """
    with no_init_parameters():
        net = make()
        report = parallelize(net, strategy)
        step = TrainStep(net, AdamW(net.trainable_params()), report, rank=0, max_grad_norm=1.0)
    return DryRunCell(step.set_train(), report, inputs)
