# SPDX-License-Identifier: Apache-2.0
"""Lifetimes of the values in a graph: the operator that allocates each one and the last that reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sporeloom.partition.graph import Graph, Name, Node, TensorType, followed, is_effect
from sporeloom.partition.rank_shapes import along_first_dim
from sporeloom.partition.sharded_graph import item_size

VIEWS = frozenset(
    ("Reshape", "Depend", "Load", "TupleGetItem", "ExpandDims", "Squeeze", "StopGradient", "Flatten", "Identity")
)
"""Operators whose first output shares the storage of their first input."""
Order = Literal["written", "breadth"]
"""Order of a graph's operators: as the graph lists them, or as MindSpore's executor runs them, see `breadth_first`."""


@dataclass(slots=True)
class Lifetimes:
    """Storages of a graph, numbered: first its inputs, then one for each value that an operator allocates."""

    nodes: list[Node]
    """The operators in the order of execution."""
    sizes: list[int]
    """Bytes of each storage."""
    names: list[Name]
    """A value in each storage."""
    makers: list[Node | None]
    """The operator that allocates it; None: an input."""
    born: list[list[int]]
    """Storages that each operator allocates."""
    dying: list[list[int]]
    """Storages that nobody reads after an operator, without those of inputs and outputs, which the caller holds."""
    outputs: list[int | None]
    """Storage of each output; None: that of a parameter or constant, or no storage."""
    readers: list[list[Node]] = field(default_factory=list)
    """Operators that read a storage."""
    constants: list[tuple[Name, int]] = field(default_factory=list)
    """Constants and their bytes."""


def num_bytes(type: TensorType | None, half_bytes: int = 2) -> int:
    """Bytes of a value; 0 for one that is not a tensor. `half_bytes`: bytes of a bfloat16, which CPUs hold in float32."""
    if type is None:
        return 0
    return type.num_elements * (half_bytes if type.dtype == "bfloat16" else item_size(type.dtype))


def lifetimes(graph: Graph, order: Order = "breadth", half_bytes: int = 2) -> Lifetimes:
    """Find what a graph allocates, and when.

    Views share storage. An operator that writes a parameter returns it. Waiting for a value (`Depend`) does not keep it.
    """
    nodes = along_first_dim(graph)
    nodes = nodes if order == "written" else breadth_first(nodes)
    sizes = [num_bytes(type, half_bytes) for type in graph.inputs.values()]
    found = Lifetimes(nodes, sizes, list(graph.inputs), [None] * len(sizes), [], [], [])
    storage_of: dict[Name, int | None] = {name: number for number, name in enumerate(graph.inputs)}
    last: list[int] = [-1] * len(sizes)
    found.readers = [[] for _ in sizes]
    for position, node in enumerate(nodes):
        for name in followed(node):
            if (storage := storage_of.get(name)) is not None:
                last[storage] = position
                found.readers[storage].append(node)
        found.born.append([])
        if node.kind == "Constant":
            found.constants.append((node.outputs[0], num_bytes(node.types[0], half_bytes)))
            continue
        for name, type, shared in zip(node.outputs, node.types, _shared(node, graph), strict=True):
            if shared is not None:
                storage_of[name] = storage_of.get(shared)
            elif type is not None:
                storage_of[name] = len(found.sizes)
                found.born[-1].append(len(found.sizes))
                found.sizes.append(num_bytes(type, half_bytes))
                found.names.append(name)
                found.makers.append(node)
                found.readers.append([])
                last.append(position)
    found.outputs = [storage_of.get(name) for name in graph.outputs]
    held = {*range(len(graph.inputs)), *found.outputs}
    found.dying = [[] for _ in nodes]
    for storage, position in enumerate(last):
        if storage not in held:
            found.dying[position].append(storage)
    return found


def _shared(node: Node, graph: Graph) -> list[Name | None]:
    """For each output: the value whose storage it shares; None: it has its own."""
    first = node.inputs[0] if node.inputs else None
    if node.kind in VIEWS and first is not None:
        return [first if isinstance(first, str) else first[0], *[None] * (len(node.outputs) - 1)]
    if not is_effect(node, graph):
        return [None] * len(node.outputs)
    written = [name for name in node.flat_inputs() if name in graph.parameters]
    shared: list[Name | None] = []
    for type in node.types:
        same = [name for name in written if graph.parameters[name] == type and name not in shared]
        shared.append(same[0] if same else None)
    return shared


def breadth_first(nodes: Collection[Node]) -> list[Node]:
    """Order operators as MindSpore's executor does by default."""
    listed = list(nodes)
    makers = {name: number for number, node in enumerate(listed) for name in node.outputs}
    needs = [{makers[name] for name in node.flat_inputs() if name in makers} for node in listed]
    return [listed[number] for number in first_come(needs)]


def first_come(needs: Sequence[Collection[int]]) -> list[int]:
    """Order tasks: first those that need no others, then each one as soon as what it needs is done, first come, first served.

    Args:
        needs: for each task the numbers of those that must be done before.
    """
    waiting, users = [len(needed) for needed in needs], dict[int, list[int]]()
    for number, needed in enumerate(needs):
        for each in needed:
            users.setdefault(each, []).append(number)
    ready, ordered = deque(number for number, count in enumerate(waiting) if not count), []
    while ready:
        number = ready.popleft()
        ordered.append(number)
        for user in users.get(number, ()):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return ordered
