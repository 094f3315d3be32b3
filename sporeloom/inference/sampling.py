# SPDX-License-Identifier: Apache-2.0
"""From logits to a token: composed functions that each change logits (V,), then one choice. NumPy only.

A token that must not be chosen has the logit -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sporeloom.core import elementary
from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import (
    MIN_TEMPERATURE,
    Natural,
    NotNegative,
    Number,
    Positive,
    Probability,
    Seed,
    number_problems,
)

Logits = NDArray[np.float64]
MIN_REPETITION_PENALTY, MAX_PENALTY = 1e-200, 1e200
"""Larger numbers are replaced by these: with a model's logits nothing overflows in float64, and the order of
tokens stays the same."""


class NoTokenError(ConfigError):
    """A request forbids every token."""

    def __init__(self) -> None:
        super().__init__(
            "no token is left to choose: banned tokens, and stop tokens before the minimum of new ones, are all"
        )


class BadLogitsError(ConfigError):
    """A model's logits do not describe a distribution."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are NaN or infinite: its weights hold such numbers or its arithmetic overflows"
        )


class GrammarError(ConfigError):
    """A text cannot be continued within its grammar."""

    def __init__(self) -> None:
        super().__init__("the text has become too complex for the limits of its grammar; demand a simpler form")


@dataclass(frozen=True)
class History:
    """The tokens before the one to choose."""

    prompt: Sequence[int]
    generated: Sequence[int]


