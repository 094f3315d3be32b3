# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a student learns a teacher's probabilities of the tokens of given texts (off-policy), or of texts
that it samples itself (on-policy)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.examples import Line, PromptLine, example_batch
from sporeloom.data.sample_order import epoch_samples
from sporeloom.data.tokenizer import folder_tokenizer
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.nn.distillation import DecoderWithTeacher, Distillation, Divergence
from sporeloom.nn.lora import attach_adapters
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.tasks.rollouts import Rollouts, SampledText
from sporeloom.tasks.sft import SFT, shared_evenly
from sporeloom.train.config import Run
from sporeloom.train.loading import leave_undrawn, start_from
from sporeloom.train.tuning import open_reading

FLAGS = ("beta", "temperature", "top_k", "top_k_tail")
COMPARED_LINES = 200
"""Number of the first lines that the tokenizers of student and teacher are compared on."""


class Distill(SFT):
    """The teacher's layers are computed next to the student's, without gradients, on the same mesh."""

    net: DecoderWithTeacher
    prompts: list[PromptLine]
    rollouts: Rollouts
    texts: list[SampledText]
    """The texts of the last on-policy step."""

    def __init__(self, run: Run, engine: Engine):
        super().__init__(run, engine)
        self.is_ahead = not self.config.lmbda  # texts are sampled from the weights of their step

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

    def data_state(self) -> dict[str, Any]:
        config = self.config
        sampling = {"max_completion_length": config.max_completion_length} if config.lmbda else {}
        return {**super().data_state(), **self._settings(), "lmbda": config.lmbda, **sampling}

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

        if config.lmbda:
            self._open_prompts()

    def _open_prompts(self) -> None:
        """Read the prompts that leave room for a text."""
        config, lines = self.config, [without_answer(line) for line in self.run.data]
        room = self.run.seq_len - config.max_completion_length
        every = open_reading(self.run, self.tokenizer).prompts(lines)
        self.prompts = [prompt for prompt in every if len(prompt.tokens) <= room]
        if not self.prompts:
            raise ConfigError(
                f"{config.data}: all prompts are longer than the {room} tokens that --seq-len {self.run.seq_len} leaves "
                f"besides --max-completion-length {config.max_completion_length}"
            )
        if dropped := len(every) - len(self.prompts):
            self.text += f"; for sampled texts {dropped:,} prompts dropped, too long"

    def is_on_policy(self, step: int) -> bool:
        """Whether the student samples the texts of `step`, by chance, equally on all ranks and after a resume."""
        drawn = hashlib.sha256(f"{self.config.seed} on-policy {step}".encode()).digest()[:8]
        return int.from_bytes(drawn, "big") < self.config.lmbda * 2**64

    def shaped_inputs(self, step: int) -> list[NDArray[Any]]:
        given = super().batch(step)
        return self.with_dropout_keys(step, [*given])

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        if not self.is_on_policy(step):
            return super().batch(step)
        count = self.config.batch_size
        key = int.from_bytes(hashlib.sha256(f"{self.config.seed} prompts".encode()).digest()[:8], "big")
        numbers = epoch_samples(step * count, count, len(self.prompts), key)
        self.engine.refresh(self.net, self.net.parallel_report)
        self.texts = self.rollouts.sample(self.prompts, numbers.tolist(), range(step * count, (step + 1) * count))
        batch = example_batch([[text.example(self.prompts)] for text in self.texts], self.run.seq_len)
        return batch._replace(loss_weights=shared_evenly(batch.loss_weights))

    def begin(self, step: TrainStep, steps_done: int) -> None:
        super().begin(step, steps_done)
        config = self.config
        if config.lmbda:
            sampling = SamplingConfig(temperature=config.temperature, seed=config.seed)
            self.rollouts = Rollouts(
                *(self.engine, self.run, self.net.model, self.tokenizer),
                *(config.batch_size, sampling, config.max_completion_length),
            )
        start_from(step, self.engine, self.net.parallel_report, self.config.teacher, prefix="teacher.", without="mtp.")

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        assert counts is not None
        told: dict[str, Any] = dict(zip(Distillation.metrics, map(float, counts), strict=True))
        if self.config.lmbda and self.is_on_policy(step):
            told["completion_length"] = sum(len(text.tokens) for text in self.texts) / len(self.texts)
            told["ended"] = sum(text.has_ended for text in self.texts) / len(self.texts)
        return told


def without_answer(line: Line) -> Line:
    """The line with what the student is to answer as its `prompt`: without the last answer of a conversation."""
    messages = line.values.get("messages")
    if messages is None:
        return line
    ends = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return line._replace(values={**line.values, "prompt": messages[: ends[-1]] if ends else messages})


TASK = Distill
