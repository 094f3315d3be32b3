# SPDX-License-Identifier: Apache-2.0
"""The collectives in a rank's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sporeloom.mindspore_compat.names import mind_ir


def collective_nodes(model: mind_ir.ModelProto) -> Iterator[tuple[mind_ir.NodeProto, mind_ir.PrimitiveProto]]:
    """Every communicating node with its primitive, in graph order."""
    primitives = {p.name: p for p in model.primitives if any(names_group(a) for a in p.attribute)}
    for graph in (model.graph, *model.functions):
        for node in graph.node:
            primitive = primitives.get(node.op_type.removeprefix("REF::"))
            if primitive is not None:
                yield node, primitive


def names_group(attribute: mind_ir.AttributeProto) -> bool:
    """Whether an attribute names a communication group; the `group` of a convolution is a number."""
    return attribute.name == "group" and attribute.type == mind_ir.AttributeProto.STRING


def attributes(primitive: mind_ir.PrimitiveProto) -> dict[str, Any]:
    """Attributes of a primitive by name, as numbers or texts."""
    values: dict[str, Any] = {}
    for a in primitive.attribute:
        values[a.name] = a.s.decode() if a.type == mind_ir.AttributeProto.STRING else a.i
    return values


def output_of(node: mind_ir.NodeProto) -> mind_ir.TensorProto:
    """Shape and type of a node's result."""
    return next(a for a in node.attribute if a.name == "shape").tensors[0]
