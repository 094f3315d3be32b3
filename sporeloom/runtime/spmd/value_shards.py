# SPDX-License-Identifier: Apache-2.0
"""The values of one device's graph of which a rank's nodes have parts, so that ranks of different meshes can be compared.

One device's graph is not the same for all strategies: microbatches divide the loss once more, and recomputation repeats
operators. A value is therefore identified by its operator and those near it, not by its name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from sporeloom.partition.graph import Graph, Name, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.runtime.places import place_of
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.tensor_slice import rank_slice

DEPTH = 3
"""Number of operators before a value, one after another, by which it is identified."""
MAX_NODES = 1 << 32
SAME_VALUE = ("Depend", "Load", "TensorMove")
"""Operators that return their first input."""
UPDATES = ("optimizer", "qk_clip", "averages")
"""Attributes of a training step whose results are left out: the parameters after the step are compared, for which rounding
may determine a direction."""


@dataclass(frozen=True)
class ValueShard:
    """The part of a value that a rank has."""

    key: str
    """The same on all meshes."""
    name: Name
    """Name in one device's graph."""
    place: str
    """Kind and operator, or input, for reports."""
    order: int
    """Position in one device's graph."""
    shape: Shape
    """Shape of the value on one device."""
    start: Shape
    """First entry of the part in each dim."""
    size: Shape
    """Shape of the part."""
    summand: int = 0
    """The value is the sum of the parts with different numbers."""
    is_sum: bool = False
    """Whether there are several such parts."""


def shards_of_values(
    source: Graph,
    made: Mapping[Name, tuple[Name, ValueLayout]],
    written: Mapping[Name, Name],
    grid: DeviceGrid,
    rank: int,
    of_update: bool,
) -> dict[str, ValueShard]:
    """Name in the graph of a rank -> the part of a value that it has. Values without dims are left out.

    Args:
        made: value -> its name and layout in the sharded graph.
        written: names of the sharded graph -> other names in the graph of the rank.
        of_update: whether it is the graph of an update that follows those of microbatches.
    """
    inputs = {name: (f"input {at}", f"input {at}", type) for at, (name, type) in enumerate(source.inputs.items())}
    found: dict[str, ValueShard] = {}
    for order, (name, (key, place, type)) in enumerate({**inputs, **_keys(source)}.items()):
        if name not in made or not type.shape:
            continue
        held, layout = made[name]
        part = rank_slice(type.shape, layout.dims, grid.degrees.__getitem__, partial(grid.coordinate, rank))
        pending = sorted(layout.partial)
        key, order = (f"update {key}", order + MAX_NODES) if of_update else (key, order)
        place_of_sum = grid.index(rank, pending)
        shard = ValueShard(key, name, place, order, type.shape, part.start, part.shape, place_of_sum, bool(pending))
        found.setdefault(written.get(held, held), shard)
    return found


def _keys(source: Graph) -> dict[Name, tuple[str, str, TensorType]]:
    """Value of floating-point numbers that an operator returns -> its key, its place and its type."""
    same: dict[Name, Name] = {}
    marks = {name: name.rpartition(":")[2] for name in source.parameters}
    marks |= {name: f"input {at}" for at, name in enumerate(source.inputs)}
    makers: dict[Name, Node] = {}
    for node in source.nodes:
        first = next(node.flat_inputs(), "")
        if node.kind in SAME_VALUE:
            same[node.outputs[0]] = same.get(first, first)
            continue
        for at, name in enumerate(node.outputs):
            marks[name] = _hash(node.kind, str(at), _place(node).replace(", recomputed", ", forward"))
            makers[name] = node
    for _ in range(DEPTH):
        marks = {name: _with_inputs(mark, makers.get(name), marks, same) for name, mark in marks.items()}
    counts, found = Counter[str](), dict[Name, tuple[str, str, TensorType]]()
    for name, node in makers.items():
        type = node.types[node.outputs.index(name)]
        is_update = _place(node).partition(",")[0].partition(".")[0] in UPDATES
        is_float = type is not None and type.dtype.startswith(("float", "bfloat"))
        if type is not None and is_float and node.kind != "Constant" and not is_update:
            found[name] = f"{marks[name]}.{counts[marks[name]]}", f"{node.kind} of {_place(node)}", type
            counts[marks[name]] += 1
    return found


def _with_inputs(mark: str, node: Node | None, marks: Mapping[Name, str], same: Mapping[Name, Name]) -> str:
    if node is None:
        return mark
    return _hash(mark, *(marks[same.get(name, name)] for name in node.flat_inputs()))


def _place(node: Node) -> str:
    return place_of(node.origin.domain) if node.origin is not None else ""


def _hash(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
