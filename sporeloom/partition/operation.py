# SPDX-License-Identifier: Apache-2.0
"""The interface of operator handlers: an `Operation` with layouts of its inputs, and the `Plan` to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sporeloom.partition.graph import Input, Name, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import NONE, ValueLayout, fitted, replicated
from sporeloom.strategy.layout import Dim, Layout, Shape


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of an operator."""

    type: TensorType | None
    """Global shape and element type; None if it is not a tensor."""
    layout: ValueLayout | None
    """Its current layout."""
    value: Any = None
    """Value of a constant."""
    is_constant: bool = False
    is_parameter: bool = False

    @property
    def shape(self) -> Shape:
        assert self.type is not None
        return self.type.shape

    @property
    def dims(self) -> Layout:
        assert self.layout is not None
        return self.layout.dims

    @property
    def partial(self) -> frozenset[str]:
        return NONE if self.layout is None else self.layout.partial


Operands = Operand | tuple[Operand, ...]


class Emitter(Protocol):
    """Writes nodes into a sharded graph; types have local shapes (those of a rank's shards)."""

    def node(
        self,
        kind: str,
        inputs: Sequence[Input],
        types: Sequence[TensorType],
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[Name, ...]: ...

    def operator(self, inputs: Sequence[Input], types: Sequence[TensorType]) -> tuple[Name, ...]:
        """Emit the operator itself, with its attributes, on the local shards."""
        ...

    def constant(self, value: Any, type: TensorType | None = None) -> Name: ...


Rewrite = Callable[[Emitter, Sequence[Input]], Sequence[Name]]
Remake = Callable[[Emitter, Sequence[Input], ValueLayout], Name | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts and local computation by which the ranks compute an operator.

    Args:
        inputs: required layout of each input; None for an input that is not a tensor; a tuple for a tuple of tensors.
        outputs: resulting layouts of the outputs; None for an output that is not a tensor.
        constants: index of a constant input -> its local value, such as a local shape in place of the global one.
        attributes: attributes of the primitive with local values, such as a local number of channels.
        rewrite: emits other nodes in place of the operator, given the names of the inputs in their required layouts.
        remake: computes the output directly in another layout, which is cheaper than redistributing it; None if it cannot.
    """

    inputs: tuple[ValueLayout | tuple[ValueLayout | None, ...] | None, ...]
    outputs: tuple[ValueLayout | None, ...]
    constants: Mapping[int, Any] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    remake: Remake | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator with the current layouts of its inputs, to be computed by all ranks."""

    kind: str
    operands: tuple[Operands, ...]
    types: tuple[TensorType | None, ...]
    """Types of the outputs, with global shapes."""
    attributes: Mapping[str, Any]
    grid: DeviceGrid

    def tensor(self, index: int) -> Operand:
        """Return an input that is a single tensor."""
        operand = self.operands[index]
        assert isinstance(operand, Operand) and operand.type is not None, (self.kind, index)
        return operand

    def constant(self, index: int) -> Any:
        """Return the value of an input that must be constant.

        Raises:
            UnknownValueError: the graph computes it.
        """
        operand = self.operands[index] if index < len(self.operands) else None
        if not isinstance(operand, Operand) or not operand.is_constant:
            raise UnknownValueError(f"{self.kind}: input {index + 1} is computed")
        return operand.value

    def setting(self, index: int, name: str) -> Any:
        """Return a setting that some primitives have as an attribute and others as an input.

        Raises:
            UnknownValueError: the operator has neither, or the graph computes it.
        """
        if index < len(self.operands):
            return self.constant(index)
        if name not in self.attributes:
            raise UnknownValueError(f"{self.kind}: {name} is not known")
        return self.attributes[name]

    @property
    def is_dynamic(self) -> bool:
        """Whether the length of some dim depends on values, so that no layout of it is known."""
        operands = (each for o in self.operands for each in (o if isinstance(o, tuple) else (o,)))
        types = (*self.types, *(operand.type for operand in operands))
        return any(size < 0 for type in types if type is not None for size in type.shape)

    @property
    def output(self) -> TensorType:
        assert self.types[0] is not None
        return self.types[0]

    def fit(self, dims: Sequence[Dim], shape: Shape, taken: frozenset[str] = NONE) -> Layout:
        return fitted(dims, shape, self.grid, taken)

    def as_they_are(self, wanted: Mapping[int, ValueLayout]) -> tuple[Any, ...]:
        """Layouts of all inputs: `wanted` where given, and replicated for the other tensors."""
        return tuple(wanted.get(i) or whole(operand) for i, operand in enumerate(self.operands))


class UnknownValueError(ValueError):
    """A handler needs the value of an input that the graph computes: the operator is computed unsharded instead."""


def whole(operand: Operands) -> Any:
    """The replicated layout of an input."""
    if isinstance(operand, tuple):
        return tuple(whole(item) for item in operand)
    return None if operand.type is None else replicated(len(operand.type.shape))


def computed_unsharded(op: Operation) -> Plan:
    """A plan that is valid for every operator: inputs are replicated, and every rank computes all outputs in full."""
    outputs = tuple(None if type is None else replicated(len(type.shape)) for type in op.types)
    return Plan(tuple(whole(operand) for operand in op.operands), outputs)


Handler = Callable[[Operation], Plan]


@dataclass(frozen=True, slots=True)
class Pin:
    """Layouts that a sharding rule sets for an operator."""

    inputs: tuple[Layout, ...]
    """One layout for each tensor with at least one dim, in order."""
    outputs: tuple[Layout, ...] | None = None
    local: bool = False
    """Whether each rank runs the operator unchanged on its local shards."""
    source: str = ""
    """Position of the rule: file:line"""
