# SPDX-License-Identifier: Apache-2.0
"""Count what sharded graphs do: every collective with its bytes, every product with its FLOPs, by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sporeloom.dry_run.rank_report import Collective
from sporeloom.partition.graph import Graph, Name, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.held import item_size
from sporeloom.strategy.layout import Shape

PRODUCTS = ("MatMul", "BatchMatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
FLASH_PRODUCTS = {"FlashAttentionScore": 2, "FlashAttentionScoreGrad": 5}
"""Products of all queries with all keys: the gradient's kernel computes the scores again."""
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
"""Operators that do not touch what a tensor holds."""
COLLECTIVES = {
    "AllReduce": "AllReduce",
    "AllGather": "AllGather",
    "ReduceScatter": "ReduceScatter",
    "AllToAll": "AlltoAll",
}
"""Collectives of a sharded graph, by MindSpore's names."""
PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass
class Work:
    """What a rank does in one step."""

    collectives: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    """(kind, phase, group, bytes of the whole tensor) -> times."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    """Of matrix products, by phase."""
    moved_bytes: int = 0
    """To the host, and as many back."""
    passed_bytes: int = 0
    """Of the results of all operators but matrix products and what only names a tensor anew."""
    in_float32: bool = False
    """Whether a matrix product is."""

    def add_message(self, kind: str, phase: str, group: str, ranks: Sequence[int], num_bytes: int, times: int) -> None:
        """Count a collective over the `ranks` of a group of this name, or what is sent to another stage."""
        self.groups[group] = list(ranks)
        self.collectives[kind, phase, group, num_bytes] += times

    def sorted_collectives(self) -> list[Collective]:
        """The collectives, in one order."""
        return [Collective(k, p, g, times, size) for (k, p, g, size), times in sorted(self.collectives.items())]


def phases_of(graph: Graph) -> dict[Name, str]:
    """The phase in which each value is computed. What comes of gradients and is none is the optimizer's."""
    found: dict[Name, str] = {}
    for node in graph.nodes:
        given = [found[name] for name in node.flat_inputs() if name in found]
        latest = max(given, key=PHASES.index, default=PHASES[0])
        if node.scope is None:  # a value that is laid out otherwise goes with what it is made of
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
    """Count what `rank` does when it runs a sharded graph.

    Args:
        types: of all values, as a rank holds them.
        phases: of values; of those that are not there `phase`.
        times: how often the graph runs in a step.
    """
    constants = {node.outputs[0]: node for node in graph.nodes if node.kind == "Constant"}
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
        elif node.kind == "MoveTo":
            if _is_on_host(node, constants):
                work.moved_bytes += times * _bytes_of(node.types)
        elif node.kind in PRODUCTS:
            assert type is not None
            work.in_float32 |= type.dtype == "float32"
            work.flops[when] += times * _flops(node, types)
        elif node.kind in FLASH_PRODUCTS:
            query, keys = (types[name].shape for name in _tensors(node)[:2])
            work.flops[when] += times * attention_flops(node.kind, query, keys)
        elif node.kind not in NAMES:
            work.passed_bytes += times * _bytes_of(node.types)


def between(stages: Iterable[int]) -> str:
    """Name of the group of ranks at one place of some stages."""
    return f"stages {' and '.join(map(str, stages))}"


def _tensors(node: Node) -> list[Name]:
    return [name for name in node.inputs if isinstance(name, str)]


def _flops(node: Node, types: Mapping[Name, TensorType]) -> int:
    (out, *_) = (type.shape for type in node.types if type is not None)
    first, second = (types[name].shape if name in types else () for name in _tensors(node)[:2])
    return product_flops(node.kind, out, first, second)


def product_flops(kind: str, out: Shape, first: Shape, second: Shape) -> int:
    """FLOPs of a product, of the shapes of its output and inputs. A convolution and its gradients multiply each entry of the
    smaller picture with each of the filter."""
    if not kind.startswith("Conv2D"):
        return 2 * math.prod(out) * (math.prod(first) // math.prod(out[:-1]))
    if kind == "Conv2D":  # picture, filter -> (N, C, H, W)
        return 2 * math.prod(out) * math.prod(second[1:])
    if kind == "Conv2DBackpropInput":  # gradient (N, C, H, W), filter -> picture
        return 2 * math.prod(first) * math.prod(second[1:])
    return 2 * math.prod(first) * math.prod(out[1:])  # gradient, picture -> filter


def attention_flops(kind: str, query: Shape, keys: Shape) -> int:
    """FLOPs of a FlashAttention kernel, of queries (B, H, T, D/H) and keys (B, KV, keys, D/H)."""
    return FLASH_PRODUCTS[kind] * 2 * math.prod(query) * keys[2]


def _is_on_host(move: Node, constants: Mapping[Name, Node]) -> bool:
    """Whether a tensor is moved to the host, not back."""
    target = constants[_tensors(move)[1]]
    return bool(target.value == "CPU" or target.value == b"CPU")


def _bytes_of(types: Iterable[TensorType | None]) -> int:
    return sum(type.num_elements * item_size(type.dtype) for type in types if type is not None)
