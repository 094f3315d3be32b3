# SPDX-License-Identifier: Apache-2.0
"""Operators that are decomposed into simpler ones before sharding, so that their sums over sharded dims become partial
sums like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sporeloom.partition.graph import Name, Node, TensorType
from sporeloom.strategy.layout import Shape


class Builder(Protocol):
    """Emits operators on global values; each is sharded when it is emitted."""

    def type_of(self, name: Name) -> TensorType: ...

    def value_of(self, name: Name) -> Any:
        """Return the value of a constant.

        Raises:
            PartitionError: the graph computes it.
        """
        ...

    def put(self, kind: str, inputs: Sequence[Any], shape: Shape, dtype: str = "") -> Name:
        """Emit an operator with one output, whose element type is `dtype` or else that of the first input. An input
        that is not a name becomes a constant, and a float becomes a tensor."""
        ...

    def wait(self, result: Name, other: Name) -> Name:
        """Emit a dependency: `result`, available once `other` has been computed."""
        ...

    def update(self, parameter: Name, value: Name, monad: Name, result: Name) -> Name:
        """Assign a parameter. Returns `result` with a dependency on the assignment."""
        ...

    def drawn(self, node: Node, inputs: Sequence[Name]) -> tuple[Name, ...]:
        """Emit an operator that draws random numbers, which are the same on all ranks."""
        ...


ADDED_UP = ("float32", "float64")
"""Element types in which the batch statistics are computed by decomposition; for the others MindSpore's kernels
accumulate in float32."""
Decomposition = Callable[[Builder, Node], tuple[Name, ...] | None]
"""Names of the results, one for each output; None if the operator is not decomposed."""


def _dims_of_channel(num_dims: int) -> tuple[int, ...]:
    return tuple(dim for dim in range(num_dims) if dim != 1)


def _per_channel(b: Builder, x: Name, like: Name) -> Name:
    """Reshape a vector of shape (channels,) to (1, channels, 1, ..), the shape of statistics taken with kept dims."""
    shape = b.type_of(like).shape
    wide = tuple(size if dim == 1 else 1 for dim, size in enumerate(shape))
    return b.put("Reshape", [x, wide], wide)


def _mean(b: Builder, x: Name) -> Name:
    shape = b.type_of(x).shape
    wide = tuple(size if dim == 1 else 1 for dim, size in enumerate(shape))
    return b.put("ReduceMean", [x, _dims_of_channel(len(shape)), True], wide)


def batch_norm(b: Builder, node: Node) -> tuple[Name, ...] | None:
    """Batch normalization in training, with the mean and variance of the global batch. It updates the moving statistics.

    The values saved for the backward pass are the mean and the reciprocal of the standard deviation.
    """
    x, scale, shift, moving_mean, moving_variance, is_training, epsilon, momentum, *_, monad = node.flat_inputs()
    if not b.value_of(is_training) or b.type_of(x).dtype not in ADDED_UP:
        return None
    shape = b.type_of(x).shape
    channels = (shape[1],)
    # Parameters are read in place, not copied: an update before this operator must have finished when they are read.
    own_scale, own_shift, old_mean, old_variance = (
        b.wait(parameter, monad) for parameter in (scale, shift, moving_mean, moving_variance)
    )
    mean = _mean(b, x)
    centred = b.put("Sub", [x, mean], shape)
    variance = _mean(b, b.put("Square", [centred], shape))
    wide = b.type_of(variance).shape
    inverse = b.put("Rsqrt", [b.put("Add", [variance, float(b.value_of(epsilon))], wide)], wide)
    normal = b.put("Mul", [centred, inverse], shape)
    scaled = b.put("Mul", [normal, _per_channel(b, own_scale, x)], shape)
    y = b.put("Add", [scaled, _per_channel(b, own_shift, x)], shape)
    own_mean, own_variance, own_inverse = (b.put("Reshape", [v, channels], channels) for v in (mean, variance, inverse))
    count, share = math.prod(shape) // shape[1], float(b.value_of(momentum))
    unbiased = b.put("Mul", [own_variance, count / max(count - 1, 1)], channels)
    for parameter, old, found in ((moving_mean, old_mean, own_mean), (moving_variance, old_variance, unbiased)):
        kept = b.put("Mul", [old, 1.0 - share], channels)
        new = b.put("Add", [kept, b.put("Mul", [found, share], channels)], channels)
        y = b.update(parameter, new, monad, y)
    return y, own_mean, own_variance, own_mean, own_inverse


def batch_norm_grad(b: Builder, node: Node) -> tuple[Name, ...] | None:
    """Gradients of batch normalization with respect to x, scale and shift."""
    dy, x, scale, mean, inverse, _, is_training, *_ = node.flat_inputs()
    if not b.value_of(is_training) or b.type_of(x).dtype not in ADDED_UP:
        return None
    shape = b.type_of(x).shape
    channels, dims = (shape[1],), _dims_of_channel(len(shape))
    wide_inverse = _per_channel(b, inverse, x)
    normal = b.put("Mul", [b.put("Sub", [x, _per_channel(b, mean, x)], shape), wide_inverse], shape)
    products = b.put("Mul", [dy, normal], shape)
    d_scale = b.put("ReduceSum", [products, dims, False, False], channels)
    d_shift = b.put("ReduceSum", [dy, dims, False, False], channels)
    count = math.prod(shape) // shape[1]
    along_normal = b.put("Mul", [normal, _per_channel(b, b.put("Mul", [d_scale, 1 / count], channels), x)], shape)
    rest = b.put("Sub", [dy, _per_channel(b, b.put("Mul", [d_shift, 1 / count], channels), x)], shape)
    d_normal = b.put("Sub", [rest, along_normal], shape)
    own_scale = b.wait(scale, dy)  # after an update that the forward operator has waited for
    factor = b.put("Mul", [_per_channel(b, own_scale, x), wide_inverse], b.type_of(wide_inverse).shape)
    dx = b.put("Mul", [d_normal, factor], shape)
    # The scale is read in place, not copied: it may be updated by its gradient only after dx has been computed.
    return dx, b.wait(d_scale, dx), d_shift


def dropout(b: Builder, node: Node) -> tuple[Name, ...]:
    """Dropout: x times a mask that is drawn for the global tensor."""
    x, keep, *seeds = node.flat_inputs()
    shape, dtype = b.type_of(x).shape, b.type_of(x).dtype
    ones = b.put("BroadcastTo", [1.0, shape], shape, dtype)
    _, mask = b.drawn(node, [ones, keep, *seeds])
    return b.put("Mul", [b.put("Mul", [x, mask], shape), 1.0 / float(b.value_of(keep))], shape), mask


def dropout_grad(b: Builder, node: Node) -> tuple[Name, ...] | None:
    """The gradient of what was kept, where the probability to keep it is known."""
    keep = node.attributes.get("keep_prob")
    if not keep:
        return None
    dy, mask = node.flat_inputs()
    shape = b.type_of(dy).shape
    return (b.put("Mul", [b.put("Mul", [dy, mask], shape), 1.0 / float(keep)], shape),)


DECOMPOSITIONS: dict[str, Decomposition] = {
    "BatchNorm": batch_norm,
    "BatchNormGrad": batch_norm_grad,
    "Dropout": dropout,
    "DropoutGrad": dropout_grad,
}
