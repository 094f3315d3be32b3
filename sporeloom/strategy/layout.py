# SPDX-License-Identifier: Apache-2.0
"""Layouts: which mesh axes shard which dim of a tensor."""

from __future__ import annotations

from sporeloom.strategy.mesh import Mesh

Dim = tuple[str, ...]
"""Mesh axes that shard one tensor dim, outer first; empty: the dim is unsharded."""
Layout = tuple[Dim, ...]
Shape = tuple[int, ...]
KV_AXIS, GROUP_AXIS = "kv", "group"
"""In a rule: the part of tp that shards the heads of keys and values, which is all of tp unless a model has fewer
of them; and the rest of tp, which shards the query heads that share one."""
EXPERT_AXIS, EXPERT_REPLICA_AXIS = "ep", "edp"
"""In a rule: the part of dp that shards the experts; and the rest of dp, whose ranks hold the same ones."""


class LayoutError(ValueError):
    """A dim cannot be sharded as its layout says."""


def degrees(layout: Layout, mesh: Mesh) -> Shape:
    """Number of shards of each dim: MindSpore's operator strategy of one input."""
    parts = []
    for dim in layout:
        count = 1
        for axis in dim:
            count *= mesh.degree(axis)
        parts.append(count)
    return tuple(parts)


def local_shape(layout: Layout, global_shape: Shape, mesh: Mesh) -> Shape:
    """Shape one rank holds of a tensor laid out over `mesh`.

    Raises:
        LayoutError: the layout has another number of dims, or a dim is not divisible by its degree.
    """
    if len(layout) != len(global_shape):
        raise LayoutError(f"the layout has {len(layout)} dims, the tensor {len(global_shape)}: {global_shape}")
    for dim, (size, parts) in enumerate(zip(global_shape, degrees(layout, mesh), strict=True)):
        if size % parts:
            raise LayoutError(f"dim {dim} of {global_shape} is not divisible by {'*'.join(layout[dim])} = {parts}")
    return tuple(s // p for s, p in zip(global_shape, degrees(layout, mesh), strict=True))


def show(layout: Layout) -> str:
    """Format a layout as `[dp, tp*dp, ~]`."""
    return "[" + ", ".join("*".join(dim) or "~" for dim in layout) + "]"
