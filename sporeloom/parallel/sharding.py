# SPDX-License-Identifier: Apache-2.0
"""Set the layouts of a strategy's rules on the operators of a Cell, and find the parameters that are sharded by
them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.ops import Primitive

from sporeloom.mindspore_compat.names import own_parameters, own_primitives
from sporeloom.models.paths import alternatives, path_matches
from sporeloom.strategy.config import Rule
from sporeloom.strategy.layout import EXPERT_AXIS, EXPERT_REPLICA_AXIS, GROUP_AXIS, KV_AXIS, Dim, Layout, degrees
from sporeloom.strategy.mesh import AXES, Mesh, part_of_axis

LARGE_OPERATORS = frozenset(
    {
        "MatMul",
        "BatchMatMul",
        "MatMulExt",
        "Dense",
        "Gather",
        "Embedding",
        "Conv2D",
        "Softmax",
        "Transpose",
        "FlashAttentionScore",
    }
)
"""Operators that need a rule of their own where MindSpore derives no layouts: it would copy their inputs
unsharded."""
UNKNOWN_OPERATORS = ("TensorScatterElements",)
"""Operators in use that MindSpore cannot partition, so that they need a rule with `local`."""


TAKE_NAMES = frozenset(
    {
        "MatMul",
        "BatchMatMul",
        "Softmax",
        "Transpose",
        "GeLU",
        "Add",
        "Sub",
        "Square",
        "Identity",
        "FlashAttentionScore",
        "Mul",
        "Cast",
    }
)
"""Operators known to take layouts by name (tried with MindSpore 2.9); some others fail with them."""


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


def rules_of(found: Sequence[Operator], rules: Sequence[Rule]) -> dict[str, Rule]:
    """Operator path -> the last rule that matches it."""
    owners: dict[str, Rule] = {}
    for operator in found:
        for rule in rules:
            if path_matches(rule.pattern, operator.path):
                owners[operator.path] = rule
    return owners


def parts_of_heads(net: nn.Cell, mesh: Mesh) -> tuple[Dim, Dim]:
    """The part of tp that shards the heads of keys and values, and the rest of tp. A Cell gives their number as
    its `num_kv_heads`."""
    heads = [cell.num_kv_heads for _, cell in net.cells_and_names() if hasattr(cell, "num_kv_heads")]
    return mesh.parted("tp", math.gcd(*heads) if heads else mesh.tp)


def with_parts_of_axes(rules: Sequence[Rule], kv: Dim, group: Dim, mesh: Mesh) -> tuple[Rule, ...]:
    """The rules with `kv`, `group`, `ep` and `edp` in the mesh's own axes (see `sporeloom.strategy.layout`). Where ep shards
    a tensor tp is what ep leaves of it."""
    edp, ep, tp_of_expert = mesh.expert_parts
    parts = {KV_AXIS: kv, GROUP_AXIS: group, EXPERT_AXIS: ep, EXPERT_REPLICA_AXIS: edp}

    def resolved(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(map(of_layout, layouts))

    def of_layout(layout: Layout) -> Layout:
        has_experts = any(EXPERT_AXIS in dim for dim in layout)
        own = {**parts, "tp": tp_of_expert} if has_experts else parts
        return tuple(tuple(name for axis in dim for name in own.get(axis, (axis,))) for dim in layout)

    return tuple(
        dataclasses.replace(
            rule, inputs=resolved(rule.inputs), outputs=None if rule.outputs is None else resolved(rule.outputs)
        )
        for rule in rules
    )


def shard_as_told(primitive: Primitive, rule: Rule, mesh: Mesh) -> None:
    """Set the layouts of a rule in MindSpore."""
    if rule.local:
        primitive.add_prim_attr("self_define_shard", True)
    shard(primitive, rule.inputs, mesh, rule.outputs, by_name=rule.local)


def shard(
    primitive: Primitive,
    inputs: Sequence[Layout],
    mesh: Mesh,
    outputs: Sequence[Layout] | None = None,
    by_name: bool = False,
) -> None:
    """Set the layouts of an operator in MindSpore: by the axes' names where numbers are not enough and the
    operator takes names. From numbers MindSpore derives the usual order, which differs for ep and the rest of
    dp, for heads and tokens under tp and cp, and for tp before dp; and of more than two axes not which one is
    left out."""
    places = {axis: place for place, axis in enumerate(mesh.order)}
    turned = any(
        [*axes] != sorted(axes, key=places.__getitem__)
        for axes in (
            [a for dim in layout for a in dim if a in places and mesh.degree(a) > 1]
            for layout in (*inputs, *(outputs or ()))
        )
    )
    used = {axis for layout in (*inputs, *(outputs or ())) for dim in layout for axis in dim}
    experts_apart = any(axis != "dp" and part_of_axis(axis)[0] == "dp" for axis in used)
    with_cp = mesh.cp > 1 and len(mesh.sharding_axes) > 1
    numbers_do = mesh.order == AXES and len(mesh.sharding_axes) <= 2 and not (experts_apart or with_cp or turned)
    if by_name or (not numbers_do and primitive.name in TAKE_NAMES):
        axes = _names_of_axes(mesh, used)
        matrix = [name for names in axes.values() for name in names]
        named = ms.Layout(tuple(map(mesh.degree, matrix)), tuple(matrix))

        def say(layout: Layout) -> Any:
            cut = [tuple(name for axis in dim for name in axes.get(axis, [axis] * (axis in matrix))) for dim in layout]
            return named(*(dim[0] if len(dim) == 1 else dim or "None" for dim in cut))

    else:

        def say(layout: Layout) -> Any:
            return degrees(layout, mesh)

    primitive.shard(tuple(map(say, inputs)), None if outputs is None else tuple(map(say, outputs)))


def _names_of_axes(mesh: Mesh, used: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Mesh axis -> its names in MindSpore: those of its two parts where a layout uses one of them."""
    axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in mesh.degrees if axis in AXES[1:]}
    for axis in used:
        name, outer, inner = part_of_axis(axis)
        if parts := outer or inner:
            axes[name] = (f"{name}:{parts}", f"{name}/{parts}")
    return axes


def is_functional(pattern: str) -> bool:
    """Whether a rule's pattern names operators that are not attributes of a Cell, by their kind: `MatMul`, `head.MatMul_1`.
    Such rules are matched with the compiled graph."""
    return pattern.rpartition(".")[2][:1].isupper()


def unmatched_rules(found: Sequence[Operator], rules: Sequence[Rule]) -> list[tuple[Rule, str]]:
    """Rules that are not optional, each with the first of its alternatives that matches no operator."""
    return [
        (rule, missing[0])
        for rule in rules
        if not rule.optional
        and (missing := [p for p in alternatives(rule.pattern) if not any(path_matches(p, o.path) for o in found)])
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
