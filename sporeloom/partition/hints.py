# SPDX-License-Identifier: Apache-2.0
"""Facts about later uses of a value, which a single pass in topological order cannot see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from sporeloom.partition.graph import Graph, Name, TensorType
from sporeloom.partition.operation import Pin
from sporeloom.partition.operators import CONTRACTIONS
from sporeloom.partition.operators.elementwise import HANDLERS as ELEMENTWISE
from sporeloom.strategy.layout import Layout

Known = TypeVar("Known")


def wanted_by_updates(graph: Graph, parameters: Mapping[Name, Layout]) -> dict[Name, Layout]:
    """Values that determine an update of a sharded parameter element by element (mostly gradients) -> the parameter's
    sharding. A partial sum of such a value can be reduce-scattered, even if another operator, such as a norm, reads it
    first."""
    types: dict[Name, TensorType | None] = {**graph.parameters, **graph.inputs}
    for node in graph.nodes:
        types |= zip(node.outputs, node.types, strict=True)
    wanted: dict[Name, Layout] = {}
    for node in reversed(graph.nodes):
        first = next(node.flat_inputs(), "")
        if node.attributes.get("side_effect_mem"):
            dims, like = parameters.get(first), types.get(first)
        elif node.kind in ELEMENTWISE or node.kind == "Depend":
            dims, like = wanted.get(node.outputs[0]), node.types[0]
        else:
            continue
        if dims is None or like is None or not any(dims):
            continue
        for name in node.flat_inputs():
            type = types.get(name)
            if type is not None and type.shape == like.shape and name not in graph.parameters:
                wanted.setdefault(name, dims)
    return wanted


def computed_values(graph: Graph, wanted: Mapping[Name, Layout], are_summed: bool) -> dict[Name, Layout]:
    """Outputs with layouts -> the values that they are, before they wait for others; `are_summed`: the values that are added
    up to them, so that stages can add up their own share of each."""
    makers, found, todo = (
        {name: node for node in graph.nodes for name in node.outputs},
        dict[Name, Layout](),
        [*wanted.items()],
    )
    while todo:
        name, dims = todo.pop()
        node = makers.get(name)
        if node is not None and node.kind == "Depend" and isinstance(node.inputs[0], str):
            todo.append((node.inputs[0], dims))
        elif node is not None and node.kind == "AddN" and are_summed:
            todo += ((item, dims) for item in node.flat_inputs())
        else:
            found[name] = dims
    return found


def casts_of_outputs(graph: Graph, first: int) -> set[Name]:
    """Casts from which only outputs `first` onwards (gradients) are computed. Their partial sums may stay pending, so
    that the sum over microbatches is reduced once and in the wider type."""
    goes_out, others = set(graph.outputs[first:]), set(graph.outputs[:first])
    found = set()
    for node in reversed(graph.nodes):
        is_linear = node.kind in ("Cast", "Depend", "Add", "AddN") and not others & set(node.outputs)
        if is_linear and goes_out.issuperset(node.outputs):
            goes_out |= set(list(node.flat_inputs())[: 1 if node.kind == "Depend" else None]) - others
            found |= set(node.outputs) if node.kind == "Cast" else set()
        elif node.kind != "UpdateState":
            taken = set(node.flat_inputs())
            goes_out -= taken
            others |= taken
    return found


def num_uses(graph: Graph) -> Counter[Name]:
    """Count how often each value is an input or an output of the graph."""
    uses = Counter(graph.outputs)
    for node in graph.nodes:
        if node.kind != "UpdateState":  # it only waits for its inputs
            uses.update(node.flat_inputs())
    return uses


def summed_with(graph: Graph) -> dict[Name, tuple[Name, ...]]:
    """Values whose only use is as an item of a sum -> the other items of that sum, and of the sum that it is itself an
    item of."""
    uses = num_uses(graph)
    found: dict[Name, tuple[Name, ...]] = {}
    for node in reversed(graph.nodes):
        if node.kind == "AddN":
            items, further = tuple(node.flat_inputs()), found.get(node.outputs[0], ())
            for item in items:
                if uses[item] == 1:
                    found[item] = (*(other for other in items if other != item), *further)
    return found


def sums_of_products(graph: Graph, pinned: Mapping[str, Pin]) -> dict[Name, Pin]:
    """Sums of two products that nothing else uses and whose outputs a rule lays out alike, as in a parallel block, and these
    products -> that rule of the outputs: their partial sums may be added before they are communicated, once for both."""
    makers, uses = {node.outputs[0]: node for node in graph.nodes}, num_uses(graph)
    found: dict[Name, Pin] = {}
    for node in graph.nodes:
        items = [makers.get(name) for name in node.flat_inputs()] if node.kind in ("Add", "AddExt") else []
        products = [item for item in items if item is not None and item.kind in CONTRACTIONS]
        rules = [pin for item in products if (pin := pinned.get(item.path)) and pin.outputs and not pin.local]
        if len(rules) < 2 or any(uses[item.outputs[0]] > 1 for item in products):
            continue
        if rules[0].outputs == rules[1].outputs and products[0].types == products[1].types == node.types:
            found |= dict.fromkeys((node.outputs[0], *(item.outputs[0] for item in products)), rules[0])
    return found


def ids_by_row(graph: Graph) -> dict[Name, int]:
    """Segment ids of which row i of dim 0 begins at i * n -> n. MindSpore emits these for the gradient of a batched
    gather, in which each row has its own indices."""
    constants = {node.outputs[0]: node.value for node in graph.nodes if node.kind == "Constant"}
    found = {}
    for node in graph.nodes:
        if node.kind in ("Add", "AddExt") and node.types[0] is not None and node.types[0].shape:
            counts = [_row_length(constants.get(name), node.types[0].shape[0]) for name in node.flat_inputs()]
            if any(counts):
                found[node.outputs[0]] = max(counts)
    return found


def _row_length(value: Any, num_rows: int) -> int:
    """n if `value` is 0, n, 2 n, .. along dim 0 and that dim is not broadcast; else 0."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or not value.ndim or num_rows < 2:
        return 0
    if len(value) != value.size or len(value) != num_rows:
        return 0
    n = int(value.flat[1])
    return n if n > 0 and np.array_equal(value.ravel(), np.arange(num_rows) * n) else 0
