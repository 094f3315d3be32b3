# SPDX-License-Identifier: Apache-2.0
"""Finds the first operator that returned a non-finite number: CPU processes inspect the result of every node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive, kinds_of
from sporeloom.runtime.places import place_of

FLOATS = (mind_ir.TensorProto.FLOAT, mind_ir.TensorProto.FLOAT16, mind_ir.TensorProto.DOUBLE)
NO_VALUES = ("Load", "Depend", "UpdateState", "MakeTuple", "Assign", "AssignAdd", "AssignSub")
"""Nodes that compute nothing, or return parameters."""
FROM_OTHERS = ""


class NanFinder:
    """Inspects the graphs of one rank."""

    def __init__(self) -> None:
        self.first: str | None = None
        """Such as `Exp of model.layers.0.mlp, forward`, whose inputs were all finite; empty if received from another
        rank."""

    def watch(self, model: mind_ir.ModelProto, messages: Container[str]) -> None:
        """Inspect each node of a lowered graph, in place. The first inspection that finds a non-finite number is that of the
        node which produced it."""
        inspect_nodes(model, messages, lambda _, what: self._look(what))

    def receive(self, array: NDArray[Any]) -> None:
        """Inspect an array that another pipeline stage sent."""
        if self.first is None and array.dtype.kind == "f" and not np.isfinite(array).all():
            self.first = FROM_OTHERS

    def _look(self, what: str) -> Any:
        def look(x: NDArray[Any]) -> NDArray[Any]:
            if self.first is None and not np.isfinite(x).all():
                self.first = what
            return x.copy()

        return look


def inspect_nodes(
    model: mind_ir.ModelProto, messages: Container[str], make: Callable[[str, str], Callable[[Any], Any]]
) -> None:
    """Insert an inspecting node after each node of a lowered graph that returns one tensor of floats, in place. Users of a
    node wait for its inspection.

    Args:
        messages: names of the nodes that receive messages.
        make: (name of a node, kind and operator, or FROM_OTHERS for a message) -> function that copies its argument. It is
            called in topological order.
    """
    kinds = kinds_of(model)
    producers = {node.output[0]: node for node in model.graph.node}
    graph, looks, renamed = model.graph, list[mind_ir.NodeProto](), dict[str, str]()
    updates = _updates_of_parameters(model)
    for node in graph.node:
        kind = kinds.get(node.op_type, node.op_type)
        shape = next((a for a in node.attribute if a.name == "shape" and len(a.tensors) == 1), None)
        dims = shape.tensors[0].dims if shape else ()
        if not dims or shape is None or shape.tensors[0].data_type not in FLOATS or kind in NO_VALUES:
            continue
        if node.output[0] in updates or (kind == "TupleGetItem" and node.input[0] in updates):
            continue
        name = f"{node.output[0]}.look"
        look = mind_ir.NodeProto(input=[node.output[0]], output=[name], name=name, domain=node.domain)
        if kind == "TupleGetItem" and node.input[0] in producers:
            kind = kinds.get(producers[node.input[0]].op_type, kind)
        what = FROM_OTHERS if node.output[0] in messages else f"{kind} of {place_of(node.domain)}"
        look.op_type = add_pyfunc_primitive(model, make(node.output[0], what))
        look.attribute.append(shape)
        looks.append(look)
        renamed[node.output[0]] = name
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    after = {look.input[0]: look for look in looks}
    ordered = []
    for node in graph.node:
        ordered.append(mind_ir.NodeProto.FromString(node.SerializeToString()))
        ordered += [after[node.output[0]]] if node.output[0] in after else []
    del graph.node[:]
    graph.node.extend(ordered)


def _updates_of_parameters(model: mind_ir.ModelProto) -> set[str]:
    """Results of operators that update parameters in place, such as AdamWeightDecay. Their kernels write the parameters, and
    leave the memory of these results as it is."""
    updating = {
        f"REF::{primitive.name}"
        for primitive in model.primitives
        if any(attribute.name == "side_effect_mem" and attribute.i for attribute in primitive.attribute)
    }
    parameters = {parameter.name for parameter in model.graph.parameter}
    return {node.output[0] for node in model.graph.node if node.op_type in updating and parameters & set(node.input)}