Processor = Callable[[Logits, History], Logits]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of tokens: flags of tools/generate.py. The defaults choose the most likely token."""

    heading: ClassVar[str] = "sampling"
    common: ClassVar[tuple[str, ...]] = ("temperature", "top_p")

    temperature: NotNegative = option(
        0.0, f"divisor of the logits; 0, and anything below {MIN_TEMPERATURE:g}, chooses the most likely token (greedy)"
    )
    top_k: Natural = option(0, "sample from the k most likely tokens only (top-k); 0: all")
    top_p: Probability = option(
        1.0, "sample from the smallest set of most likely tokens with this total probability (nucleus sampling)"
    )
    frequency_penalty: Number = option(0.0, "subtracted from a token's logit for each time it was generated")
    presence_penalty: Number = option(0.0, "subtracted from a token's logit once it was generated at all")
    repetition_penalty: Positive = option(  # Source: CTRL, section 4.1
        1.0, "factor that divides positive and multiplies negative logits of all tokens of prompt and output"
    )
    min_new_tokens: Natural = option(0, "minimum number of new tokens before end-of-document or another stop token")
    banned_tokens: tuple[Natural, ...] = option((), "token ids that are never generated (default: none)")
    seed: Seed = option(0, "random seed: the same seed gives the same samples")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def problems(self, vocab_size: int | None) -> Iterator[str]:
        """List values out of range, by flag; None: the vocabulary is not known."""
        yield from number_problems(self)
        if vocab_size is None:
            return
        for token in self.banned_tokens:
            if token >= vocab_size:
                yield f"--banned-tokens: {token} is outside the vocabulary of {vocab_size}"

    def leaves_none(self, stop_ids: Sequence[int], vocab_size: int) -> bool:
        """Whether all tokens of a vocabulary are forbidden at first."""
        forbidden = {*self.banned_tokens, *(stop_ids if self.min_new_tokens else ())}
        return sum(token < vocab_size for token in forbidden) >= vocab_size


def ban(tokens: Sequence[int]) -> Processor:
    """Never choose these tokens, such as those that a model has and its tokenizer does not."""
    ids = np.asarray(tokens, np.int64)

    def process(logits: Logits, history: History) -> Logits:
        logits[ids[ids < len(logits)]] = -np.inf
        return logits

    return process


def ban_until(num_new_tokens: int, tokens: Sequence[int]) -> Processor:
    """Do not choose these tokens before `num_new_tokens` were generated."""
    ban_now = ban(tokens)
    return lambda logits, history: ban_now(logits, history) if len(history.generated) < num_new_tokens else logits


def add_bias(bias: Mapping[int, float]) -> Processor:
    """Add a number to the logits of some tokens."""
    tokens, more = np.asarray([*bias], np.int64), np.asarray([*bias.values()], np.float64)

    def process(logits: Logits, history: History) -> Logits:
        logits[tokens] += more
        return logits

    return process


def penalize_repetition(penalty: float) -> Processor:
    """See `SamplingConfig.repetition_penalty`."""
    penalty = min(max(penalty, MIN_REPETITION_PENALTY), MAX_PENALTY)

    def process(logits: Logits, history: History) -> Logits:
        seen = np.unique(np.asarray([*history.prompt, *history.generated], np.int64))
        seen = seen[seen < len(logits)]
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        return logits

    return process


def penalize_frequency(frequency: float, presence: float) -> Processor:
    """See `SamplingConfig.frequency_penalty` and `presence_penalty`."""

    def process(logits: Logits, history: History) -> Logits:
        tokens, counts = np.unique(np.asarray(history.generated, np.int64), return_counts=True)
        with np.errstate(over="ignore"):
            logits[tokens] -= np.clip(frequency * counts + presence, -MAX_PENALTY, MAX_PENALTY)
        return logits

    return process


def scale(temperature: float) -> Processor:
    """Divide by the temperature."""
    return lambda logits, history: logits / temperature


def keep_top_k(k: int) -> Processor:
    """Keep the k most likely tokens, and those as likely as the k-th."""

    def process(logits: Logits, history: History) -> Logits:
        if k < len(logits):
            logits[logits < np.partition(logits, -k)[-k]] = -np.inf
        return logits

    return process


def keep_top_p(p: float) -> Processor:
    """Keep the smallest set of most likely tokens whose probabilities add up to `p`."""

    def process(logits: Logits, history: History) -> Logits:
        possible = np.flatnonzero(logits > -np.inf)
        order = possible[np.argsort(-logits[possible], kind="stable")]
        before = np.cumsum(_probabilities(logits[order]))
        logits[order[1:][before[:-1] >= p]] = -np.inf
        return logits

    return process


def processors(config: SamplingConfig, stop_ids: Sequence[int]) -> list[Processor]:
    """Processors of a configuration, in the order in which they are applied: bans, penalties, temperature, top-k,
    top-p."""
    steps: list[tuple[Any, Processor]] = [
        (config.banned_tokens, ban(config.banned_tokens)),
        (config.min_new_tokens and stop_ids, ban_until(config.min_new_tokens, stop_ids)),
        (config.repetition_penalty != 1, penalize_repetition(config.repetition_penalty)),
        (
            config.frequency_penalty or config.presence_penalty,
            penalize_frequency(config.frequency_penalty, config.presence_penalty),
        ),
    ]
    if not config.is_greedy:
        steps += [
            (config.temperature != 1, scale(config.temperature)),
            (config.top_k, keep_top_k(config.top_k)),
            (config.top_p < 1, keep_top_p(config.top_p)),
        ]
    return [processor for wanted, processor in steps if wanted]


class Sampler:
    """Chooses tokens as a SamplingConfig says. A choice depends only on logits, history, seed and stream.

    Args:
        vocab_size: tokens there are, where the model has rows for more (padding that no tokenizer can decode).
        first: what changes the logits before all that.
    """

    def __init__(
        self,
        config: SamplingConfig,
        stop_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        first: Sequence[Processor] = (),
    ):
        self.config, self.vocab_size = config, vocab_size
        self.processors = [*first, *processors(config, stop_ids)]

    def choose(self, logits: NDArray[np.floating[Any]], history: History, stream: int = 0) -> int:
        """Choose the next token. `stream` separates the random numbers of one prompt from those of another.

        Raises:
            BadLogitsError: NaN or infinity among the logits.
            NoTokenError: every token is forbidden.
        """
        check_logits(logits)
        changed = logits[: self.vocab_size].astype(np.float64)
        for process in self.processors:
            changed = process(changed, history)
        highest = changed.max()
        if highest == -np.inf:
            raise NoTokenError
        assert np.isfinite(highest), (highest, self.config)
        if self.config.is_greedy:
            return int(np.argmax(changed))
        generator = np.random.Generator(
            np.random.Philox(key=self.config.seed, counter=[0, 0, stream, len(history.generated)])
        )
        possible = np.flatnonzero(changed > -np.inf)
        cumulated = np.cumsum(_probabilities(changed[possible]))
        place = int(np.searchsorted(cumulated, generator.random() * cumulated[-1], side="right"))
        return int(possible[min(place, len(possible) - 1)])


def check_logits(logits: NDArray[np.floating[Any]]) -> None:
    """Raises:
    BadLogitsError: the logits (V,) do not describe a distribution: one is NaN or +inf, or all are -inf.
    """
    if not np.isfinite(logits.max()):  # which is NaN where one is
        raise BadLogitsError


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token under the model itself, before any processor, and the most likely alternatives.
    Log-probabilities are rounded to float32, in which ranks exchange them."""

    token: int
    log_probability: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log-probabilities."""


UNLIKELY = -9999.0
"""Stands for a log-probability of -inf, which JSON does not have, as in OpenAI's API."""


def finite(log_probability: float) -> float:
    """Convert a log-probability to a number that JSON can hold."""
    return UNLIKELY if log_probability == -np.inf else log_probability


def score_token(logits: NDArray[np.floating[Any]], token: int, num_top: int = 0) -> TokenScore:
    """Score `token` and list the `num_top` most likely tokens; among equals those with the lower ids.

    Raises:
        BadLogitsError: NaN or infinity among the logits.
    """
    check_logits(logits)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    log_sum = math.log(elementary.exp(shifted).sum())
    top: tuple[tuple[int, float], ...] = ()
    num_top = min(num_top, len(shifted))
    if num_top:
        enough = np.flatnonzero(shifted >= np.partition(shifted, -num_top)[-num_top])
        likeliest = enough[np.argsort(-shifted[enough], kind="stable")][:num_top]
        top = tuple((int(other), float(np.float32(shifted[other] - log_sum))) for other in likeliest)
    return TokenScore(token, float(np.float32(shifted[token] - log_sum)), top)


def _probabilities(logits: Logits) -> NDArray[np.float64]:
    exp = elementary.exp(logits - logits.max())
    result: NDArray[np.float64] = exp / exp.sum()
    return result
