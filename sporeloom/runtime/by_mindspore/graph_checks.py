# SPDX-License-Identifier: Apache-2.0
"""Checks that a partitioned graph computes the same as one device.

MindSpore shards operators by rules, and operators without a rule along dim 0. Some of these compute another function on a
shard of their input, without a message. The operators known to be correct are listed in `operators.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir, own_primitives
from sporeloom.runtime.by_mindspore.operators import (
    ALONG_ITS_AXIS,
    BY_ENTRY,
    INTO_ROWS,
    MOVES,
    ROW_BY_ROW,
    SAME_ON_PARTS,
    VALUE_IS_SAME,
    WAYS_OUT,
)
from sporeloom.runtime.places import place_of

Strategies = Mapping[str, Sequence[Any]]
"""Domain of an operator that MindSpore sharded -> number of shards of each dim of each input."""

_NUMBER = re.compile(r"-op\d+$")
_PASSED = ("Cast", "Depend", "ExpandDims", "Identity", "Load", "Reshape", "Squeeze", "Transpose")
"""Operators through which a sum remains a sum."""


def groups_in(model: mind_ir.ModelProto) -> set[str]:
    """Names of the groups that a graph communicates over, without groups of other graphs of the process."""
    return {a.s.decode() for p in model.primitives for a in p.attribute if a.name.startswith("group") and a.s}


class _Graph:
    """Nodes of one function of a model, with their kinds and inputs."""

    def __init__(self, model: mind_ir.ModelProto, function: mind_ir.GraphProto):
        self.nodes = list(function.node)
        self._primitives = {f"REF::{p.name}": p for p in model.primitives}
        self._made_by = {node.output[0]: node for node in self.nodes}

    def kind(self, node: mind_ir.NodeProto | None) -> str:
        if node is None:
            return ""
        primitive = self._primitives.get(node.op_type)
        return primitive.op_type if primitive else node.op_type

    def input(self, node: mind_ir.NodeProto, place: int) -> mind_ir.NodeProto | None:
        return self._made_by.get(node.input[place]) if place < len(node.input) else None

    def source(self, node: mind_ir.NodeProto, place: int) -> mind_ir.NodeProto | None:
        """The node that produced an input, before casts and changes of shape."""
        made = self.input(node, place)
        while made is not None and self.kind(made) in _PASSED:
            made = self.input(made, 0)
        return made

    def constant(self, node: mind_ir.NodeProto, place: int) -> list[float]:
        """Distinct values of a constant input, sorted; empty if it is computed."""
        made = self.input(node, place)
        if made is None or made.op_type != "Constant":
            return []
        return next((_numbers(a) for a in made.attribute if a.name == "value"), [])

    def axes(self, node: mind_ir.NodeProto) -> list[int]:
        """Dims that an operator reduces or scans: its attribute, or the first constant among its inputs."""
        attributes = {a.name: a for a in self._primitives[node.op_type].attribute}
        if "global_median" in attributes and attributes["global_median"].i:
            return []
        if "axis" in attributes:
            return [int(number) for number in _numbers(attributes["axis"])]
        found = (self.constant(node, place) for place in range(1, len(node.input)))
        return [int(number) for number in next((numbers for numbers in found if numbers), [])]

    def flag(self, node: mind_ir.NodeProto, name: str, place: int) -> bool | None:
        """A boolean attribute or input; None if unknown."""
        made = self.input(node, place)
        said = [a for a in self._primitives[node.op_type].attribute if a.name == name]
        said += [a for a in made.attribute if a.name == "value"] if made is not None else []
        return bool(said[0].i) if said else None

    def forward_uses_first_item(self, node: mind_ir.NodeProto) -> bool:
        return any(
            node.output[0] in user.input and self.kind(user) == "TupleGetItem" and self.constant(user, 1) == [0.0]
            for user in self.nodes
            if not user.domain.startswith("Gradients")
        )


def check_graph(
    model: mind_ir.ModelProto, strategies: Strategies, groups: Mapping[str, Sequence[int]], cell: nn.Cell, source: str
) -> None:
    """Validate one rank's graph of `cell` against the computation of one device.

    Args:
        source: name of the strategy in messages.

    Raises:
        ConfigError: it computes something else, or is not known to be equivalent.
    """
    problems = [f"{source}: {problem}" for problem in _problems(model, strategies, groups, cell)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def _problems(
    model: mind_ir.ModelProto, strategies: Strategies, groups: Mapping[str, Sequence[int]], cell: nn.Cell
) -> Iterator[str]:
    graphs = [_Graph(model, function) for function in (model.graph, *model.functions)]
    local = {p.name for p in model.primitives if any(a.name == "self_define_shard" and a.i for a in p.attribute)}
    nodes: dict[str, list[tuple[_Graph, mind_ir.NodeProto]]] = {}
    for graph in graphs:
        for node in graph.nodes:
            domain = node.domain.removeprefix("recompute_")
            nodes.setdefault(domain, []).append((graph, node))
            nodes.setdefault(_NUMBER.sub("", domain), []).append((graph, node))
    for domain, layouts in strategies.items():
        # No node of that kind: it is in another stage, or unused.
        for graph, node in nodes.get(domain) or nodes.get(_NUMBER.sub("", domain)) or ():
            if node.op_type.removeprefix("REF::") not in local:
                yield from _sharded_wrong(domain, layouts, graph, node)
    for graph in graphs:
        yield from _sums(graph, model, groups, cell)
        yield from _unknown_shapes(graph)


def _sharded_wrong(domain: str, layouts: Sequence[Any], graph: _Graph, node: mind_ir.NodeProto) -> Iterator[str]:
    """Report an operator that computes another function on shards of its inputs."""
    kind = _NUMBER.sub("", domain.rpartition("/")[2])
    parts = list(_inputs(layouts))
    if math.prod(map(math.prod, parts)) == 1 or _is_same(kind, parts, graph, node):
        return
    way = f"use {WAYS_OUT[kind]}; or " if kind in WAYS_OUT else ""
    yield (
        f"{kind} of {place_of(domain)} is sharded into {parts}, and on parts it is another function, or none that is known "
        f"to be the same; {way}hold it as an attribute, self.NAME = ops.{kind}(...), and keep "
        f"it whole by a rule: NAME: {[[None] * len(each) for each in parts]}"
    )


def _inputs(layouts: Sequence[Any]) -> Iterator[list[int]]:
    """Numbers of shards of the dims of each input, tuples flattened."""
    for layout in layouts:
        if any(isinstance(each, (list, tuple)) for each in layout):
            yield from _inputs(layout)
        else:
            yield list(layout)


def _is_same(kind: str, parts: list[list[int]], graph: _Graph, node: mind_ir.NodeProto) -> bool:
    """Whether an operator sharded into `parts` computes on each shard the same as on the full input."""
    if kind in BY_ENTRY or kind in SAME_ON_PARTS or kind in MOVES or kind.startswith("_"):
        return True
    first, others = parts[0], parts[1:]
    if kind in ALONG_ITS_AXIS:
        axes = graph.axes(node)
        is_whole = bool(axes) and all(first[axis] == 1 for axis in axes)
        return is_whole or (kind in VALUE_IS_SAME and not graph.forward_uses_first_item(node))
    if kind == "BatchNorm":
        return graph.flag(node, "is_training", 5) is False
    if kind in ROW_BY_ROW:
        return math.prod(first[1:]) == 1 and math.prod(map(math.prod, others)) == 1
    if kind in INTO_ROWS:
        what = others[1] if len(others) > 1 else first
        return first[0] == 1 and math.prod(others[0]) == 1 and math.prod(first) == math.prod(what)
    return False


def _sums(
    graph: _Graph, model: mind_ir.ModelProto, groups: Mapping[str, Sequence[int]], cell: nn.Cell
) -> Iterator[str]:
    """Find `Mul(AllReduce(AddN(..)), y)`, MindSpore's graph of a sum of a product and a value all-reduced over ranks.
    It is equivalent if y is 1 / ranks. (MindSpore's own AddNs are avoided: `sums.py`.) Cells with an explicit
    AllReduce, such as an optimizer, are not checked."""
    speaking = {type(part).__name__ for _, part in cell.cells_and_names() if _communicates(part)}
    sizes = {p.name: len(groups.get(_text(p, "group"), ())) for p in model.primitives if p.op_type == "AllReduce"}
    for node in graph.nodes:
        for place in (0, 1) if graph.kind(node) == "Mul" else ():
            reduced = graph.source(node, place)
            if reduced is None or graph.kind(reduced) != "AllReduce" or graph.kind(graph.source(reduced, 0)) != "AddN":
                continue
            if any(f"-{name}/" in reduced.domain for name in speaking):
                continue
            factor, ranks = graph.constant(node, 1 - place), sizes.get(reduced.op_type.removeprefix("REF::"))
            if not ranks or not factor or any(abs(number * ranks - 1) > 1e-6 for number in factor):
                yield (
                    f"an ops.AddN() of {place_of(node.domain)} adds a product with what ranks add up, and MindSpore "
                    "multiplies and adds up the other terms, too: write a + b, or call ops.addn"
                )


def _communicates(part: nn.Cell) -> bool:
    return any(getattr(primitive, "name", "") == "AllReduce" for primitive in own_primitives(part).values())


def _unknown_shapes(graph: _Graph) -> Iterator[str]:
    for node in graph.nodes:
        shapes = (tensor.dims for a in node.attribute if a.name == "shape" for tensor in a.tensors)
        if any(n < 0 for dims in shapes for n in dims):
            yield (
                f"{graph.kind(node)} of {place_of(node.domain)} gives a tensor whose shape depends on the data, and ranks "
                "see other data; keep the shape: mask, and choose with ops.where"
            )


def _numbers(attribute: mind_ir.AttributeProto) -> list[float]:
    if attribute.tensors:
        tensor = attribute.tensors[0]
        dtype = _DTYPES.get(tensor.data_type)
        return sorted(set(map(float, np.frombuffer(tensor.raw_data, dtype)))) if dtype else []
    if attribute.values:
        return [number for value in attribute.values for number in _numbers(value)]
    if attribute.type in _INTEGERS:
        return [float(attribute.i)]
    return [attribute.f] if attribute.type == mind_ir.AttributeProto.FLOAT else []


_DTYPES = {
    mind_ir.TensorProto.FLOAT: np.float32,
    mind_ir.TensorProto.FLOAT16: np.float16,
    mind_ir.TensorProto.INT32: np.int32,
    mind_ir.TensorProto.INT64: np.int64,
}
_INTEGERS = (mind_ir.AttributeProto.INT32, mind_ir.AttributeProto.INT64)


def _text(primitive: mind_ir.PrimitiveProto, name: str) -> str:
    return next((a.s.decode() for a in primitive.attribute if a.name == name and a.s), "")
