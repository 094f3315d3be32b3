# SPDX-License-Identifier: Apache-2.0
"""Finds the first operator that returned a non-finite number: CPU processes inspect the result of every node of a graph."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
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
        """Insert an inspecting node after each node of a lowered graph, in place. Users of a node wait for its
        inspection, so that the first inspection that finds a non-finite number is that of the node which produced it."""
        kinds = {f"REF::{p.name}": p.op_type for p in model.primitives}
        producers = {node.output[0]: node for node in model.graph.node}
        graph, looks, renamed = model.graph, list[mind_ir.NodeProto](), dict[str, str]()
        for node in graph.node:
            kind = kinds.get(node.op_type, node.op_type)
            shape = next((a for a in node.attribute if a.name == "shape" and len(a.tensors) == 1), None)
            dims = shape.tensors[0].dims if shape else ()
            if not dims or shape is None or shape.tensors[0].data_type not in FLOATS or kind in NO_VALUES:
                continue
            name = f"{node.output[0]}.look"
            look = mind_ir.NodeProto(input=[node.output[0]], output=[name], name=name, domain=node.domain)
            if kind == "TupleGetItem" and node.input[0] in producers:
                kind = kinds.get(producers[node.input[0]].op_type, kind)
            kind = "FlashAttention" if kind == "Custom" else kind  # all others are messages
            what = FROM_OTHERS if node.output[0] in messages else f"{kind} of {place_of(node.domain)}"
            look.op_type = add_pyfunc_primitive(model, self._look(what))
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
