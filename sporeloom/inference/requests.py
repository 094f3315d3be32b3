# SPDX-License-Identifier: Apache-2.0
"""Requests of generated texts, scores and embeddings, and the events that answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sporeloom.core.errors import ConfigError
from sporeloom.inference.decoding import Logits
from sporeloom.inference.pooling import Pooling
from sporeloom.inference.sampling import Sampler, TokenScore

FinishReason = Literal["stop", "length"]


class InternalError(ConfigError):
    """A bug of this package while a request was served; the log of the choosing rank has the details."""

    def __init__(self) -> None:
        super().__init__("a bug of sporeloom ended this text; see the log")


@dataclass(frozen=True)
class Request:
    """One prompt and its options."""

    prompt: Sequence[int]
    max_new_tokens: int
    """Maximum number of new tokens; 0 with `score_prompt` and `pooling` only."""
    sampler: Sampler
    is_finished: Callable[[Sequence[int]], bool]
    """Called after each token with all generated ones, on the choosing rank: whether the text ends."""
    stream: int = 0
    """Number that separates its random numbers from those of other requests with the same seed."""
    num_top: int = 0
    """Number of most likely tokens to report with each token."""
    has_scores: bool = True
    """Whether to report the log-probability of each new token, which takes longer than to choose it."""
    score_prompt: bool = False
    """Report the log-probability of each token of the prompt but the first."""
    pooling: Pooling | None = None
    """Report the embedding of the prompt, and generate nothing."""
    adapter: int = 0
    """Slot of its adapter, counted from 1; 0: none."""
    adapter_id: int = 0
    """Number of these weights: a slot may hold other weights later, which reuse nothing that these computed."""
    cache_salt: str = ""
    """Only requests with the same one reuse what each other's prompts left in caches."""

    client: int = 0
    """Number of its client; clients reuse nothing of each other, as its speed would show what another one sent."""

    @property
    def owner(self) -> tuple[int, int, int, str]:
        """Identity of the requests that may reuse what its prompt leaves in caches."""
        return self.adapter, self.adapter_id, self.client, self.cache_salt

    def finish_reason(self, generated: Sequence[int]) -> FinishReason | None:
        """Why the text ends after the generated tokens; None: it continues."""
        if self.is_finished(generated):
            return "stop"
        return "length" if len(generated) >= self.max_new_tokens else None


@dataclass(frozen=True)
class NewToken:
    """One generated token."""

    request: int
    """Number of the request, from `submit`."""
    token: int
    log_probability: float
    """Log-probability under the model itself, before penalties, temperature and other processors; NaN where the request
    needs none."""
    seconds: float
    """Seconds since the token before; for the first one, since the prompt got a row."""
    finish_reason: FinishReason | None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities; on the choosing rank."""
    cached_tokens: int = 0
    """Number of the prompt's tokens that were reused."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, from the second on. Precedes the first new token."""

    request: int
    scores: Sequence[TokenScore]
    """On the choosing rank; empty on the others."""
    finish_reason: FinishReason | None
    """Set where no new token is requested."""


@dataclass(frozen=True)
class PromptEmbedding:
    """The embedding of a prompt, the only event of its request."""

    request: int
    vector: Logits
    """(D,), of length 1; on the choosing rank, empty on the others."""


@dataclass(frozen=True)
class Failure:
    """The last event of a request that failed, on every rank. The others continue."""

    request: int
    error: ConfigError


Event = NewToken | PromptScores | PromptEmbedding | Failure
