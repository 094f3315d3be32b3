# SPDX-License-Identifier: Apache-2.0
"""FlashAttentionScore and its gradient on CPUs, which have no such kernel: replaced by NumPy arithmetic in float32. For
proofs on small models: the full score matrix is computed, once for each output of a node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core import elementary
from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.places import place_of

Array = NDArray[Any]
FORWARD, BACKWARD = "FlashAttentionScore", "FlashAttentionScoreGrad"
INPUTS = {FORWARD: ((0, 1, 2, 6), 12), BACKWARD: ((0, 1, 2, 7, 3), 17)}
"""Indices of the inputs query, key, value, mask and output gradient, and of the scale. Source: gen_ops_prim.py of
MindSpore 2.9 and the node of its gradient."""
NONE = {FORWARD: (3, 4, 5, 7, 8, 9), BACKWARD: (4, 5, 6, 12, 13, 14)}
"""Indices of inputs that must be absent."""
BNSD, FULL_MASK, ALL_POSITIONS = 1, 0, 2**31 - 1
"""MindSpore's numbers of the input layout (B, H, T, D), of the mode with a full mask, and of no window."""


def exchange_flash_attention(model: mind_ir.ModelProto) -> None:
    """Replace the uses of outputs of FlashAttention nodes, in place, and remove the nodes.

    Raises:
        ConfigError: a node computes what the functions here do not.
    """
    kinds = {f"REF::{p.name}": p.op_type for p in model.primitives if p.op_type in INPUTS}
    if not kinds:
        return
    nodes = {node.output[0]: node for node in model.graph.node}
    items = {f"REF::{p.name}" for p in model.primitives if p.op_type == "TupleGetItem"} | {"TupleGetItem"}
    for node in model.graph.node:
        source = nodes.get(node.input[0]) if node.op_type in items else None
        if source is None or source.op_type not in kinds:
            continue
        kind, which = kinds[source.op_type], constant_of(nodes[node.input[1]]).i
        places, scale = INPUTS[kind]
        _check(kind, source, nodes)
        run = _function(kind, which, constant_of(nodes[source.input[scale]]).f)
        if run is None:  # the gradient of an input that is not given
            continue
        node.op_type = add_pyfunc_primitive(model, run, len(places), name="FlashAttention")
        node.input[:] = [source.input[place] for place in places]
    drop_unused(model)


def _check(kind: str, node: mind_ir.NodeProto, nodes: Mapping[str, mind_ir.NodeProto]) -> None:
    (*_, mask), scale = INPUTS[kind][0][:4], INPUTS[kind][1]
    keep_prob, layout, mode = (constant_of(nodes[node.input[scale + i]]) for i in (-1, 4, 5))
    windows = (constant_of(nodes[node.input[scale + i]]).i for i in (1, 2))
    is_plain = keep_prob.f == 1.0 and (layout.i, mode.i) == (BNSD, FULL_MASK) and min(windows) == ALL_POSITIONS
    absent = [_is_none(nodes.get(node.input[i])) for i in (*NONE[kind], mask)]
    if not is_plain or not all(absent[:-1]) or absent[-1]:
        raise ConfigError(
            f"{kind} of {place_of(node.domain)}: CPU processes compute it for inputs (B, H, T, D), input_layout BNSD, with "
            "an attn_mask of all pairs of positions (sparse_mode 0), without dropout, bias, windows and lengths; use other "
            "operators, or run it on devices"
        )


def _is_none(node: mind_ir.NodeProto | None) -> bool:
    return node is not None and node.op_type == "Constant" and constant_of(node).type == mind_ir.AttributeProto.NONE


def attention(q: Array, k: Array, v: Array, hidden: Array, scale: float) -> Array:
    """Softmax(scale Q K^T) V where `hidden` is 0. q: (B, H, T, D), k, v: (B, KV, S, D), hidden: (B or 1, 1, T, S)."""
    y = _probs(q, k, hidden, scale) @ _grouped(v, v)
    return np.ascontiguousarray(y.reshape(q.shape).astype(q.dtype))


def statistics(q: Array, k: Array, v: Array, hidden: Array, scale: float, of: int) -> Array:
    """Results of the softmax that the kernel keeps for its gradient, (B, H, T, 8): 8 times the maximum of a row (`of` 0),
    or the sum of the exponentials of its differences from that (`of` 1); a placeholder (`of` 2). The gradient here needs
    none of them."""
    if of == 2:
        return np.zeros(1, q.dtype)
    scores = _scores(q, k, hidden, scale)
    maximum = scores.max(-1, keepdims=True)
    rows = maximum if of == 0 else elementary.exp(scores - maximum).sum(-1, keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(rows.reshape(*q.shape[:3], 1), (*q.shape[:3], 8)), np.float32)


def attention_gradient(q: Array, k: Array, v: Array, hidden: Array, dy: Array, scale: float, of: int) -> Array:
    """Gradient of `attention` with respect to q, k or v (`of` 0, 1, 2) from that of its result, (B, H, T, D)."""
    probs, dy = _probs(q, k, hidden, scale), _grouped(dy, k)
    if of == 2:
        gradient = (probs.swapaxes(-1, -2) @ dy).sum(2)
    else:
        dprobs = dy @ _grouped(v, v).swapaxes(-1, -2)
        dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) * scale
        gradient = dscores @ _grouped(k, k) if of == 0 else (dscores.swapaxes(-1, -2) @ _grouped(q, k)).sum(2)
    like = (q, k, v)[of]
    return np.ascontiguousarray(gradient.reshape(like.shape).astype(like.dtype))


def _function(kind: str, which: int, scale: float) -> Callable[..., Array] | None:
    if kind == FORWARD:
        run = attention if which == 3 else functools.partial(statistics, of=which)
        return functools.partial(run, scale=scale)
    return functools.partial(attention_gradient, scale=scale, of=which) if which < 3 else None


def _grouped(x: Array, k: Array) -> Array:
    """(B, H, T, D) -> (B, KV, H/KV, T, D), float32: query heads grouped by the key and value heads that they share."""
    batch, heads, length, width = x.shape
    return x.astype(np.float32).reshape(batch, k.shape[1], heads // k.shape[1], length, width)


def _scores(q: Array, k: Array, hidden: Array, scale: float) -> Array:
    """Scaled scores, -inf where `hidden` is 1: (B, KV, H/KV, T, S)."""
    scores = _grouped(q, k) @ _grouped(k, k).swapaxes(-1, -2) * np.float32(scale)
    return np.where(hidden[:, :, None] != 0, np.float32(-np.inf), scores)


def _probs(q: Array, k: Array, hidden: Array, scale: float) -> Array:
    """Attention probabilities, (B, KV, H/KV, T, S)."""
    scores = _scores(q, k, hidden, scale)
    weights = elementary.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def constant_of(node: mind_ir.NodeProto) -> mind_ir.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == "value")


def drop_unused(model: mind_ir.ModelProto) -> None:
    nodes = {node.output[0]: node for node in model.graph.node}
    needed, stack = set[str](), [output.name for output in model.graph.output]
    while stack:
        name = stack.pop()
        if name in nodes and name not in needed:
            needed.add(name)
            stack += nodes[name].input
    kept = [mind_ir.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node if n.output[0] in needed]
    del model.graph.node[:]
    model.graph.node.extend(kept)
