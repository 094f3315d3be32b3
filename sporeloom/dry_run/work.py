# SPDX-License-Identifier: Apache-2.0
"""Count the work in sharded graphs by phase: every collective with its bytes, every matrix product with its FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sporeloom.core.grouped_product import SHARE_OF_ROWS
from sporeloom.dry_run.rank_report import Collective
from sporeloom.partition.graph import Graph, Name, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.sharded_graph import item_size
from sporeloom.strategy.layout import Shape

Multiplications = Callable[[Shape, Shape, Shape], int]
"""Number of multiplications of a product, from the shapes of its output and its two factors."""


def _inner(out: Shape, first: Shape) -> int:
    """Length of the summed dim of a matrix product whose first factor may be transposed, and broadcast."""
    return first[-1] if first[-2] == out[-2] else first[-2]


PRODUCTS: dict[str, Multiplications] = {
    **dict.fromkeys(("MatMul", "BatchMatMul"), lambda out, first, _: math.prod(out) * _inner(out, first)),
    **dict.fromkeys(("MatMulExt", "BatchMatMulExt", "Dense"), lambda out, first, _: math.prod(out) * first[-1]),
    # A convolution multiplies each entry of its output with a filter (O, C / groups, ..); so do its gradients.
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda out, _, filters: math.prod(out) * math.prod(filters[1:])),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv2DTranspose", "Conv3DTranspose"),
        lambda _, gradient, filters: math.prod(gradient) * math.prod(filters[1:]),
    ),
    "Conv3DBackpropInput": lambda _, filters, gradient: math.prod(gradient) * math.prod(filters[1:]),
    "Conv2DBackpropFilter": lambda out, gradient, _: math.prod(gradient) * math.prod(out[1:]),
    "Conv3DBackpropFilter": lambda out, _, gradient: math.prod(gradient) * math.prod(out[1:]),
    # Rows (R, K) with the matrix of their group (E, K, N), or the gradient of the latter: (K, R) with (R, N).
    "GroupedMatmulV4": lambda _, first, second: math.prod(first) * second[-1],
}
FLASH_PRODUCTS = {"FlashAttentionScore": 2, "FlashAttentionScoreGrad": 5}
"""Number of products of all queries with all keys: the gradient's kernel recomputes the scores."""
NAMES = frozenset(
    [
        "Reshape",
        "Depend",
        "Load",
        "UpdateState",
        "MakeTuple",
        "TupleGetItem",
        "ExpandDims",
        "Squeeze",
        "StopGradient",
        "Constant",
    ]
)
"""Operators that do not move data."""
COLLECTIVES = {
    "AllReduce": "AllReduce",
    "AllGather": "AllGather",
    "ReduceScatter": "ReduceScatter",
    "AllToAll": "AlltoAll",
}
"""Collectives of a sharded graph -> names that MindSpore gives them."""
PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass
class Work:
    """Work of a rank in one step."""

    collectives: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    """(kind, phase, group, bytes of the unsharded tensor) -> number in a step."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    """FLOPs of matrix products, by phase."""
    passed_bytes: int = 0
    """Bytes of the results of all operators but matrix products and those in `NAMES`."""
    in_float32: bool = False
    """Whether some matrix product is computed in float32."""

    def add_message(self, kind: str, phase: str, group: str, ranks: Sequence[int], num_bytes: int, times: int) -> None:
        """Count a collective over the `ranks` of the group of this name, or a message to another stage."""
        self.groups[group] = list(ranks)
        self.collectives[kind, phase, group, num_bytes] += times

    def sorted_collectives(self) -> list[Collective]:
        """List the collectives in a fixed order."""
        return [Collective(k, p, g, times, size) for (k, p, g, size), times in sorted(self.collectives.items())]


def phases_of(graph: Graph) -> dict[Name, str]:
    """Find the phase in which each value is computed. Values that depend on gradients outside the backward pass belong to the
    optimizer."""
    found: dict[Name, str] = {}
    for node in graph.nodes:
        given = [found[name] for name in node.flat_inputs() if name in found]
        latest = max(given, key=PHASES.index, default=PHASES[0])
        if node.scope is None:  # a resharded value has the phase of its source
            phase = latest
        elif node.scope.again:
            phase = "recompute"
        elif node.scope.is_backward:
            phase = "backward"
        else:
            phase = "optimizer" if latest in ("backward", "optimizer") else "forward"
        found |= dict.fromkeys(node.outputs, phase)
    return found


def add_work(
    work: Work, graph: Graph, types: Mapping[Name, TensorType], phases: Mapping[Name, str], phase: str, times: int,
    grid: DeviceGrid, rank: int,
) -> None:  # fmt: skip
    """Count the work of `rank` in a sharded graph.

    Args:
        types: local types of all values.
        phases: phases of values; `phase` is that of all others.
        times: number of times that the graph runs in a step.
    """
    for node in graph.nodes:
        when, (type, *_) = phases.get(node.outputs[0], phase), node.types
        if node.kind in COLLECTIVES:
            assert type is not None
            axes = node.attributes["axes"]
            ranks, group = grid.group(rank, axes), "*".join(axes)
            if (stages := node.attributes.get("stages")) and len(stages) < len(ranks):
                ranks, group = [ranks[stage] for stage in stages], between(stages)
            size = _bytes_of([type]) * (len(ranks) if node.kind == "ReduceScatter" else 1)
            work.add_message(COLLECTIVES[node.kind], when, group, ranks, size, times)
        elif node.kind in PRODUCTS:
            assert type is not None
            work.in_float32 |= type.dtype == "float32"
            work.flops[when] += times * product_flops(node, types)
        elif node.kind in FLASH_PRODUCTS:
            query, keys = (types[name].shape for name in _tensors(node)[:2])
            work.flops[when] += times * attention_flops(node.kind, query, keys)
        elif node.kind not in NAMES:
            work.passed_bytes += times * _bytes_of(node.types)


def between(stages: Iterable[int]) -> str:
    """Name of a group of ranks at the same position in some stages."""
    return f"stages {' and '.join(map(str, stages))}"


def _tensors(node: Node) -> list[Name]:
    return [name for name in node.inputs if isinstance(name, str)]


def product_flops(node: Node, types: Mapping[Name, TensorType]) -> int:
    """FLOPs of a matrix product or convolution."""
    (out, *_) = (type.shape for type in node.types if type is not None)
    first, second = (types[name].shape if name in types else () for name in list(node.flat_inputs())[:2])
    return round(2 * PRODUCTS[node.kind](out, first, second) * node.attributes.get(SHARE_OF_ROWS, 1.0))


def attention_flops(kind: str, query: Shape, keys: Shape) -> int:
    """FLOPs of a FlashAttention kernel for queries (B, H, T, D/H) and keys (B, KV, keys, D/H)."""
    return FLASH_PRODUCTS[kind] * 2 * math.prod(query) * keys[2]


def _bytes_of(types: Iterable[TensorType | None]) -> int:
    return sum(type.num_elements * item_size(type.dtype) for type in types if type is not None)
