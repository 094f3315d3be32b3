# SPDX-License-Identifier: Apache-2.0
"""Kinds of faults of a partitioned program, as data: the operators of a rank's graph in which a fault can be planted, and
what it makes of one.

They measure a proof: a certificate that does not notice a planted fault would not notice a real one. All ranks plant a fault
in the same operator, so that they still exchange messages of the same shapes.

Source of kinds: bugs that were reported of partitioned training, for example in NVIDIA/Megatron-LM#7452.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sporeloom.partition.graph import Graph, IsFirst, Name, Node, RankOffset, TensorType, is_effect
from sporeloom.partition.grid import MICROBATCHES, STAGES, DeviceGrid
from sporeloom.strategy.layout import Dim


class Program:
    """The graph of a rank, in which a fault is planted."""

    def __init__(self, graph: Graph, grid: DeviceGrid, rank: int):
        self.graph, self.grid, self.rank = graph, grid, rank
        self.makers = {name: node for node in graph.nodes for name in node.outputs}

    def maker(self, node: Node) -> Node | None:
        """The operator that computes the first input of a node."""
        return self.makers.get(next(node.flat_inputs(), ""))

    def user(self, node: Node) -> Node | None:
        """The first operator that reads the first output of a node."""
        return next((other for other in self.graph.nodes if node.outputs[0] in other.flat_inputs()), None)

    def other_axis(self, axes: Sequence[str], same_degree: bool) -> Dim:
        """An axis that could be taken for the only one of `axes`; empty if there is none."""
        if len(axes) != 1:
            return ()
        degrees = {a: d for a, d in self.grid.degrees.items() if d > 1 and a not in (STAGES, MICROBATCHES)}
        others = [a for a, d in degrees.items() if a != axes[0] and (d == degrees.get(axes[0]) or not same_degree)]
        return tuple(others[:1])


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    Args:
        fits: whether a fault of the kind can be planted in an operator.
        change: the operators, with the same outputs, that take its place.
    """

    name: str
    fits: Callable[[Node, Program], bool]
    change: Callable[[Node, Program], list[Node]]


@dataclass(frozen=True)
class Site:
    """An operator in which a fault of a kind can be planted."""

    kind: str
    part: str
    """Name of the graph: the whole step, a pass of a stage, or the update."""
    operator: Name
    description: str


def sites_in(part: str, program: Program) -> Iterator[Site]:
    """The sites of all kinds in a graph."""
    for kind in KINDS:
        for node in program.graph.nodes:
            if kind.fits(node, program):
                yield Site(kind.name, part, node.outputs[0], _describe(node, program))


def with_fault(program: Program, kind: FaultKind, operators: Iterable[Name] | None = None) -> Graph:
    """The graph with a fault planted in some operators, or in all that it fits."""
    chosen = None if operators is None else set(operators)
    nodes: list[Node] = []
    for node in program.graph.nodes:
        is_chosen = (chosen is None or node.outputs[0] in chosen) and kind.fits(node, program)
        nodes += kind.change(node, program) if is_chosen else [node]
    return replace(program.graph, nodes=nodes)


def _describe(node: Node, program: Program) -> str:
    axes = getattr(node.value, "axes", node.attributes.get("axes", ()))
    maker = program.maker(node) if node.kind in COLLECTIVES else program.user(node)
    where = ""
    while maker and not where:
        where = maker.path or (maker.scope.cell if maker.scope else "")
        maker = program.makers.get(maker.forward) if maker.forward else None
    effects = [name for name in node.flat_inputs() if name in program.graph.parameters]
    what = f"{type(node.value).__name__ if node.kind == 'Constant' else node.kind} over {', '.join(axes)}"
    if is_effect(node, program.graph):
        what, where = node.kind, effects[0].rpartition(":")[2]
    shape = node.types[0].shape if node.types[0] else ()
    return f"{what} of shape {list(shape)}" + (f" at {where}" if where else "")


# What takes the place of an operator

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "SliceOfRank")


