# SPDX-License-Identifier: Apache-2.0
"""Layer numbers in the texts of a graph: paths of operators, names of parameters, domains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LAYER = re.compile(r"(?<!\w)(layers(?:-CellList/|\.))(\d+)")
MARK = re.compile("\0(\\d+)\0")


class IrregularDepthError(ValueError):
    """Graphs of different depths do not differ by equal layers alone."""


@dataclass(frozen=True)
class Units:
    """Division of numbered layers into the first ones, each of which may differ from all others, and units of `size` layers,
    which are equal."""

    first: int
    size: int

    def count(self, num_layers: int) -> int:
        """Number of units of a network with so many numbered layers."""
        return (num_layers - self.first) // self.size

    def num_layers(self, count: int) -> int:
        """Number of numbered layers of a network with so many units."""
        return self.first + count * self.size

    def split(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Replace the layer numbers in a text by their positions within their units. Returns the text and the units."""
        found: list[int] = []

        def mark(match: re.Match[str]) -> str:
            layer = int(match[2]) - self.first
            if layer < 0:
                return match[0]
            found.append(layer // self.size)
            return f"{match[1]}\0{layer % self.size}\0"

        return LAYER.sub(mark, text), tuple(found)

    def joined(self, text: str, units: Iterator[int]) -> str:
        """The text that `split` makes this one of, for other units."""
        return MARK.sub(lambda match: str(self.first + next(units) * self.size + int(match[1])), text)
