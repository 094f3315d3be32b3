# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a student learns a teacher's probabilities of the tokens of given texts (off-policy)."""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import folder_tokenizer
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.nn.distillation import DecoderWithTeacher, Distillation, Divergence
from sporeloom.nn.lora import attach_adapters
from sporeloom.parallel.step import TrainStep
from sporeloom.tasks.sft import SFT
from sporeloom.train.saving import leave_undrawn, start_from

FLAGS = ("beta", "temperature", "top_k", "top_k_tail")
COMPARED_LINES = 200
"""Number of the first lines that the tokenizers of student and teacher are compared on."""


class Distill(SFT):
    """The teacher's layers are computed next to the student's, without gradients, on the same mesh."""

    net: DecoderWithTeacher

    @functools.cached_property
    def teacher(self) -> tuple[str, ModelConfig]:
        """Its family and configuration."""
        found: tuple[str, ModelConfig] = self.config.teacher_model()
        return found

    def loss(self) -> nn.Cell:
        config = self.config
        return Distillation(Divergence(config.beta, config.temperature, config.top_k, config.top_k_tail))

    def network(self) -> nn.Cell:
        run = self.run
        ms.set_seed(run.config.seed)
        model = family_module(run.family, "model").Model(run.model)
        if run.lora:
            attach_adapters(model, run.lora)
        family, settings = self.teacher
        with no_init_parameters():
            teacher = family_module(family, "model").Model(settings)
        leave_undrawn(teacher.get_parameters())
        self.net = DecoderWithTeacher(model, teacher, self.loss())
        return self.net

    def graph_key(self) -> dict[str, Any]:
        return {**super().graph_key(), **self._settings()}

    def data_state(self) -> dict[str, Any]:
        return {**super().data_state(), **self._settings()}

    def _settings(self) -> dict[str, Any]:
        family, model = self.teacher
        return {
            "teacher": {"family": family, **model.to_dict()},
            **{name: getattr(self.config, name) for name in FLAGS},
        }

    def open_data(self) -> None:
        super().open_data()
        config = self.config
        family, model = self.teacher
        theirs = folder_tokenizer(family, config.teacher, model)
        for line in self.run.data[:COMPARED_LINES]:
            text = str(line.values)
            if theirs.encode(text) != self.tokenizer.encode(text):
                raise ConfigError(
                    f"--teacher {config.teacher}: its tokenizer is not the student's: {line.place} has other tokens; a "
                    "teacher's probabilities are of the same tokens"
                )

    def begin(self, step: TrainStep, steps_done: int) -> None:
        super().begin(step, steps_done)
        start_from(step, self.engine, self.net.parallel_report, self.config.teacher, prefix="teacher.", without="mtp.")

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None
        return dict(zip(Distillation.metrics, map(float, counts), strict=True))


TASK = Distill
