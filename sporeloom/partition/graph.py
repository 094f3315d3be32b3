# SPDX-License-Identifier: Apache-2.0
"""Framework-independent graphs of tensor operators: the input and the output of sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sporeloom.strategy.layout import Dim, Shape

Name = str
Input = Name | tuple[Name, ...]
"""A value, or several where an operator takes a tuple."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value."""

    shape: Shape
    dtype: str
    """NumPy dtype name, or `bfloat16`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankOffset:
    """A constant that differs between ranks: the rank's index along `axes`, times `stride`."""

    axes: Dim
    stride: int


@dataclass(frozen=True, slots=True)
class IsFirst:
    """1 on ranks whose index along `axes` is 0, else 0."""

    axes: Dim


@dataclass(frozen=True, slots=True)
class Scope:
    """Origin of an operator: its Cell, its pass (forward or backward), and the operators that it differentiates or
    repeats."""

    cell: str = ""
    """Path of the Cell whose `construct` contains the operator; empty for operators of gradients."""
    is_backward: bool = False
    """Whether it belongs to the backward pass: it computes a gradient, or recomputes an activation for one."""
    name: Name = ""
    """Its first output in the source graph."""
    forward: Name = ""
    """First output of the forward operator whose gradient this operator computes; empty in the forward pass."""
    again: Name = ""
    """First output of the operator that this one recomputes; empty if it recomputes none."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, or a constant."""

    kind: str
    """The primitive's name, or `Constant`; in a sharded graph also one of `held.COLLECTIVE_OF`."""
    inputs: tuple[Input, ...]
    outputs: tuple[Name, ...]
    types: tuple[TensorType | None, ...]
    """Types of the outputs; None for an output that is not a tensor."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    """Path by which sharding rules select a forward operator."""
    value: Any = None
    """Value of a constant: a number, a tuple of numbers, None, an array, a `RankOffset` or `IsFirst`."""
    origin: Any = None
    """The protocol buffer node that it was read from; None for a node that sharding adds."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the primitive whose values differ from those of its origin."""
    scope: Scope | None = None
    """None if unknown: the node is then placed with its inputs."""

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
    """Operators in topological order."""

    parameters: dict[Name, TensorType]
    """Types of the parameters: global shapes, or local shapes (a rank's shards) in a sharded graph."""
    inputs: dict[Name, TensorType]
    nodes: list[Node]
    outputs: list[Name]


OF_THIS_PASS = "of_this_pass"
"""Attribute of a `Depend`: its result, although made of parameters alone, is of the pass in which it is used."""


def is_effect(node: Node, graph: Graph) -> bool:
    """Whether an operator writes a parameter."""
    return bool(node.attributes.get("side_effect_mem")) and any(name in graph.parameters for name in node.flat_inputs())


def followed(node: Node) -> Iterable[Name]:
    """Inputs that a node computes with, without those that it only waits for, which another graph may contain."""
    if node.kind in ("UpdateState", "Depend"):
        first = node.inputs[0]
        return (first,) if isinstance(first, str) else first
    return node.flat_inputs()
