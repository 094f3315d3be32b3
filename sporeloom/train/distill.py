# SPDX-License-Identifier: Apache-2.0
"""Configuration of knowledge distillation. Names of flags are TRL's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, SamplingTemperature, Share
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import with_precision
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.stages import in_proportion
from sporeloom.train.tuning import ExamplesConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(ExamplesConfig):
    """Knowledge distillation: `sporeloom distill`."""

    heading: ClassVar[str] = "distillation"
    common: ClassVar[tuple[str, ...]] = ("teacher", "beta", "temperature", "lmbda")
    task: ClassVar[str] = "distill"

    teacher: Path = option(..., "checkpoint folder of the teacher, whose tokenizer must be the student's")
    beta: Share = option(
        0.5,
        "divergence from the teacher: 0 is the forward KL, 1 the reverse KL, others the generalized Jensen-Shannon "
        "divergence",
    )
    temperature: SamplingTemperature = option(
        1.0, "number that the logits of both are divided by, also where the student samples texts"
    )
    lmbda: Share = option(
        0.0,
        "probability that a step learns from texts that the student itself samples for the prompts (on-policy), in "
        "place of the completions of the data",
    )
    max_completion_length: Count = option(
        64, "with --lmbda: maximum number of tokens that the student samples for a text"
    )
    top_k: Natural = option(
        0, "compare only this many tokens, the most likely of the teacher, or the student, as --beta says; 0: all"
    )
    top_k_tail: bool = option(
        True, "with --top-k the other tokens count as one more; without, probabilities are divided by their sum"
    )

    @property
    def has_data_ids(self) -> bool:
        return not self.lmbda

    def teacher_model(self) -> tuple[str, ModelConfig]:
        """Family and configuration of the teacher, with the number type and attention kernel that flags give.

        Raises:
            ConfigError: there is none.
        """
        family, model = load_config(self.teacher)
        model = with_precision(model, self.compute_dtype, self.attention)
        model = model.with_domain(self.domain) if model.num_domains > 1 else model
        return family, dataclasses.replace(model.without_mtp(), dropout_rate=0.0)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.lmbda and self.packing:
            yield "--packing is for texts of the data; leave it out, or --lmbda"
        try:
            _, teacher = self.teacher_model()
        except ConfigError as error:
            yield from (f"--teacher {problem}" for problem in error.problems)
            return
        try:
            _, student = self.base_model()
        except ConfigError:
            return  # which is reported for all tasks
        at, length = f"--teacher {self.teacher}", self.seq_len or student.seq_len
        if teacher.value_head:
            yield f"{at}: a reward model, which has no probabilities of tokens"
        if teacher.vocab_size != student.vocab_size:
            yield f"{at}: its vocab_size is {teacher.vocab_size}, the student's {student.vocab_size}: they must be equal"
        if teacher.seq_len < length:
            yield f"{at}: its context of {teacher.seq_len} tokens is shorter than --seq-len {length}; give less"
        if self.lmbda and self.max_completion_length >= length:
            yield (
                f"--max-completion-length {self.max_completion_length} leaves no room for a prompt in --seq-len {length}; "
                "give less"
            )
        if self.top_k >= student.vocab_size:
            yield f"--top-k {self.top_k}: the vocabulary has {student.vocab_size} tokens; give fewer, or 0 for all"

    def strategy_problems(self, strategy: Strategy) -> Iterator[str]:
        if self.lmbda and strategy.pipeline.virtual_stages > 1:
            yield (
                f"{strategy.at('pipeline.virtual_stages')}: --lmbda samples texts, a stage after the other; leave virtual "
                "stages out, or --lmbda"
            )
        if strategy.engine == "mindspore":
            yield f"{strategy.at('engine')}: MindSpore's partitioner is not tested with a teacher; remove the line"
        try:
            teacher = self.teacher_model()[1]
        except ConfigError:
            return  # which `problems` reports
        mesh = strategy.mesh if teacher.experts else dataclasses.replace(strategy.mesh, ep=1)
        of_teacher = dataclasses.replace(in_proportion(strategy), mesh=mesh, recompute=None, offload=None)
        yield from (f"--teacher {self.teacher}: {problem}" for problem in model_problems(of_teacher, teacher))