def _constant(name: Name, value: Any, type: TensorType | None = None) -> Node:
    return Node("Constant", (), (name,), (type,), value=value)


def _type(node: Node) -> TensorType:
    assert node.types[0] is not None
    return node.types[0]


def _times(source: Name, factor: float, node: Node) -> list[Node]:
    """The outputs of a node as a value times a factor."""
    name, type = f"{node.outputs[0]}.factor", _type(node)
    return [_constant(name, factor, type), Node("Mul", (source, name), node.outputs, (type,), scope=node.scope)]


def _left_out(node: Node, program: Program) -> list[Node]:
    return _times(next(node.flat_inputs()), 1.0, node)


def _and_times(factor: Callable[[int], float]) -> Callable[[Node, Program], list[Node]]:
    """The node itself, whose result is multiplied by a function of the number of its ranks."""

    def change(node: Node, program: Program) -> list[Node]:
        own = replace(node, outputs=(f"{node.outputs[0]}.right",))
        return [own, *_times(own.outputs[0], factor(program.grid.degree(node.attributes["axes"])), node)]

    return change


def _with(**attributes: Any) -> Callable[[Node, Program], list[Node]]:
    return lambda node, _: [replace(node, attributes={**node.attributes, **attributes})]


def _over_other_axis(same_degree: bool) -> Callable[[Node, Program], list[Node]]:
    return lambda node, program: _with(axes=program.other_axis(node.attributes["axes"], same_degree))(node, program)


def _slice(source: Name, dim: int, begin: int, type: TensorType, name: Name) -> list[Node]:
    begins = tuple(begin if at == dim else 0 for at in range(len(type.shape)))
    numbers = [_constant(f"{name}.begin", begins), _constant(f"{name}.size", type.shape)]
    return [*numbers, Node("Slice", (source, *(n.outputs[0] for n in numbers)), (name,), (type,))]


def _slice_at(begin: Callable[[int, int, int], int]) -> Callable[[Node, Program], list[Node]]:
    """Another slice than that of the rank: begin(index of the rank, number of ranks, length of a slice)."""

    def change(node: Node, program: Program) -> list[Node]:
        axes, dim, type = node.attributes["axes"], node.attributes["dim"], _type(node)
        at = begin(program.grid.index(program.rank, axes), program.grid.degree(axes), type.shape[dim])
        return _slice(next(node.flat_inputs()), dim, at, type, node.outputs[0])

    return change


def _joined(parts: tuple[Name, ...], node: Node) -> list[Node]:
    name = f"{node.outputs[0]}.dim"
    return [_constant(name, node.attributes["dim"]), Node("Concat", (parts, name), node.outputs, node.types)]


def _own_shards(node: Node, program: Program) -> list[Node]:
    return _joined((next(node.flat_inputs()),) * program.grid.degree(node.attributes["axes"]), node)


def _rotated(node: Node, program: Program) -> list[Node]:
    """Gathered shards of which the first comes last."""
    result, type, dim = node.outputs[0], _type(node), node.attributes["dim"]
    size = type.shape[dim] // program.grid.degree(node.attributes["axes"])
    nodes, parts = [replace(node, outputs=(f"{result}.right",))], (f"{result}.head", f"{result}.tail")
    for name, begin, length in zip(parts, (0, size), (size, type.shape[dim] - size), strict=True):
        shape = (*type.shape[:dim], length, *type.shape[dim + 1 :])
        nodes += _slice(f"{result}.right", dim, begin, replace(type, shape=shape), name)
    return [*nodes, *_joined(parts[::-1], node)]


def _reshaped(node: Node, program: Program) -> list[Node]:
    name = f"{node.outputs[0]}.shape"
    own = next(node.flat_inputs())
    return [_constant(name, _type(node).shape), Node("Reshape", (own, name), node.outputs, node.types)]


def _neighbours_offset(node: Node, program: Program) -> list[Node]:
    axes, stride = node.value.axes, node.value.stride
    index = (program.grid.index(program.rank, axes) + 1) % program.grid.degree(axes)
    return [replace(node, value=index * stride)]


