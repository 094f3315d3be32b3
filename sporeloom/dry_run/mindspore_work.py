# SPDX-License-Identifier: Apache-2.0
"""Read a rank's compiled graph: every collective with its bytes, every product with its FLOPs, times it is called."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sporeloom.dry_run.work import FLASH_PRODUCTS, NAMES, PRODUCTS, Work, attention_flops, product_flops
from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.inlining import calls_of_functions
from sporeloom.runtime.cpu.lowering import attributes, names_group, output_of
from sporeloom.runtime.cpu.partition import PartitionedGraph

_SIZES = {"FLOAT": 4, "FLOAT16": 2, "BFLOAT16": 2, "INT32": 4, "INT64": 8, "BOOL": 1, "DOUBLE": 8, "INT8": 1}


def read_work(graph: PartitionedGraph, copies: int = 1) -> Work:
    """What `graph` does in a step, whose network was kept as functions that are called for each copy of each microbatch. The
    gradients of copies are added up before ranks exchange them."""
    work = Work()
    primitives = {p.name: p for p in graph.model.primitives}
    for body, calls, backward in _bodies(graph.model):
        shapes = _shapes(body, graph.model)
        for node in body.node:
            primitive = primitives.get(node.op_type.removeprefix("REF::"))
            if primitive is None:
                continue
            kind, group = primitive.op_type, _group(primitive)
            in_network = body is not graph.model.graph
            phase = _phase(node, primitive, backward, in_network)
            times = calls // copies if in_network and phase == "optimizer" else calls
            if group is not None and len(graph.groups[group]) > 1:
                size = _bytes(node) * (len(graph.groups[group]) if kind == "ReduceScatter" else 1)
                work.add_message(kind, phase, group, graph.groups[group], size, times)
            elif kind == "MoveTo" and _target(body, node) == "CPU":
                work.moved_bytes += times * _bytes(node)
            elif kind in PRODUCTS:
                work.in_float32 |= output_of(node).data_type == mind_ir.TensorProto.FLOAT
                first, second = (shapes.get(name, ()) for name in node.input[:2])
                work.flops[phase] += times * product_flops(kind, tuple(output_of(node).dims), first, second)
            elif kind in FLASH_PRODUCTS:
                work.flops[phase] += times * attention_flops(kind, shapes[node.input[0]], shapes[node.input[1]])
            elif kind not in NAMES:
                work.passed_bytes += times * _result_bytes(node)
    return work


def _bodies(model: mind_ir.ModelProto) -> Iterator[tuple[mind_ir.GraphProto, int, bool]]:
    """Each graph, how often it is called, and whether it is a backward pass, which MindSpore names with ◂."""
    yield model.graph, 1, False
    calls = calls_of_functions(model)
    for function in model.functions:
        yield function, calls[function.name], "◂" in function.name


def _shapes(body: mind_ir.GraphProto, model: mind_ir.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor a graph knows by name."""
    shapes: dict[str, tuple[int, ...]] = {p.name: tuple(p.dims) for p in model.graph.parameter}
    for value in body.input:
        if value.tensor:
            shapes[value.name] = tuple(value.tensor[0].dims)
    for node in body.node:
        for a in node.attribute:
            if a.name == "shape" and a.tensors:
                shapes[node.output[0]] = tuple(a.tensors[0].dims)
    return shapes


def _phase(node: mind_ir.NodeProto, primitive: mind_ir.PrimitiveProto, backward: bool, in_network: bool) -> str:
    kind, name = primitive.op_type, primitive.instance_name
    point_to_point = kind in ("Send", "Receive")
    if "mirror" in name or "parallel_optimizer" in name or (not in_network and not point_to_point):
        return "optimizer"
    if node.domain.startswith("Gradients"):
        return "backward"
    return "recompute" if backward and node.domain.startswith("recompute_") else "forward"


def _group(primitive: mind_ir.PrimitiveProto) -> str | None:
    return attributes(primitive)["group"] if any(names_group(a) for a in primitive.attribute) else None


def _target(body: mind_ir.GraphProto, move: mind_ir.NodeProto) -> str:
    """Where a tensor is moved to."""
    constant = next(node for node in body.node if node.output[0] == move.input[1])
    return next(a for a in constant.attribute if a.name == "value").s.decode()


def _result_bytes(node: mind_ir.NodeProto) -> int:
    """Of all that a node gives."""
    tensors = [t for a in node.attribute if a.name == "shape" for t in a.tensors]
    return sum(math.prod(t.dims) * _SIZES.get(mind_ir.TensorProto.DataType.Name(t.data_type), 0) for t in tensors)


def _bytes(node: mind_ir.NodeProto) -> int:
    out = output_of(node)
    return math.prod(out.dims) * _SIZES[mind_ir.TensorProto.DataType.Name(out.data_type)]
