# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and a task; the tasks are in `sporeloom.tasks`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.data.batch import Batch, dropout_keys, mtp_targets
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.models.family import family_module
from sporeloom.nn.latent_attention import attach_dense_warmup
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.token_drop import attach_token_drop
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.metrics import layer_metrics
from sporeloom.train.samples import Sampler
from sporeloom.train.validation import HeldOut

Arrays = list[NDArray[Any]]


class Task(ABC):
    """A training task. The loop creates the network, opens the data, and then for each step's batch.

    Subclasses give `loss`, `open_data`, `describe`, `data_state` and `batch`; the others where they differ.
    """

    is_ahead = True
    """Whether batches can be made before the steps in front of them are done."""
    new_weights: tuple[str, ...] = ()
    """Weights of the network that the initial checkpoint need not have."""
    unused_weights: str | None = None
    """Beginning of the names of weights that the network does not have, whatever the initial checkpoint has."""
    tokenizer: Tokenizer

    def __init__(self, run: Run, engine: Engine):
        self.run, self.engine = run, engine

    def loss(self) -> nn.Cell | None:
        """The objective of the network's logits or values; None: the cross-entropy."""
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
        if isinstance(run.config, MaxLogitFlags) and run.config.counts_max_logits:
            net.model.attach_max_logits()
        if run.config.indexer_dense_warmup:
            attach_dense_warmup(net.model)
        return net

    @abstractmethod
    def open_data(self) -> None:
        """Open the data; set `tokenizer`. All ranks take part.

        Raises:
            ConfigError: the data do not fit the model.
        """

    @abstractmethod
    def describe(self) -> str:
        """Describe the data of the run in a line."""

    @abstractmethod
    def data_state(self) -> dict[str, Any]:
        """Settings that must be the same when the run is resumed."""

    @abstractmethod
    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        """Inputs of `step`, counted from 0, without dropout's keys."""

    def sample_ids(self, step: int) -> Any:
        """Numbers of the samples of `step`, counted from 0, as JSON; the audit refuses tasks without any.

        Raises:
            NotImplementedError: the task has none.
        """
        raise NotImplementedError(type(self).__name__)

    def first_token(self, step: int) -> int:
        """Number of tokens in the steps before `step`."""
        rows, length = self.run.sizes.of_step(step)
        return step * rows * length

    def inputs(self, step: int) -> Arrays:
        """All inputs of `step`."""
        return self.with_dropout_keys(step, self.with_mtp_targets([*self.batch(step)]))

    def with_mtp_targets(self, arrays: Arrays) -> Arrays:
        """The arrays of a batch, with targets of multi-token prediction where the cross-entropy trains it."""
        depths = self.run.model.num_mtp_layers if self.loss() is None else 0
        return arrays + mtp_targets(Batch(*arrays), depths) if depths else arrays

    def with_dropout_keys(self, step: int, arrays: Arrays) -> Arrays:
        """Inputs of `step`, and dropout's where there is any."""
        rate, run = self.run.model.dropout_rate, self.run
        if rate or (run.lora and run.lora.lora_dropout):
            arrays.append(dropout_keys(run.config.seed, self.first_token(step), run.sizes.of_step(step)))
        return arrays

    def shape(self, step: int) -> tuple[int, ...]:
        """Key of the graph of `step`: number of sequences, their length, other shapes that the task changes."""
        return self.run.sizes.of_step(step)

    def shaped_inputs(self, step: int) -> Arrays:
        """Arrays of the shapes of `step`, to compile for; needed before `begin`, when its inputs may not be known
        yet."""
        return self.inputs(step)

    def begin(self, step: TrainStep, steps_done: int) -> None:  # noqa: B027 (most have nothing to do)
        """Called when the weights are there, before the first step."""

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        """Metrics of `step`, counted from 0, besides loss, norm and speed; `counts`: what the network counted,
        here its layers."""
        config = self.run.config
        has_logits = isinstance(config, MaxLogitFlags) and config.counts_max_logits
        return {} if counts is None else layer_metrics(counts, self.run.model, has_logits)

    def beside(self) -> dict[str, tuple[int, ...]]:
        """Weights that are trained but do not belong to the model: name -> shape."""
        return {}

    def state(self) -> dict[str, Any]:
        """State that the task needs to resume, besides weights, moments and the step."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 (likewise)
        """Restore the state that `state` returned."""

    def validation_sets(self, net: nn.Cell) -> Mapping[str, HeldOut]:
        """Named sets to validate `net`, the parallelized network, with, after `open_data`; none where the run has none."""
        return {}

    def sampler(self, net: nn.Cell) -> Sampler | None:
        """Model that continues the prompts of the run with the parameters of `net`; None where it has no prompts."""
        return None

    def add_files(self, folder: Path) -> None:
        """Add further files of a model to its folder."""
        self.tokenizer.save(folder)