def _own_denominator(node: Node, program: Program) -> list[Node]:
    """Weights of losses that add up to the same number on every rank, whatever its number of tokens is."""
    result, type, ranks = node.outputs[0], _type(node), program.grid.degree(node.attributes["axes"])
    own, total, number = f"{result}.right", f"{result}.total", replace(type, shape=())
    dims, false, ones, sums = (f"{result}.{each}" for each in ("dims", "false", "ranks", "sum"))
    return [
        replace(node, outputs=(own,)),
        _constant(dims, tuple(range(len(type.shape)))),
        _constant(false, False),
        _constant(ones, float(ranks), number),
        Node("ReduceSum", (own, dims, false, false), (sums,), (number,)),
        Node("Mul", (sums, ones), (total,), (number,)),
        Node("RealDiv", (own, total), (result,), (type,)),
    ]


def _without_update(node: Node, program: Program) -> list[Node]:
    parameter, step, *rest = node.inputs
    nothing = f"{node.outputs[0]}.nothing"
    assert isinstance(step, str)
    changed = replace(node, outputs=(nothing,))
    return [*_times(step, 0.0, changed), replace(node, inputs=(parameter, nothing, *rest))]


# Where a fault fits


def _is_number(node: Node) -> bool:
    return node.types[0] is not None and node.types[0].dtype.startswith(("float", "bfloat"))


def _is(kind: str) -> Callable[[Node, Program], bool]:
    """A collective or slice among the ranks of a stage."""
    return lambda node, _: node.kind == kind and not {STAGES, MICROBATCHES} & set(node.attributes["axes"])


def _is_sum(node: Node, program: Program) -> bool:
    return _is("AllReduce")(node, program) and node.attributes["op"] == "sum" and _is_number(node)


def _is_maximum(node: Node, program: Program) -> bool:
    return _is("AllReduce")(node, program) and node.attributes["op"] == "max"


def _is_read_maximum(node: Node, program: Program) -> bool:
    """A maximum that is not only subtracted, as in a softmax, which any other number serves as well."""
    kinds = {user.kind for user in program.graph.nodes if node.outputs[0] in user.flat_inputs()}
    return _is_maximum(node, program) and bool(kinds - {"Sub", "SubExt"})


def _is_vectors_gradient(node: Node, program: Program) -> bool:
    """A sum of the gradient of a norm's weight or of a bias."""
    if not _is_sum(node, program) or len(_type(node).shape) != 1:
        return False
    maker = program.maker(node)
    return next(node.flat_inputs()) in program.graph.inputs or bool(maker and maker.scope and maker.scope.is_backward)


def _has_other_axis(kind: str, same_degree: bool) -> Callable[[Node, Program], bool]:
    return lambda node, program: (
        _is(kind)(node, program) and bool(program.other_axis(node.attributes["axes"], same_degree))
    )


def _slices_values(node: Node, program: Program) -> bool:
    """A slice of a value that may differ from its other slices: not of repeated rows or columns."""
    maker = program.maker(node)
    return _is("SliceOfRank")(node, program) and not (maker and maker.kind in ("Tile", "BroadcastTo"))


def _slices_input(node: Node, program: Program) -> bool:
    return _has_other_axis("SliceOfRank", True)(node, program) and next(node.flat_inputs()) in program.graph.inputs


def _slices_weights_of_losses(node: Node, program: Program) -> bool:
    is_input = _is("SliceOfRank")(node, program) and next(node.flat_inputs()) in program.graph.inputs
    others = program.graph.inputs.values()
    return is_input and _is_number(node) and any(not type.dtype.startswith("float") for type in others)


def _between_stages(is_one_number: bool) -> Callable[[Node, Program], bool]:
    return lambda node, _: (
        node.kind == "AllReduce"
        and tuple(node.attributes["axes"]) == (STAGES,)
        and (_type(node).num_elements == 1) == is_one_number
        and _is_number(node)
    )


