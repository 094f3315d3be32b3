# SPDX-License-Identifier: Apache-2.0
"""Attributes of the Cells of `sporeloom.nn` that other packages read or set; a Cell that has some derives from their class.
Loads no MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FlashCell:
    """Attention or its mask, whose graph may have FlashAttention."""

    flash_on_cpu: bool = False
    """Whether graphs for CPUs have FlashAttention, too: set for several processes, whose graphs are those of devices."""


class GroupedProductCell:
    """A product of groups of rows, each with its own matrix."""

    operator_on_cpu: bool = False
    """Whether graphs for CPUs have GroupedMatmul, too: set for several processes, whose graphs are those of devices."""


class ExpertCell:
    """A part with experts."""

    sorts_rows: bool = True
    """Whether experts without a capacity limit compute their own rows alone. Else each has capacity for all tokens: so it
    is in inference, where the shapes of products, and so the bits of an answer, must not depend on the other texts of a
    batch, and where `Strategy.sorts_expert_rows` says so."""

    def split_experts(self, parts: int) -> None:
        """Let each of so many parts of the experts, which ranks have, compute the rows of its own."""
        raise NotImplementedError


class HeadCopier:
    """Attention with fewer heads of keys and values than of queries."""

    repeats_heads: bool = False
    """Whether each query head gets its own copy of its keys and values: where ranks share such a head."""


COUNT_KINDS = ("experts", "indexer", "max_logits")
"""Parts of a model that count, in the order of their counts."""


class CountingCell:
    """A part that returns metrics from a training step."""

    metrics: Sequence[str] | None = None
    """Names of the metrics of an objective; None: a part of a model, whose counts are those of its experts or its indexer."""
    kind: str = "experts"
    """Counts of a part of a model, one of `COUNT_KINDS`."""
    balance_rate: float = 0.0
    """Step by which the biases of its router move towards balance."""
    router: Any
    """Probabilities of experts, by a matrix."""
    choices: Any
    """Choice of experts by these, with the biases."""

    def attach_counter(self, name: str) -> Any:
        """Let training steps count. Returns the parameter of that name, whose gradient is the count."""
        raise NotImplementedError


class ClippedAttention:
    """Attention whose largest logits a training step may count, and whose heads QK-clip scales."""

    counts_max_logits: bool = False
    """Whether it counts them."""

    def attach_max_logits(self) -> None:
        """Let training steps count the largest logit of each head."""
        raise NotImplementedError

    def head_powers(self) -> Sequence[tuple[Any, tuple[float, ...]]]:
        """Parameters whose rows belong to heads, and for each row of a head the power of the head's factor that it gets, so
        that the head's logits get that factor. Keys that heads share get none; the queries then get all of it."""
        raise NotImplementedError


class TyingCell:
    """A model whose head may be its token embedding."""

    tied_embedding: bool = True


class PartlyForwardCell:
    """A training network with parts that have no backward pass."""

    without_backward: tuple[str, ...] = ()
    """Paths of these parts."""
