# SPDX-License-Identifier: Apache-2.0
"""Configuration of a training run, and the run that it leads to once `sporeloom.train.checks` has read it."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sporeloom.data.random_ltd import RandomLTD
from sporeloom.data.sample_order import Sizes
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import Shapes, parameter_shapes
from sporeloom.strategy.certificate import about_task
from sporeloom.strategy.config import Strategy
from sporeloom.train.audit_flags import AuditFlags
from sporeloom.train.evaluation_flags import EvaluationFlags
from sporeloom.train.flags import (
    CheckpointFlags,
    DataFlags,
    ElasticFlags,
    EMAFlags,
    FaultFlags,
    ModelFlags,
    OptimizerFlags,
    ParallelFlags,
    PrecisionFlags,
    RunFlags,
)
from sporeloom.train.groups import ParameterGroups
from sporeloom.train.prediction import Prediction
from sporeloom.train.sample_flags import SampleFlags
from sporeloom.train.schedule_flags import ScheduleFlags
from sporeloom.train.schedules import learning_rate
from sporeloom.train.tracking_flags import TrackingFlags

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(
    TrackingFlags,
    EvaluationFlags,
    SampleFlags,
    AuditFlags,
    CheckpointFlags,
    FaultFlags,
    ElasticFlags,
    PrecisionFlags,
    ScheduleFlags,
    EMAFlags,
    OptimizerFlags,
    ParallelFlags,
    ModelFlags,
    DataFlags,
    RunFlags,
    ABC,
):
    """Configuration of a training run of any task."""

    task: ClassVar[str]
    """Name of the module of `sporeloom.tasks`."""
    samples_texts: ClassVar[bool] = False
    """Whether the model generates the texts that it is trained on."""
    rows_per_unit: ClassVar[int] = 1
    """Number of sequences for each item that `batch_size` counts."""

    @abstractmethod
    def base_model(self) -> tuple[str, ModelConfig]:
        """Read the family and the configuration of the model.

        Raises:
            ConfigError: there is none, or what is wrong with it.
        """

    @property
    def only_looks(self) -> bool:
        """Whether the run only prints its data, without training."""
        return False

    @abstractmethod
    def model_name(self) -> str:
        """Name of the model in messages."""

    @abstractmethod
    def read_data(self, model: ModelConfig | None, seq_len: int) -> Any:
        """Read and check the training data, as far as that works without a tokenizer.

        Raises:
            ConfigError: what is wrong with it.
        """

    def sizes(self, seq_len: int) -> Sizes:
        """Batch size and sequence length of each step.

        Raises:
            ConfigError: sizes that are impossible.
        """
        return Sizes((self.rows_per_unit * self.batch_size,), (seq_len,))

    @abstractmethod
    def default_rates(self) -> tuple[float, float]:
        """Maximum and minimum learning rate where the command line gives none."""

    def problems(self) -> Iterator[str]:
        """List the problems of the task's own flags."""
        return iter(())

    def strategy_problems(self, strategy: Strategy) -> Iterator[str]:
        """List what the task cannot do under a strategy."""
        return iter(())

    def random_ltd(self, model: ModelConfig, sizes: Sizes) -> RandomLTD | None:
        """Layers that drop tokens, and how many; None: no layer does.

        Raises:
            ConfigError: layers that do not exist.
        """
        return None

    def adapters(self) -> LoRAConfig | None:
        """Adapters that are trained in place of the model."""
        return None

    def about_task(self, lora: LoRAConfig | None) -> dict[str, Any] | None:
        """The part of the task that certificates cover."""
        return about_task(self.task, lora, False, None)

    def network_config(self, model: ModelConfig) -> ModelConfig:
        """Configuration of the trained network, given the initial model."""
        return model


@dataclass(frozen=True)
class Run:
    """A valid training configuration, with the files it refers to."""

    config: TrainingConfig
    family: str
    model: ModelConfig
    strategy: Strategy
    data: Any = dataclasses.field(repr=False)
    """Result of the configuration's `read_data`."""
    lora: LoRAConfig | None
    sizes: Sizes
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    decay_steps: int
    loss_scale: float | None
    """Initial loss scale; None: the loss is not scaled."""
    random_ltd: RandomLTD | None = None
    """Layers that drop tokens."""
    prediction: Prediction | None = None
    """Predicted time and memory of a step."""
    groups: ParameterGroups | None = None
    """Parameters with a learning rate or weight decay of their own, and frozen ones."""

    @property
    def seq_len(self) -> int:
        """Maximum sequence length of the run."""
        return self.sizes.longest

    def trained_shapes(self) -> Shapes:
        """Shapes of the trained parameters: of the full model, or of adapters."""
        return self.lora.shapes(self.model) if self.lora else parameter_shapes(self.model)

    def state_bytes(self) -> int:
        """Size of the training state of all ranks: weights and averages in float32, and moments."""
        narrow = self.config.optimizer_state_dtype == "bfloat16"
        moments = 0 if self.config.optimizer == "sgd" else 1 if narrow else 2
        copies = 1 + moments + (self.config.ema_decay > 0)
        return FLOAT32_BYTES * copies * sum(map(math.prod, self.trained_shapes().values()))

    def rate_of(self, update: int) -> float:
        """Learning rate of an update of the weights, counted from 1."""
        steps = self.warmup_steps, self.decay_steps
        rates, options = (self.learning_rate, self.min_learning_rate), self.config.schedule_options()
        return learning_rate(update, *rates, *steps, self.config.schedule, options)