def _differs(kind: type) -> Callable[[Node, Program], bool]:
    """A constant that differs between ranks."""
    return lambda node, program: (
        isinstance(node.value, kind)
        and MICROBATCHES not in node.value.axes  # type: ignore[attr-defined]
        and program.grid.degree(node.value.axes) > 1  # type: ignore[attr-defined]
    )


def _is_step(node: Node, program: Program) -> bool:
    return node.kind in ("AssignSub", "AssignAdd") and is_effect(node, program.graph) and _is_number(node)


KINDS = (
    FaultKind("a sum over ranks is left out", _is_sum, _left_out),
    FaultKind("a sum over ranks is taken twice", _is_sum, _and_times(float)),
    FaultKind("a mean over ranks in place of a sum", _is_sum, _and_times(lambda ranks: 1 / ranks)),
    FaultKind("a sum over the wrong group", lambda n, p: _has_other_axis("AllReduce", False)(n, p) and _is_sum(n, p),
              _over_other_axis(False)),
    FaultKind("a sum over the first of its axes alone", lambda n, p: _is_sum(n, p) and len(n.attributes["axes"]) > 1,
              lambda n, p: _with(axes=n.attributes["axes"][:1])(n, p)),
    FaultKind("the gradient of a norm's weight or of a bias is not added up", _is_vectors_gradient, _left_out),
    FaultKind("a maximum over ranks is left out", _is_maximum, _left_out),
    FaultKind("the maximum over ranks as their sum", _is_read_maximum, _with(op="sum")),
    FaultKind("a slice in place of a reduce-scatter", _is("ReduceScatter"), lambda n, _: [replace(n, kind="SliceOfRank")]),
    FaultKind("a reduce-scatter over the wrong group", _has_other_axis("ReduceScatter", True), _over_other_axis(True)),
    FaultKind("an all-gather is left out: a rank repeats its own shard", _is("AllGather"), _own_shards),
    FaultKind("shards are gathered in the wrong order", _is("AllGather"), _rotated),
    FaultKind("an all-gather over the wrong group", _has_other_axis("AllGather", True), _over_other_axis(True)),
    FaultKind("an all-to-all is left out", _is("AllToAll"), _reshaped),
    FaultKind("a rank takes the slice of its neighbour", _slices_values,
              _slice_at(lambda index, ranks, length: (index + 1) % ranks * length)),
    FaultKind("a slice begins one too early", _slices_values,
              _slice_at(lambda index, _, length: max(index * length - 1, 0))),
    FaultKind("an input, such as a mask, is sliced for the wrong group", _slices_input, _over_other_axis(True)),
    FaultKind("losses are divided by the number of a rank's own tokens", _slices_weights_of_losses, _own_denominator),
    FaultKind("a rank counts from the offset of its neighbour", _differs(RankOffset), _neighbours_offset),
    FaultKind("every rank counts from the offset of the first", _differs(RankOffset),
              lambda n, _: [replace(n, value=replace(n.value, stride=0))]),
    FaultKind("every rank counts as the first", _differs(IsFirst), lambda n, _: [replace(n, value=IsFirst(()))]),
    FaultKind("the gradient of a weight that stages share is of one stage alone", _between_stages(False), _left_out),
    FaultKind("a number is not added up over stages", _between_stages(True), _left_out),
    FaultKind("a weight stays stale: its update is lost", _is_step, _without_update),
)  # fmt: skip
"""All kinds of faults of graphs."""
SWAPPED_MICROBATCHES = "a stage takes the first two microbatches in each other's place"
"""A fault of a schedule: one stage reads the inputs of another microbatch than the others."""
REPEATED_MICROBATCH = "the first microbatch takes the place of the last one"
"""A fault of accumulation, with or without stages."""
KIND_NAMES = (*(kind.name for kind in KINDS), SWAPPED_MICROBATCHES, REPEATED_MICROBATCH)


def kind_of(name: str) -> FaultKind:
    return next(kind for kind in KINDS if kind.name == name)
