# SPDX-License-Identifier: Apache-2.0
"""The device mesh: which rank sits where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindloom.numbers import Count

AXES = ("pp", "dp", "tp")  # outer to inner
RESERVED_AXES = ("cp", "ep")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees of the mesh axes, outer to inner: neighbouring ranks share a tp group, the fastest links."""

    pp: Count = 1
    """Pipeline stages."""
    dp: Count = 1
    """Data parallel replicas: each takes a part of the batch."""
    tp: Count = 1
    """Tensor parallel ranks: each holds a part of every large matrix."""
    cp: Count = 1
    """Context parallel ranks. Reserved: only 1 is accepted yet."""
    ep: Count = 1
    """Expert parallel ranks. Reserved: only 1 is accepted yet."""

    @property
    def size(self) -> int:
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def first_rank_of_last_stage(self) -> int:
        """The rank that speaks for all: it knows losses and logits."""
        return (self.pp - 1) * self.dp * self.tp

    def degree(self, axis: str) -> int:
        return getattr(self, axis)

    def coordinate(self, rank: int, axis: str) -> int:
        """Place of `rank` along `axis`."""
        inner = math.prod(self.degree(a) for a in AXES[AXES.index(axis) + 1 :])
        return rank // inner % self.degree(axis)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.degree(axis)}" for axis in AXES) + f" = {self.size}"
