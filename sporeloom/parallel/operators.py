# SPDX-License-Identifier: Apache-2.0
"""The operators of a Cell that rules can address, and which parameter is which input of which of them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspore import Parameter, nn
from mindspore.ops import Primitive

from sporeloom.mindspore_compat.names import own_parameters, own_primitives
from sporeloom.strategy.config import Rule
from sporeloom.strategy.layout import Layout


@dataclass(frozen=True)
class Operator:
    """A primitive held as an attribute of a Cell."""

    path: str
    cell: nn.Cell
    primitive: Primitive

    @property
    def attribute(self) -> str:
        return self.path.rpartition(".")[2]


def operators(net: nn.Cell) -> list[Operator]:
    """Every primitive of `net` that a rule can address."""
    return [
        Operator(f"{path}.{name}" if path else name, cell, primitive)
        for path, cell in net.cells_and_names()
        for name, primitive in own_primitives(cell).items()
        if isinstance(primitive, Primitive)
    ]


@dataclass(frozen=True)
class ParameterUse:
    """A parameter as one input of an operator."""

    parameter: Parameter
    operator: Operator
    position: int

    def layout(self, rule: Rule) -> Layout | None:
        return rule.inputs[self.position] if self.position < len(rule.inputs) else None


def parameter_uses(found: Sequence[Operator]) -> Iterator[ParameterUse]:
    """Find which parameter is which input of which operator, by the source of each `construct` and the methods it
    calls."""
    by_cell: dict[int, dict[str, Operator]] = {}
    cells: dict[int, nn.Cell] = {}
    for operator in found:
        by_cell.setdefault(id(operator.cell), {})[operator.attribute] = operator
        cells[id(operator.cell)] = operator.cell
    for key, cell in cells.items():
        for attribute, position, name in _calls_of(type(cell)):  # type: ignore[arg-type]
            parameter = own_parameters(cell).get(name)
            if attribute in by_cell[key] and parameter is not None:
                yield ParameterUse(parameter, by_cell[key][attribute], position)


@functools.cache
def _calls_of(kind: type) -> list[tuple[str, int, str]]:
    return list(_calls(kind))


def _calls(
    kind: type[nn.Cell], methods: tuple[str, ...] = ("construct",), given: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int, str]]:
    """(operator attribute, input position, attribute given) of each `self.operator(..., self.attribute, ...)`, also in
    methods that are handed the attribute.

    Args:
        methods: the way from `construct` to the one that is read.
        given: name of its argument -> attribute.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(kind, methods[-1]))))
    except (OSError, TypeError, SyntaxError):  # built at run time: no source to read
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not (called := _self_attribute(node.func)):
            continue
        names = [_attribute_given(argument, given or {}) for argument in node.args]
        method = getattr(kind, called, None)
        if not inspect.isfunction(method):
            yield from ((called, position, name) for position, name in enumerate(names) if name)
        elif called not in methods:
            arguments = list(inspect.signature(method).parameters)[1:]
            handed = {argument: name for argument, name in zip(arguments, names, strict=False) if name}
            yield from _calls(kind, (*methods, called), handed)


def _attribute_given(node: ast.AST, given: Mapping[str, str]) -> str | None:
    while isinstance(node, ast.Call) and node.args:  # self.cast(self.weight, dtype)
        node = node.args[0]
    return given.get(node.id) if isinstance(node, ast.Name) else _self_attribute(node)


def _self_attribute(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None
