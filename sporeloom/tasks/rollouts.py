# SPDX-License-Identifier: Apache-2.0
"""Texts sampled from the very weights that are trained: the same parameters, mesh and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mindspore import nn

from sporeloom.data.examples import Example, PromptLine
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import CACHE, build_model
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.models.slots import num_slots_for
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run


@dataclass(frozen=True)
class SampledText:
    """A sampled text."""

    prompt: int
    """Number of the prompt among all prompts."""
    tokens: list[int]
    """Tokens without the prompt's."""
    log_probs: list[float]
    """Log-probability of each sampled token under the model itself; empty once they are stored elsewhere."""
    has_ended: bool
    """Whether the model ended it, not the maximum length."""
    tools: ToolUse | None = None
    """Part of tools in a conversation with them."""

    def example(self, prompts: Sequence[PromptLine]) -> Example:
        """Prompt and text, of which the sampled tokens are trained on."""
        before = prompts[self.prompt].tokens
        return Example((*before, *self.tokens), (*(False,) * len(before), *self.are_sampled))

    @property
    def are_sampled(self) -> tuple[bool, ...]:
        """Whether each token was sampled from the model, not written by a tool or its template."""
        return self.tools.are_sampled if self.tools else (True,) * len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return sum(self.are_sampled)

    @property
    def completion(self) -> list[int]:
        """Tokens of the last answer, without the token that ends it."""
        return self.tokens[self.tools.start if self.tools else 0 : -1 if self.has_ended else None]


@dataclass(frozen=True)
class ToolUse:
    """The part of tools in a sampled text."""

    are_sampled: tuple[bool, ...]
    """See `SampledText.are_sampled`."""
    start: int
    """Position where the last answer begins."""
    messages: list[dict[str, Any]]
    """The whole conversation as OpenAI's API has it; empty once it was rewarded and the run resumed."""
    num_turns: int = 1
    """Number of the model's answers."""
    num_calls: int = 0
    """Number of calls whose output the model got."""
    num_failed: int = 0
    """Number of these that failed."""


class Answer(NamedTuple):
    """Tokens that continue a prompt."""

    tokens: list[int]
    log_probs: list[float]
    has_ended: bool
    """Whether a stop token ended it."""


class Rollouts:
    """Samples texts.

    Args:
        model: whose weights; trained by the same engine.
        num_rows: number of texts that are generated at the same time.
        max_tokens: maximum number of tokens of a text.
    """

    def __init__(
        self,
        engine: Engine,
        run: Run,
        model: nn.Cell,
        tokenizer: Any,
        num_rows: int,
        sampling: SamplingConfig,
        max_tokens: int,
    ):
        self.engine, self.run, self.most = engine, run, max_tokens
        shape = (num_rows, num_slots_for(run.seq_len))
        net = build_model(run.family, run.model, run.strategy, shape, weights_of=model, lora=run.lora)
        for parameter in net.get_parameters():
            if CACHE in parameter.name:
                parameter.init_data()
        self.decoding = cached(engine, net, run.model, *shape)
        self.stop_ids = run.model.end_ids
        self.sampler = Sampler(sampling, self.stop_ids, tokenizer.vocab_size)

    def sample(
        self, prompts: Sequence[PromptLine], numbers: Sequence[int], streams: Sequence[int]
    ) -> list[SampledText]:
        """Sample a text for each of `numbers`, prompts among `prompts`. `streams` separates their random numbers."""
        ids = [prompts[number].tokens for number in numbers]
        answers = self.answer(ids, [self.most] * len(ids), streams)
        return [SampledText(int(number), *answer) for number, answer in zip(numbers, answers, strict=True)]

    def answer(self, ids: Sequence[Sequence[int]], limits: Sequence[int], streams: Sequence[int]) -> list[Answer]:
        """Continue tokens, each by at most so many."""
        self.decoding.prepare([len(prompt) for prompt in ids], max(limits))
        requests = [
            Request(prompt, limit, self.sampler, self._is_finished, stream)
            for prompt, limit, stream in zip(ids, limits, streams, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        ended = np.zeros(len(requests), bool)
        for new in generate(self.decoding, self.engine, requests):
            tokens[new.request].append(new.token)
            log_probs[new.request].append(new.log_probability)
            ended[new.request] = new.finish_reason == "stop"
        return [Answer(*found) for found in zip(tokens, log_probs, map(bool, ended), strict=True)]

    def _is_finished(self, generated: Sequence[int]) -> bool:
        return generated[-1] in self.stop_ids
