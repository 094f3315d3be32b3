# SPDX-License-Identifier: Apache-2.0
"""Read a rank's compiled graph: every collective with its bytes, every product with its FLOPs, times it is called."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sporeloom.dry_run.rank_report import Collective
from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.inlining import calls_of_functions
from sporeloom.runtime.cpu.lowering import attributes, names_group, output_of
from sporeloom.runtime.cpu.partition import PartitionedGraph

_SIZES = {"FLOAT": 4, "FLOAT16": 2, "BFLOAT16": 2, "INT32": 4, "INT64": 8, "BOOL": 1, "DOUBLE": 8, "INT8": 1}
PRODUCTS = ("MatMul", "BatchMatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
NAMES = (
    "Reshape",
    "Depend",
    "Load",
    "UpdateState",
    "MakeTuple",
    "TupleGetItem",
    "ExpandDims",
    "Squeeze",
    "StopGradient",
)
"""Operators that do not touch what a tensor holds."""
FLASH_PRODUCTS = {"FlashAttentionScore": 2, "FlashAttentionScoreGrad": 5}
"""Products of all queries with all keys: the gradient's kernel makes the scores again."""


@dataclass(frozen=True)
class Work:
    """What a graph does in one step."""

    collectives: list[Collective]
    flops: dict[str, int]
    """Of matrix products, by phase."""
    moved_bytes: int
    """To the host, and as many back."""
    passed_bytes: int
    """Of the results of all operators but matrix products and what only names a tensor anew."""
    in_float32: bool
    """Whether a matrix product is."""


def read_work(graph: PartitionedGraph, copies: int = 1) -> Work:
    """What `graph` does in a step, whose network was kept as functions that are called for each copy of each microbatch. The
    gradients of copies are added up before ranks exchange them."""
    collectives: Counter[tuple[str, str, str, int]] = Counter()
    flops: dict[str, int] = defaultdict(int)
    moved = passed = 0
    product_types = set[int]()
    primitives = {p.name: p for p in graph.model.primitives}
    for body, calls, backward in _bodies(graph.model):
        shapes = _shapes(body, graph.model)
        for node in body.node:
            primitive = primitives.get(node.op_type.removeprefix("REF::"))
            if primitive is None:
                continue
            group = _group(primitive)
            in_network = body is not graph.model.graph
            phase = _phase(node, primitive, backward, in_network)
            times = calls // copies if in_network and phase == "optimizer" else calls
            if group is not None and len(graph.groups[group]) > 1:
                kind, size = primitive.op_type, _bytes(node)
                if kind == "ReduceScatter":
                    size *= len(graph.groups[group])
                collectives[kind, phase, group, size] += times
            elif primitive.op_type == "MoveTo" and _target(body, node) == "CPU":
                moved += times * _bytes(node)
            elif primitive.op_type in PRODUCTS:
                product_types.add(output_of(node).data_type)
                flops[phase] += times * _flops(primitive.op_type, node, shapes)
            elif primitive.op_type in FLASH_PRODUCTS:
                query, keys = shapes[node.input[0]], shapes[node.input[1]]  # (B, H, T, D/H), (B, KV, keys, D/H)
                flops[phase] += times * FLASH_PRODUCTS[primitive.op_type] * 2 * math.prod(query) * keys[2]
            elif primitive.op_type not in NAMES:
                passed += times * _result_bytes(node)
    found = [Collective(k, p, g, count, size) for (k, p, g, size), count in sorted(collectives.items())]
    return Work(found, dict(flops), moved, passed, mind_ir.TensorProto.FLOAT in product_types)


def _flops(kind: str, node: mind_ir.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of a product. A convolution and its gradients multiply each entry of the smaller picture with each of the filter."""
    out = tuple(output_of(node).dims)
    if not kind.startswith("Conv2D"):
        return 2 * math.prod(out) * (math.prod(shapes[node.input[0]]) // math.prod(out[:-1]))
    first, second = (shapes.get(name, ()) for name in node.input[:2])
    if kind == "Conv2D":  # picture, filter -> (N, C, H, W)
        return 2 * math.prod(out) * math.prod(second[1:])
    if kind == "Conv2DBackpropInput":  # gradient (N, C, H, W), filter -> picture
        return 2 * math.prod(first) * math.prod(second[1:])
    return 2 * math.prod(first) * math.prod(out[1:])  # gradient, picture -> filter


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
