# SPDX-License-Identifier: Apache-2.0
"""A text to generate: as the rank with the server knows it, as it is broadcast, and as every rank's scheduler takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.inference.pooling import Pooling
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Processor, Sampler, SamplingConfig, add_bias


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate."""

    prompt: tuple[int, ...]
    adapter: int
    """Number of the adapter, see `ServedModel`."""
    max_new_tokens: int
    sampling: SamplingConfig
    stream: int
    """Number that separates its random numbers from those of other choices with the same seed."""
    stop_ids: tuple[int, ...]
    logit_bias: dict[int, float]
    num_top: int
    score_prompt: bool
    """See `Request`."""
    is_finished: Callable[[Sequence[int]], bool]
    """Called on the rank with the server."""
    has_scores: bool = True
    """See `Request`."""
    cache_salt: str = ""
    """See `Request`."""
    processors: tuple[Processor, ...] = ()
    """Processors of its logits, on the rank with the server, which is the one that chooses tokens."""
    priority: int = 0
    """Texts of a client with lower numbers get a row first."""
    pooling: Pooling | None = None
    """See `Request`."""
    client: int = 0
    """Number of the client's key; clients take turns, and share no prefix cache."""


def broadcast_form(wanted: GenerationRequest) -> dict[str, Any]:
    """The values of a text that all ranks need."""
    values = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    for name in ("is_finished", "processors", "priority"):
        del values[name]
    return {**values, "sampling": dataclasses.asdict(wanted.sampling)}


def scheduled(told: dict[str, Any], slot: int, vocab_size: int, own: GenerationRequest | None) -> Request:
    """The request that a rank's scheduler takes for a text that was broadcast.

    Args:
        slot: of its adapter.
        vocab_size: number of tokens that it can choose from.
        own: the text, on the rank with the server, which alone chooses tokens.
    """
    bias = {int(token): value for token, value in told["logit_bias"].items()}
    processors = [*([add_bias(bias)] if bias else []), *(own.processors if own else ())]
    sampling = SamplingConfig(**{**told["sampling"], "banned_tokens": ()})
    return Request(
        prompt=told["prompt"],
        max_new_tokens=told["max_new_tokens"],
        sampler=Sampler(sampling, tuple(told["stop_ids"]), vocab_size, processors),
        is_finished=own.is_finished if own else _never,
        stream=told["stream"],
        num_top=told["num_top"],
        has_scores=told["has_scores"],
        score_prompt=told["score_prompt"],
        pooling=told["pooling"],
        adapter=slot,
        adapter_id=told["adapter"],
        cache_salt=told["cache_salt"],
        client=told["client"],
    )


def _never(tokens: Sequence[int]) -> bool:
    return False
