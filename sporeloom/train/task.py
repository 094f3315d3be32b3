# SPDX-License-Identifier: Apache-2.0
"""What a run trains, as the loop sees it; the tasks are in `sporeloom.tasks`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.data.batch import dropout_keys
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.models.family import family_module
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.token_drop import attach_token_drop
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run
from sporeloom.train.metrics import expert_metrics

Arrays = list[NDArray[Any]]


class Task(ABC):
    """What a run trains. The loop asks for the network, opens the data, and then for each step's batch.

    Subclasses give `loss`, `open_data`, `describe`, `data_state` and `batch`; the others where they differ.
    """

    is_ahead = True
    """Whether batches can be made before the steps in front of them are done."""
    new_weights: tuple[str, ...] = ()
    """Weights of the network that the checkpoint it begins with need not have."""
    tokenizer: Tokenizer

    def __init__(self, run: Run, engine: Engine):
        self.run, self.engine = run, engine

    def loss(self) -> nn.Cell | None:
        """What the network's logits or values are judged by; None: the cross-entropy."""
        return None

    def network(self) -> nn.Cell:
        """The model with its loss, with adapters where the run trains those."""
        run = self.run
        ms.set_seed(run.config.seed)
        net: nn.Cell = family_module(run.family, "model").ModelWithLoss(run.model, self.loss())
        if run.lora:
            attach_adapters(net.model, run.lora)
        if run.random_ltd:
            attach_token_drop(net.model, run.random_ltd.layers)
        return net

    def graph_key(self) -> dict[str, Any]:
        """What of the task its graph hangs on, besides the model and the optimizer."""
        return {"task": self.run.config.task, "random_ltd": self.run.random_ltd and self.run.random_ltd.layers}

    @abstractmethod
    def open_data(self) -> None:
        """Make what batches are read from; set `tokenizer`. All ranks take part.

        Raises:
            ConfigError: the data do not fit the model.
        """

    @abstractmethod
    def describe(self) -> str:
        """What the run reads, in a line."""

    @abstractmethod
    def data_state(self) -> dict[str, Any]:
        """What must be the same where the run is resumed."""

    @abstractmethod
    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        """Inputs of `step`, counted from 0, without dropout's keys."""

    def first_token(self, step: int) -> int:
        """How many tokens the steps before `step` were given."""
        rows, length = self.run.sizes.of_step(step)
        return step * rows * length

    def inputs(self, step: int) -> Arrays:
        """All inputs of `step`."""
        return self.with_dropout_keys(step, [*self.batch(step)])

    def with_dropout_keys(self, step: int, arrays: Arrays) -> Arrays:
        """Inputs of `step`, and dropout's where there is any."""
        rate, run = self.run.model.dropout_rate, self.run
        if rate or (run.lora and run.lora.lora_dropout):
            arrays.append(dropout_keys(run.config.seed, self.first_token(step), run.sizes.of_step(step)))
        return arrays

    def shape(self, step: int) -> tuple[int, ...]:
        """What tells the graph of `step` from those of others: sequences, their length, what else the task changes."""
        return self.run.sizes.of_step(step)

    def shaped_inputs(self, step: int) -> Arrays:
        """Arrays of the shapes of `step`, to compile for; asked for before `begin`, when its inputs may not be known yet."""
        return self.inputs(step)

    def begin(self, step: TrainStep, steps_done: int) -> None:  # noqa: B027 (most have nothing to do)
        """Called when the weights are there, before the first step."""

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        """What to tell of `step`, counted from 0, besides loss, norm and speed; `counts`: what the network counted,
        here its experts."""
        if counts is None:
            return {}
        experts = self.run.model.mixture
        return expert_metrics(counts.reshape(-1, experts.num_experts + 2), experts)

    def beside(self) -> dict[str, tuple[int, ...]]:
        """Weights that are trained but are no part of the model: name -> shape."""
        return {}

    def state(self) -> dict[str, Any]:
        """What besides weights, moments and the step the task needs to go on."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 (likewise)
        """Take up what `state` gave."""

    def add_files(self, folder: Path) -> None:
        """Put what else belongs to a model into its folder."""
        self.tokenizer.save(folder)
