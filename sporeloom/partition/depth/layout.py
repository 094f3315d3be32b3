# SPDX-License-Identifier: Apache-2.0
"""Positions in a list of entries: fixed segments, and regions in which layer units follow each other.

The first and the last unit are in the segments: the ones between them, numbered from 0, are the blocks of the regions. A
graph has a region for the parameters, one for the forward pass, and others for the backward pass, whose blocks are in the
opposite order, and for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sporeloom.partition.depth.entries import ABSENT, Entry
from sporeloom.partition.depth.units import IrregularDepthError

WAITING = {"UpdateState": 0, "Depend": 1}
"""Operators that only wait for their inputs from this one on."""


class Fixed(NamedTuple):
    """A position in a segment."""

    segment: int
    offset: int


class InBlock(NamedTuple):
    """A position in a block of a region."""

    region: int
    offset: int
    block: int


@dataclass(frozen=True)
class Region:
    """Blocks that follow each other."""

    ascending: bool
    starts: tuple[int, ...]
    """Position of the first entry of each block in the order of the positions, and of what follows the last one."""

    @property
    def blocks(self) -> list[range]:
        """Positions of each block."""
        found = [range(*bounds) for bounds in zip(self.starts, self.starts[1:], strict=False)]
        return found if self.ascending else found[::-1]


class Layout:
    """Address of each entry of a graph of `num_units` layer units."""

    def __init__(self, entries: Sequence[Entry], num_units: int):
        self.entries, self.num_units, self.num_blocks = entries, num_units, num_units - 2
        self.regions = _regions(_runs(_units_of(entries)), num_units)
        bounds = [0, *(at for region in self.regions for at in (region.starts[0], region.starts[-1])), len(entries)]
        self.segments = [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        self.addresses: list[Fixed | InBlock] = [Fixed(0, 0)] * len(entries)
        for number, segment in enumerate(self.segments):
            for offset, position in enumerate(segment):
                self.addresses[position] = Fixed(number, offset)
        for number, region in enumerate(self.regions):
            for block, positions in enumerate(region.blocks):
                for offset, position in enumerate(positions):
                    self.addresses[position] = InBlock(number, offset, block)


def _units_of(entries: Sequence[Entry]) -> list[int | None]:
    """The layer unit of each entry: that of its texts, or else of the parameters and inputs that it is made of; None: none or
    several. Operators of a Cell do not pass their unit on."""
    found: list[int | None] = []
    passed: list[int | None] = []
    for entry in entries:
        units = set(entry.units)
        if not units:
            given = entry.inputs[: WAITING.get(entry.operator)]
            units = {unit for at in given if at != ABSENT and (unit := passed[at]) is not None}
        found.append(units.pop() if len(units) == 1 else None)
        passed.append(None if entry.units and entry.operator else found[-1])
    return found


def _runs(units: Sequence[int | None]) -> list[tuple[int, int]]:
    """Unit and first position of each run of entries of one unit, without those of none."""
    found: list[tuple[int, int]] = []
    for position, unit in enumerate(units):
        if unit is not None and (not found or found[-1][0] != unit):
            found.append((unit, position))
    return found


def _regions(runs: Sequence[tuple[int, int]], num_units: int) -> list[Region]:
    """Find the sequences of runs from the first block to the last one, or back.

    Raises:
        IrregularDepthError: a run of a block is in none.
    """
    found: list[Region] = []
    begin, last = 0, num_units - 1
    while begin < len(runs) - 1:
        end, step = begin + 1, runs[begin + 1][0] - runs[begin][0]
        while end + 1 < len(runs) and runs[end + 1][0] - runs[end][0] == step:
            end += 1
        of_unit = dict(runs[begin : end + 1])
        ascending, needed = step == 1, range(1, last + 1) if step == 1 else range(last - 1, -1, -1)
        if abs(step) == 1 and all(unit in of_unit for unit in needed):
            found.append(Region(ascending, tuple(of_unit[unit] for unit in needed)))
        elif any(0 < unit < last for unit in of_unit):
            raise IrregularDepthError(f"units {list(of_unit)} follow each other")
        begin = end
    return found
