# SPDX-License-Identifier: Apache-2.0
"""The form of a graph that does not depend on its depth, found in two graphs of different depths.

Equal layers make equal blocks. Entries of a block refer to others relative to it, entries outside of all blocks to single
blocks by their distance from one end, or to all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sporeloom.partition.depth.entries import ABSENT, Entry
from sporeloom.partition.depth.layout import Fixed, Layout
from sporeloom.partition.depth.units import IrregularDepthError

NUM_BLOCKS = 3
"""Blocks of the smaller graph; the larger one has one more. The first and the last may refer to what is outside."""


class FromBlock(NamedTuple):
    """A reference from a block: to another position, so many blocks further."""

    region: int
    offset: int
    distance: int


class AtEnd(NamedTuple):
    """A reference to the block at a distance from the first or the last one, or a layer unit, from outside of all blocks."""

    region: int
    offset: int
    end: Literal["first", "last"]
    distance: int


class EveryBlock(NamedTuple):
    """References to some positions in every block, one block after another."""

    ascending: bool
    items: tuple[tuple[int, int], ...]
    """(region, offset)"""


class _Both(NamedTuple):
    """A block, or a layer unit, by its distances from both ends."""

    region: int
    offset: int
    first: int
    last: int


Reference = Fixed | FromBlock | AtEnd | EveryBlock | None
OF_UNIT = -1
"""Region of a reference that is a layer unit in a text."""


@dataclass(frozen=True, slots=True)
class EntryForm:
    """An entry without what depends on the depth."""

    content: tuple[Hashable, ...]
    units: tuple[Reference | _Both | int, ...]
    """Layer units in its texts: relative to its block, or to an end."""
    inputs: tuple[Reference | _Both, ...]
    ids: tuple[Reference | _Both, ...]
    entry: Entry
    """One with this form."""

    def equals(self, other: EntryForm) -> bool:
        return (self.content, self.units, self.inputs, self.ids) == (
            other.content,
            other.units,
            other.inputs,
            other.ids,
        )


@dataclass(frozen=True)
class RegionForm:
    """The blocks of a region: the first one, those between, and the last one."""

    ascending: bool
    first: list[EntryForm]
    inner: list[EntryForm]
    last: list[EntryForm]


@dataclass(frozen=True)
class GraphForm:
    """Segments, with a region after each but the last."""

    segments: list[list[EntryForm]]
    regions: list[RegionForm]


def common_form(smaller: Layout, larger: Layout) -> GraphForm:
    """The form of two graphs whose depths differ by one unit.

    Raises:
        IrregularDepthError: they have none in common.
    """
    assert (smaller.num_blocks, larger.num_blocks) == (NUM_BLOCKS, NUM_BLOCKS + 1)
    shapes = [
        [[len(segment) for segment in each.segments], [region.ascending for region in each.regions]]
        for each in (smaller, larger)
    ]
    if shapes[0] != shapes[1]:
        raise IrregularDepthError(f"segments {shapes[0]} and {shapes[1]}")
    segments = [
        [_unified(_outside(smaller, a), _outside(larger, b)) for a, b in zip(one, other, strict=True)]
        for one, other in zip(smaller.segments, larger.segments, strict=True)
    ]
    return GraphForm(segments, [_region(smaller, larger, number) for number in range(len(smaller.regions))])


def _region(smaller: Layout, larger: Layout, number: int) -> RegionForm:
    few, many = (
        [[_inside(each, position, block) for position in positions] for block, positions in enumerate(found.blocks)]
        for each in (smaller, larger)
        for found in (each.regions[number],)
    )
    inner = many[1]
    for one, other in ((few[0], many[0]), (few[-1], many[-1]), *((each, inner) for each in (*few[1:-1], *many[1:-1]))):
        if len(one) != len(other):
            raise IrregularDepthError(f"blocks of {len(one)} and {len(other)} entries")
        for a, b in zip(one, other, strict=True):
            _check(a.equals(b), a, b)
    return RegionForm(smaller.regions[number].ascending, many[0], inner, many[-1])


def _inside(layout: Layout, position: int, block: int) -> EntryForm:
    """The form of an entry of a block."""
    entry = layout.entries[position]

    def relative(to: int) -> Reference:
        if to == ABSENT:
            return None
        at = layout.addresses[to]
        return at if isinstance(at, Fixed) else FromBlock(at.region, at.offset, at.block - block)

    units = tuple(unit - 1 - block for unit in entry.units)
    return EntryForm(entry.content, units, tuple(map(relative, entry.inputs)), tuple(map(relative, entry.ids)), entry)


def _outside(layout: Layout, position: int) -> EntryForm:
    """The form of an entry of a segment."""
    entry = layout.entries[position]
    units = tuple(_Both(OF_UNIT, 0, unit, layout.num_units - 1 - unit) for unit in entry.units)
    return EntryForm(entry.content, units, _references(layout, entry.inputs), _references(layout, entry.ids), entry)


def _references(layout: Layout, positions: Sequence[int]) -> tuple[Reference | _Both, ...]:
    found: list[Reference | _Both] = []
    index = 0
    while index < len(positions):
        at = None if positions[index] == ABSENT else layout.addresses[positions[index]]
        if at is None or isinstance(at, Fixed):
            found.append(at)
            index += 1
            continue
        every = _every_block(layout, positions[index:])
        if every:
            found.append(every)
            index += len(every.items) * layout.num_blocks
        else:
            found.append(_Both(at.region, at.offset, at.block, layout.num_blocks - 1 - at.block))
            index += 1
    return tuple(found)


def _every_block(layout: Layout, positions: Sequence[int]) -> EveryBlock | None:
    """References to all blocks at the beginning of some, if there are such."""
    blocks: list[tuple[int, list[tuple[int, int]]]] = []
    for position in positions:
        at = layout.addresses[position] if position != ABSENT else None
        if at is None or isinstance(at, Fixed):
            break
        if not blocks or blocks[-1][0] != at.block:
            if len(blocks) == layout.num_blocks:
                break
            blocks.append((at.block, []))
        blocks[-1][1].append((at.region, at.offset))
    order = [block for block, _ in blocks]
    ascending = order == list(range(layout.num_blocks))
    if not ascending and order != list(range(layout.num_blocks))[::-1]:
        return None
    items = blocks[0][1]
    last = blocks[-1][1][: len(items)]
    if any(of != items for _, of in blocks[:-1]) or last != items:
        return None
    return EveryBlock(ascending, tuple(items))


def _unified(smaller: EntryForm, larger: EntryForm) -> EntryForm:
    """The form of an entry of a segment in both graphs."""
    _check(smaller.content == larger.content, smaller, larger)

    def same(few: Sequence[Reference | _Both | int], many: Sequence[Reference | _Both | int]) -> tuple[Reference, ...]:
        _check(len(few) == len(many), smaller, larger)
        found = [_same(a, b) for a, b in zip(few, many, strict=True)]
        _check(ABSENT not in found, smaller, larger)
        return tuple(each for each in found if not isinstance(each, int))

    units, inputs = same(smaller.units, larger.units), same(smaller.inputs, larger.inputs)
    return EntryForm(larger.content, units, inputs, same(smaller.ids, larger.ids), larger.entry)


def _same(a: Reference | _Both | int, b: Reference | _Both | int) -> Reference | int:
    """The reference that two in graphs of different depths have in common; ABSENT: none."""
    if isinstance(a, _Both) and isinstance(b, _Both) and (a.region, a.offset) == (b.region, b.offset):
        if a.first == b.first:
            return AtEnd(a.region, a.offset, "first", a.first)
        if a.last == b.last:
            return AtEnd(a.region, a.offset, "last", a.last)
    return ABSENT if a != b or isinstance(a, _Both) or isinstance(b, _Both | int) else b


def _check(holds: bool, one: EntryForm, other: EntryForm) -> None:
    if not holds:
        raise IrregularDepthError(f"{one.content[-1]!r} and {other.content[-1]!r} differ")
