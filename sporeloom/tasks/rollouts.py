# SPDX-License-Identifier: Apache-2.0
"""Texts sampled from the very weights that are trained: the same parameters, mesh and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """Log-probability of each token under the model itself; empty once they are stored elsewhere."""
    has_ended: bool
    """Whether the model ended it, not the maximum length."""

    def example(self, prompts: Sequence[PromptLine]) -> Example:
        """Prompt and text, of which the text is trained on."""
        before = prompts[self.prompt].tokens
        return Example((*before, *self.tokens), (False,) * len(before) + (True,) * len(self.tokens))


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
        self.decoding.prepare([len(prompt) for prompt in ids], self.most)
        requests = [
            Request(prompt, self.most, self.sampler, self._is_finished, stream)
            for prompt, stream in zip(ids, streams, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        ended = np.zeros(len(requests), bool)
        for new in generate(self.decoding, self.engine, requests):
            tokens[new.request].append(new.token)
            log_probs[new.request].append(new.log_probability)
            ended[new.request] = new.finish_reason == "stop"
        return [
            SampledText(int(number), tokens[place], log_probs[place], bool(ended[place]))
            for place, number in enumerate(numbers)
        ]

    def _is_finished(self, generated: Sequence[int]) -> bool:
        return generated[-1] in self.stop_ids
