# SPDX-License-Identifier: Apache-2.0
"""Set the layouts of rules on operators in MindSpore, for graphs that MindSpore partitions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.ops import Primitive

from sporeloom.strategy.axes import AXES, BY_NAME, LAYOUT_AXES
from sporeloom.strategy.config import Rule
from sporeloom.strategy.layout import EXPERT_AXIS, EXPERT_REPLICA_AXIS, GROUP_AXIS, KV_AXIS, Dim, Layout, degrees
from sporeloom.strategy.mesh import Mesh, part_of_axis

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
    needs_names = len(mesh.sharding_axes) > 1 and any(BY_NAME[axis].needs_names for axis in mesh.sharding_axes)
    numbers_do = mesh.order == AXES and len(mesh.sharding_axes) <= 2 and not (experts_apart or needs_names or turned)
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
    axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in mesh.degrees if axis in LAYOUT_AXES}
    for axis in used:
        name, outer, inner = part_of_axis(axis)
        if parts := outer or inner:
            axes[name] = (f"{name}:{parts}", f"{name}/{parts}")
    return axes


def is_functional(pattern: str) -> bool:
    """Whether a rule's pattern names operators that are not attributes of a Cell, by their kind: `MatMul`, `head.MatMul_1`.
    Such rules are matched with the compiled graph."""
    return pattern.rpartition(".")[2][:1].isupper()
