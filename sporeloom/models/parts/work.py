# SPDX-License-Identifier: Apache-2.0
"""Memory that a part's operators keep and pass over for each token, as every part declares it like its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Values:
    """Number of values by type."""

    narrow: float = 0.0
    """In the number type of the computation."""
    float32: float = 0.0
    converted: float = 0.0
    """Bytes of copies in another type, which a computation in float32 does not make."""

    def __add__(self, other: Values) -> Values:
        return Values(self.narrow + other.narrow, self.float32 + other.float32, self.converted + other.converted)

    def times(self, factor: float) -> Values:
        return Values(factor * self.narrow, factor * self.float32, factor * self.converted)

    def num_bytes(self, width: int) -> float:
        """Bytes where a value in the type of the computation has `width`."""
        return width * self.narrow + 4 * self.float32 + (self.converted if width < 4 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Memory besides what matrix products of tokens read and write."""

    kept: Values = field(default_factory=Values)
    """From the forward to the backward pass."""
    forward: Values = field(default_factory=Values)
    """Read and written in the forward pass, operators between products fused."""
    backward: Values = field(default_factory=Values)

    def __add__(self, other: Work) -> Work:
        return Work(
            kept=self.kept + other.kept, forward=self.forward + other.forward, backward=self.backward + other.backward
        )

    def times(self, factor: float) -> Work:
        return Work(
            kept=self.kept.times(factor), forward=self.forward.times(factor), backward=self.backward.times(factor)
        )


NO_WORK = Work()
