# SPDX-License-Identifier: Apache-2.0
"""A graph of operators on tensors as data, free of any framework: what is sharded, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sporeloom.strategy.layout import Dim, Shape

Name = str
Input = Name | tuple[Name, ...]
"""A value; or several, where an operator takes a tuple."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value."""

    shape: Shape
    dtype: str
    """NumPy's name, or bfloat16."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankOffset:
    """A number that depends on the rank: its index along `axes`, times `stride`."""

    axes: Dim
    stride: int


@dataclass(frozen=True, slots=True)
class IsFirst:
    """1 on ranks whose index along `axes` is 0, else 0."""

    axes: Dim


@dataclass(frozen=True, slots=True)
class Scope:
    """Where in a network an operator stands, and what it goes with."""

    cell: str = ""
    """Path of the Cell in whose `construct` it is; of a gradient's operator nothing, which may be another one's."""
    is_backward: bool = False
    """Whether it belongs to the backward pass: to a gradient, or to what is recomputed for one."""
    name: Name = ""
    """Its first output in the graph that was read."""
    forward: Name = ""
    """Of an operator of a gradient, the first output of the operator whose gradient it computes."""
    again: Name = ""
    """Of an operator that recomputes, the first output of the one that it repeats."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, or a constant."""

    kind: str
    """The primitive's name, or `Constant`; in a sharded graph also one of `held.COLLECTIVE_OF`."""
    inputs: tuple[Input, ...]
    outputs: tuple[Name, ...]
    types: tuple[TensorType | None, ...]
    """Of the outputs; None: not a tensor."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    """Of a forward operator, by which rules find it."""
    value: Any = None
    """Of a constant: a number, a tuple of numbers, None, an array, a `RankOffset` or `IsFirst`."""
    origin: Any = None
    """What it was read from."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the primitive that are others than those of its origin."""
    scope: Scope | None = None
    """None: nobody knows, so it goes with what it is computed from."""

    @property
    def forward(self) -> Name:
        return self.scope.forward if self.scope else ""

    @property
    def again(self) -> Name:
        return self.scope.again if self.scope else ""

    def flat_inputs(self) -> Iterator[Name]:
        for each in self.inputs:
            yield from (each,) if isinstance(each, str) else each


@dataclass(slots=True)
class Graph:
    """Operators in an order in which they can run."""

    parameters: dict[Name, TensorType]
    """Their types are those of the whole tensors, in a sharded graph those of a rank's parts."""
    inputs: dict[Name, TensorType]
    nodes: list[Node]
    outputs: list[Name]


def is_effect(node: Node, graph: Graph) -> bool:
    """Whether an operator writes a parameter."""
    return bool(node.attributes.get("side_effect_mem")) and any(name in graph.parameters for name in node.flat_inputs())


def followed(node: Node) -> Iterable[Name]:
    """Inputs that a node cannot do without: what others only wait for may be elsewhere."""
    if node.kind in ("UpdateState", "Depend"):
        first = node.inputs[0]
        return (first,) if isinstance(first, str) else first
    return node.flat_inputs()
