# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on CPUs, which have few kernels for it: values are stored in float32, and the results of operators are
rounded to the nearest bfloat16. This equals the computation of a device that accumulates products in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from mindspore import dtype as mstype
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir, type_to_type_id
from sporeloom.runtime.cpu.pyfunc import kinds_of

Array = NDArray[Any]
NARROW, WIDE = mind_ir.TensorProto.BFLOAT16, mind_ir.TensorProto.FLOAT
NARROW_ID, WIDE_ID = int(type_to_type_id(mstype.bfloat16)), int(type_to_type_id(mstype.float32))
"""MindSpore's numeric ids of the types, as inputs of operators."""
TYPE_INPUTS = {"Cast": 1, "SumExt": 3, "MeanExt": 3, "ZerosLikeExt": 1, "OnesLikeExt": 1}
"""Operators with an input for the type of the result -> index of that input."""
EXACT = frozenset(
    (
        *(
            "Load",
            "TensorMove",
            "Depend",
            "MakeTuple",
            "TupleGetItem",
            "UpdateState",
            "Assign",
            "ScatterNdUpdate",
            "Send",
            "Receive",
            "Broadcast",
        ),
        *(
            "AllGather",
            "AllReduce",
            "ReduceScatter",
            "AlltoAll",
            "AllToAll",
            "Reshape",
            "Transpose",
            "ExpandDims",
            "Squeeze",
            "Split",
            "SplitWithSize",
            "Concat",
        ),
        *(
            "Slice",
            "StridedSlice",
            "Gather",
            "EmbeddingLookup",
            "Neg",
            "ZerosLike",
            "ZerosLikeExt",
            "OnesLike",
            "OnesLikeExt",
            "Tile",
            "BroadcastTo",
        ),
    )
)
"""Operators that return their input values, or communicate sums that are rounded in transit: their results are not
rounded."""


class Widened:
    """The changes that `widen_bfloat16` made to a graph."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        """Names of the values that were bfloat16 in the partitioned graph."""
        self.parameters: set[str] = set()
        """Names of the Cell's parameters that were bfloat16."""
        self.rounded: Counter[str] = Counter()
        """Kinds of operators whose results are rounded -> how many of each."""


def widen_bfloat16(model: mind_ir.ModelProto) -> Widened:
    """Store all bfloat16 values of `model` in float32, in place, and round the results of operators.

    Raises:
        ConfigError: an operator is set to return bfloat16 in an unsupported way.
    """
    done, graph = Widened(), model.graph
    kinds = kinds_of(model)  # no message has been exchanged yet
    for node in graph.node:
        if any(tensor.data_type == NARROW for tensor in _tensors(node)):
            done.values.add(node.output[0])
    narrow_parameters = [p.name for p in graph.parameter if p.data_type == NARROW]
    done.parameters = {name.rpartition(":")[2] for name in narrow_parameters}
    done.values |= {*narrow_parameters, *(i.name for i in graph.input if i.tensor[0].data_type == NARROW)}
    if not done.values:
        return done
    to_round = [
        node
        for node in graph.node
        if node.output[0] in done.values
        and node.op_type != "Constant"
        and kinds.get(node.op_type, node.op_type) not in EXACT
    ]
    wide, narrow = _type_constant("sporeloom_float32", WIDE_ID), _type_constant("sporeloom_bfloat16", NARROW_ID)
    _tell_float32(model, kinds, done.values, wide.output[0])
    given = [each.tensor[0] for each in graph.input]
    for tensor in (*graph.parameter, *given, *(t for node in graph.node for t in _tensors(node))):
        if tensor.data_type == NARROW:
            tensor.data_type = WIDE
            tensor.raw_data = from_bits(tensor.raw_data)
    if not to_round:  # a pipeline stage that only passes values on
        return done
    cast = next((p for p in model.primitives if p.op_type == "Cast"), None) or model.primitives.add(
        name="sporeloom_cast", op_type="Cast", prim_type=mind_ir.PrimitiveProto.PRIMITIVE
    )
    after: dict[str, list[mind_ir.NodeProto]] = {}
    for node in to_round:
        kind = kinds.get(node.op_type, node.op_type)
        if len(list(_tensors(node))) > 1:
            raise ConfigError(
                f"compute_dtype bfloat16: {kind} gives several results, which CPU processes do not round; use float32 or "
                "float16 here"
            )
        done.rounded[kind] += 1
        after[node.output[0]] = _rounding(node, f"REF::{cast.name}", narrow.output[0], wide.output[0])
    _put_behind(graph, after, [wide, narrow])
    return done


def in_bfloat16(run: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`run`, a message, in bfloat16: it sends half the bytes and rounds after each addition."""

    def narrow(x: Array) -> Array:
        return run(x.astype(ml_dtypes.bfloat16)).astype(np.float32)

    return narrow


def from_bits(raw: bytes) -> bytes:
    """Convert bytes of bfloat16 to bytes of float32."""
    return np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32).tobytes()


def _tensors(node: mind_ir.NodeProto) -> Iterator[Any]:
    """All descriptions of a node's result types."""
    stack = [attribute for attribute in node.attribute if attribute.name in ("shape", "value")]
    while stack:
        attribute = stack.pop()
        yield from attribute.tensors
        stack += attribute.values


def _tell_float32(model: mind_ir.ModelProto, kinds: dict[str, str], narrow: set[str], wide: str) -> None:
    """Make operators whose result type is a bfloat16 input return float32."""
    told = {
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Constant"
        and any(
            a.name == "value" and a.type == mind_ir.AttributeProto.INT64 and a.i == NARROW_ID for a in node.attribute
        )
    }
    for node in model.graph.node:
        kind = kinds.get(node.op_type, node.op_type)
        for place, name in enumerate(node.input) if node.output[0] in narrow else ():
            if name not in told:
                continue
            if TYPE_INPUTS.get(kind) != place:
                raise ConfigError(
                    f"compute_dtype bfloat16: {kind} gives it as its input {place} says, which CPU processes do not support; "
                    "use float32 or float16 here"
                )
            node.input[place] = wide


def _type_constant(name: str, number: int) -> mind_ir.NodeProto:
    node = mind_ir.NodeProto(output=[name], name=name, op_type="Constant")
    node.attribute.add(name="value", type=mind_ir.AttributeProto.INT64, i=number)
    return node


def _rounding(node: mind_ir.NodeProto, cast: str, narrow: str, wide: str) -> list[mind_ir.NodeProto]:
    """Nodes that round to bfloat16, to nearest even, and convert back to float32."""
    made, source = [], node.output[0]
    for name, of, dtype in ((f"{source}.bfloat16", narrow, NARROW), (f"{source}.rounded", wide, WIDE)):
        made.append(mind_ir.NodeProto(input=[source, of], output=[name], name=name, op_type=cast, domain=node.domain))
        shape = made[-1].attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
        shape.tensors.add(dims=next(_tensors(node)).dims, data_type=dtype)
        source = name
    return made


def _put_behind(
    graph: mind_ir.GraphProto, after: dict[str, list[mind_ir.NodeProto]], first: list[mind_ir.NodeProto]
) -> None:
    """Insert nodes after the values that they read, and make all users read their results instead."""
    renamed = {name: nodes[-1].output[0] for name, nodes in after.items()}
    ordered = list(first)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        ordered.append(mind_ir.NodeProto.FromString(node.SerializeToString()))
        ordered += after.get(node.output[0], [])
    for output in graph.output:
        output.name = renamed.get(output.name, output.name)
    del graph.node[:]
    graph.node.extend(ordered)
