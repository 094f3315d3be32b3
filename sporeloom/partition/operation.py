# SPDX-License-Identifier: Apache-2.0
"""What a handler of an operator is asked, and what it answers."""

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
    """One input."""

    type: TensorType | None
    """None: not a tensor."""
    layout: ValueLayout | None
    """How the ranks hold it now."""
    value: Any = None
    """Of a constant."""
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
    """Writes nodes into a sharded graph; types are those of a rank's parts."""

    def node(
        self,
        kind: str,
        inputs: Sequence[Input],
        types: Sequence[TensorType],
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[Name, ...]: ...

    def operator(self, inputs: Sequence[Input], types: Sequence[TensorType]) -> tuple[Name, ...]:
        """The operator itself, with its attributes, of parts."""
        ...

    def constant(self, value: Any, type: TensorType | None = None) -> Name: ...


Rewrite = Callable[[Emitter, Sequence[Input]], Sequence[Name]]
Remake = Callable[[Emitter, Sequence[Input], ValueLayout], Name | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the ranks compute an operator.

    Args:
        inputs: the layout wanted of each input; None where it is not a tensor; a tuple where the operator takes one.
        outputs: layouts of what comes out of it then; None where it is not a tensor.
        constants: input -> what it is instead: a shape, say, that becomes a rank's own.
        attributes: of the primitive, that are others on a rank: a number of channels, say.
        rewrite: emits other nodes in place of the operator. Gets the names of the inputs in their layouts.
        remake: emits what makes the output in another layout at once, for less than moving it there costs; None: it cannot.
    """

    inputs: tuple[ValueLayout | tuple[ValueLayout | None, ...] | None, ...]
    outputs: tuple[ValueLayout | None, ...]
    constants: Mapping[int, Any] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    remake: Remake | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator whose inputs have layouts, and which is to be computed by all ranks."""

    kind: str
    operands: tuple[Operands, ...]
    types: tuple[TensorType | None, ...]
    """Of the outputs, global."""
    attributes: Mapping[str, Any]
    grid: DeviceGrid

    def tensor(self, index: int) -> Operand:
        """An input that is one tensor."""
        operand = self.operands[index]
        assert isinstance(operand, Operand) and operand.type is not None, (self.kind, index)
        return operand

    def constant(self, index: int) -> Any:
        """The value of an input that must be known.

        Raises:
            UnknownValueError: it is computed.
        """
        operand = self.operands[index] if index < len(self.operands) else None
        if not isinstance(operand, Operand) or not operand.is_constant:
            raise UnknownValueError(f"{self.kind}: input {index + 1} is computed")
        return operand.value

    def setting(self, index: int, name: str) -> Any:
        """What some primitives have as an attribute and others as an input.

        Raises:
            UnknownValueError: it is neither, or computed.
        """
        if index < len(self.operands):
            return self.constant(index)
        if name not in self.attributes:
            raise UnknownValueError(f"{self.kind}: {name} is not known")
        return self.attributes[name]

    @property
    def is_dynamic(self) -> bool:
        """Whether the length of a dim depends on values: nobody knows who holds what of it."""
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
        """Layouts of all inputs: those `wanted`, the other tensors replicated."""
        return tuple(wanted.get(i) or whole(operand) for i, operand in enumerate(self.operands))


class UnknownValueError(ValueError):
    """A handler wants a number that the graph computes: the operator is computed unsharded instead."""


def whole(operand: Operands) -> Any:
    """The layout of an input that every rank is to hold all of."""
    if isinstance(operand, tuple):
        return tuple(whole(item) for item in operand)
    return None if operand.type is None else replicated(len(operand.type.shape))


def computed_unsharded(op: Operation) -> Plan:
    """Right for every operator: every rank holds all of the inputs and computes all of the outputs."""
    outputs = tuple(None if type is None else replicated(len(type.shape)) for type in op.types)
    return Plan(tuple(whole(operand) for operand in op.operands), outputs)


Handler = Callable[[Operation], Plan]


@dataclass(frozen=True, slots=True)
class Pin:
    """What a rule says of an operator."""

    inputs: tuple[Layout, ...]
    """One layout for each tensor that has dims, in order."""
    outputs: tuple[Layout, ...] | None = None
    local: bool = False
    """Each rank runs the operator on its own parts as it stands."""
    source: str = ""
    """file:line"""
