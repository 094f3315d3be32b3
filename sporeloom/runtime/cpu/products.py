# SPDX-License-Identifier: Apache-2.0
"""Products of the compiled kernels in place of MindSpore's, which sum some rows of a batch in another order: with oneDNN the
last ones of a matrix, and those at which threads part a batch."""

from __future__ import annotations

from mindspore import nn

from sporeloom.core.by_identity import ByIdentity
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.flash import constant_of, drop_unused
from sporeloom.runtime.places import place_of

KINDS = ("MatMul", "BatchMatMul")
NAMES = {
    (False, False): "product_nn",
    (False, True): "product_nt",
    (True, False): "product_tn",
    (True, True): "product_tt",
}
"""(transpose_a, transpose_b) -> the function of any_size.h."""

PRODUCT_LIBRARIES = ByIdentity[nn.Cell, str]()
"""Paths of the libraries that networks' products are computed with."""


def exchange_products(model: mind_ir.ModelProto, library: str) -> None:
    """Replace each product of float32 of a graph, in place, by one of the library.

    Raises:
        AssertionError: a product is of another type.
    """
    kinds = {f"REF::{p.name}": p.op_type for p in model.primitives}
    nodes = {node.output[0]: node for node in model.graph.node}
    for node in model.graph.node:
        if kinds.get(node.op_type, node.op_type) not in KINDS:
            continue
        (shape,) = next(attribute for attribute in node.attribute if attribute.name == "shape").tensors
        assert shape.data_type == mind_ir.TensorProto.FLOAT, (
            f"{place_of(node.domain)}: a product of type {shape.data_type}"
        )
        lies = tuple(bool(constant_of(nodes[name]).i) for name in node.input[2:4])
        node.op_type = _reference(model, f"{library}:{NAMES[lies[0], lies[1]]}")
        del node.input[2:4]
    drop_unused(model)


def _reference(model: mind_ir.ModelProto, function: str) -> str:
    """The reference to the primitive that calls a compiled function, which is added where it is not there yet."""
    name = f"sporeloom_{function.rpartition(':')[2]}"
    if all(primitive.name != name for primitive in model.primitives):
        primitive, proto = model.primitives.add(name=name, op_type="Custom"), mind_ir.AttributeProto
        for key, value in {"func_type": "aot", "func_name": function, "uniq_name": name, "imply_path": ""}.items():
            primitive.attribute.add(name=key, type=proto.STRING, s=value.encode())
        for key in ("multi_output", "autodiff"):
            primitive.attribute.add(name=key, type=proto.BOOL, i=0)
    return f"REF::{name}"
