# SPDX-License-Identifier: Apache-2.0
"""As `kinds`: images, indices, losses. A sample that ends with a dict gives attributes of the primitive."""

import functools

import flash_kinds
import numpy as np
from kinds import with_dim


def around(x, kernel):
    """As many zeros around the images as keep their size."""
    kh, kw = kernel
    return np.pad(x, ((0, 0), (0, 0), (kh // 2, (kh - 1) // 2), (kw // 2, (kw - 1) // 2)))


def by_group(x, group):
    """Dim 1, channels, taken apart."""
    return x.reshape(len(x), group, -1, *x.shape[2:])


def convolution(x, w, group=1, **_):
    """Of stride 1."""
    height, width = x.shape[2:]
    wide, kernels = by_group(around(x, w.shape[2:]), group), w.reshape(group, -1, *w.shape[1:])
    y = 0
    for i, j in np.ndindex(*w.shape[2:]):
        window = wide[..., i : i + height, j : j + width]
        y = y + np.einsum("ngchw,goc->ngohw", window, kernels[..., i, j])
    return y.reshape(len(x), -1, height, width)


def convolution_input(dy, w, shape, group=1, **_):
    """The gradient of sum(dy * convolution(x, w)) with respect to x."""
    height, width = shape[2:]
    kh, kw = w.shape[2:]
    wide, kernels = np.zeros(around(np.zeros(shape), (kh, kw)).shape), w.reshape(group, -1, *w.shape[1:])
    apart = by_group(wide, group)  # a view
    for i, j in np.ndindex(kh, kw):
        apart[..., i : i + height, j : j + width] += np.einsum(
            "ngohw,goc->ngchw", by_group(dy, group), kernels[..., i, j]
        )
    return wide[:, :, kh // 2 : kh // 2 + height, kw // 2 : kw // 2 + width]


def convolution_weight(dy, x, shape, group=1, **_):
    height, width = x.shape[2:]
    wide, result = by_group(around(x, shape[2:]), group), np.zeros(shape)
    for i, j in np.ndindex(*shape[2:]):
        window = wide[..., i : i + height, j : j + width]
        found = np.einsum("ngohw,ngchw->goc", by_group(dy, group), window)
        result[..., i, j] = found.reshape(shape[:2])
    return result


def in_depth(function, dy, other, shape, **attributes):
    """Of images of one layer."""
    return function(dy[:, :, 0], other[:, :, 0], (*shape[:2], *shape[3:]), **attributes)[:, :, None]


def windows(x):
    n, c, height, width = x.shape
    return x.reshape(n, c, height // 2, 2, width // 2, 2)


def max_pool_grad(x, y, dy):
    wide = lambda a: a.repeat(2, 2).repeat(2, 3)  # noqa: E731
    return (x == wide(y)) * wide(dy)


def group_norm(x, groups, scale, shift, epsilon):
    rows = x.reshape(len(x), groups, -1)
    mean, var = rows.mean(-1), rows.var(-1)
    normal = (rows - mean[..., None]) / np.sqrt(var + epsilon)[..., None]
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    y = normal.reshape(x.shape) * scale.reshape(per_channel) + shift.reshape(per_channel)
    return y, mean, 1 / np.sqrt(var + epsilon)


def group_norm_grad(dy, x, mean, inverse, scale, groups, *_):
    by_group = lambda a: a.reshape(len(x), groups, -1)  # noqa: E731
    normal = (by_group(x) - mean[..., None]) * inverse[..., None]
    d = by_group(dy * scale.reshape((-1,) + (1,) * (x.ndim - 2)))
    dx = inverse[..., None] * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    dims = (0, *range(2, x.ndim))
    return dx.reshape(x.shape), (dy * normal.reshape(x.shape)).sum(dims), dy.sum(dims)


def evaluated_batch_norm(x, scale, shift, mean, variance, is_training):
    assert not is_training
    wide = lambda a: a.reshape((-1,) + (1,) * (x.ndim - 2))  # noqa: E731
    return (x - wide(mean)) / np.sqrt(wide(variance) + 1e-5) * wide(scale) + wide(shift), *[mean * 1.0] * 4


def evaluated_batch_norm_grad(dy, x, scale, mean, variance, _, is_training):
    assert not is_training
    wide = lambda a: a.reshape((-1,) + (1,) * (x.ndim - 2))  # noqa: E731
    normal, dims = (x - wide(mean)) / np.sqrt(wide(variance) + 1e-5), (0, *range(2, x.ndim))
    return dy * wide(scale) / np.sqrt(wide(variance) + 1e-5), (dy * normal).sum(dims), dy.sum(dims)


def put_along(x, dim, indices, src, _):
    x = x.copy()
    np.put_along_axis(x, indices, src, dim)
    return x


def add_along(x, dim, indices, dy):
    result = np.zeros_like(x)
    for place in np.ndindex(*indices.shape):
        at = list(place)
        at[dim] = indices[place]
        result[tuple(at)] += dy[place]
    return result


def coordinates(indices):
    return tuple(np.moveaxis(indices, -1, 0))


def scatter_nd(indices, updates, shape):
    result = np.zeros(shape)
    np.add.at(result, coordinates(indices), updates)
    return result


def scatter_add(x, indices, updates):
    result = x.copy()
    np.add.at(result, coordinates(indices), updates)
    return result


def largest(x, count):
    places = np.argsort(-x, axis=-1, kind="stable")[..., : int(count)]
    return np.take_along_axis(x, places, -1), places


def padded(x, pads, value):
    """Pairs from the last dim on; a negative one takes away."""
    pads = list(pads) + [0] * (2 * x.ndim - len(pads))
    before, after = pads[::2][::-1], pads[1::2][::-1]
    x = np.pad(x, [(max(a, 0), max(b, 0)) for a, b in zip(before, after, strict=True)], constant_values=value)
    return x[tuple(slice(max(-a, 0), n - max(-b, 0)) for a, b, n in zip(before, after, x.shape, strict=True))]


def reduced(values, reduction):
    return {0: values.sum, 1: values.mean, 2: values.copy}[{"sum": 0, "mean": 1, "none": 2}.get(reduction, reduction)]()


def spread_back(per_element, dy, reduction):
    how = {"sum": 0, "mean": 1, "none": 2}.get(reduction, reduction)
    return per_element * dy / (per_element.size if how == 1 else 1)


def smooth_l1(x, y, beta):
    d = np.abs(x - y)
    return np.where(d < beta, d * d / 2 / beta, d - beta / 2)


def sparse_cross_entropy(logits, labels, is_grad=False):
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rows = np.arange(len(labels))
    if not is_grad:
        return -np.log(probabilities[rows, labels]).mean()
    probabilities[rows, labels] -= 1
    return probabilities / len(labels)


def cross_entropy(logits, labels):
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -(labels * np.log(probabilities)).sum(-1), probabilities - labels


def segment_extreme(ufunc, empty):
    def compute(x, ids, count):
        result = np.full((count, *x.shape[ids.ndim :]), empty, x.dtype)
        ufunc.at(result, ids[ids >= 0], x[ids >= 0])
        return result

    return compute


def per_channel(weight, x):
    return weight.reshape((-1,) + (1,) * (x.ndim - 2))


def prelu_grad(dy, x, weight):
    of_each = np.where(x > 0, 0, dy * x)
    of_weight = of_each.sum((0, *range(2, x.ndim)))
    return np.where(x > 0, dy, dy * per_channel(weight, x)), of_weight if len(weight) > 1 else of_weight.sum(
        keepdims=True
    )


def l2_normalize_grad(x, y, dy, axis):
    length = np.sqrt((x * x).sum(axis, keepdims=True) + 1)
    return (dy - y * (y * dy).sum(axis, keepdims=True)) / length


COMPUTE = {
    "FlashAttentionScore": flash_kinds.attention,
    "FlashAttentionScoreGrad": flash_kinds.gradient,
    "UnsortedSegmentMax": segment_extreme(np.maximum, -1e30),
    "UnsortedSegmentMin": segment_extreme(np.minimum, 1e30),
    "UnsortedSegmentProd": segment_extreme(np.multiply, 1),
    "PReLU": lambda x, weight: np.where(x > 0, x, x * per_channel(weight, x)),
    "PReLUGrad": prelu_grad,
    "L2Normalize": lambda x, axis: x / np.sqrt((x * x).sum(axis, keepdims=True) + 1),
    "L2NormalizeGrad": l2_normalize_grad,
    "LpNorm": lambda x, axis, keep_dims: (abs(x) ** 3).sum(axis, keepdims=keep_dims),
    "CumulativeLogsumexp": lambda x, dim: np.logaddexp.accumulate(x, dim),
    "AdaptiveAvgPool2DGrad": lambda dy, shape: (
        (dy / 4).repeat(shape[2] // dy.shape[2], 2).repeat(shape[3] // dy.shape[3], 3)
    ),
    "AdaptiveMaxPool2D": lambda x, _: (windows(x).max((3, 5)), windows(x).argmax(3).max(4)),
    "BiasAdd": lambda x, bias, _: x + bias.reshape((-1,) + (1,) * (x.ndim - 2)),
    "BiasAddGrad": lambda dy, _: dy.sum((0, *range(2, dy.ndim))),
    "Conv2D": convolution,
    "Conv2DBackpropInput": convolution_input,
    "Conv2DBackpropFilter": convolution_weight,
    "Conv3DBackpropInput": lambda w, dy, shape, **a: in_depth(convolution_input, dy, w, shape, **a),
    "Conv3DBackpropFilter": lambda x, dy, shape, **a: in_depth(convolution_weight, dy, x, shape, **a),
    "MaxPool": lambda x: windows(x).max((3, 5)),
    "MaxPoolGrad": max_pool_grad,
    "AvgPool": lambda x: windows(x).mean((3, 5)),
    "AvgPoolGrad": lambda x, y, dy: dy.repeat(2, 2).repeat(2, 3) / 4,
    "ResizeBilinearGrad": lambda dy, x: windows(dy).sum((3, 5)),
    "GroupNorm": group_norm,
    "GroupNormGrad": group_norm_grad,
    "BatchNorm": evaluated_batch_norm,
    "BatchNormGrad": evaluated_batch_norm_grad,
    "Tril": np.tril,
    "Flatten": lambda x: x.reshape(len(x), -1),
    "GatherD": lambda x, dim, indices: np.take_along_axis(x, indices, dim),
    "GatherDGradV2": add_along,
    "Scatter": put_along,
    "ScatterValue": lambda x, dim, indices, value, _: put_along(x, dim, indices, value, _),
    "GatherNd": lambda x, indices: x[coordinates(indices)],
    "ScatterNd": scatter_nd,
    "TensorScatterAdd": scatter_add,
    "Sort": lambda x, axis=-1: (np.sort(x, axis), np.argsort(x, axis, kind="stable")),
    "SortExt": lambda x, dim: (np.sort(x, dim), np.argsort(x, dim, kind="stable")),
    "TopK": largest,
    "TopkExt": lambda x, count, dim: largest(x, count),
    "Argmax": lambda x, dim: x.argmax(dim),
    "PadV3": padded,
    "Roll": np.roll,
    "Unstack": lambda x, axis: tuple(np.moveaxis(x, axis, 0)),
    "BinaryCrossEntropy": lambda x, y, w, how: reduced(w * x * y, how),
    "BinaryCrossEntropyGrad": lambda x, y, dy, w, how: spread_back(w * y, dy, how),
    "BCEWithLogitsLoss": lambda x, y, w, positive, how: reduced(w * (x * y - positive), how),
    "BinaryCrossEntropyWithLogitsBackward": lambda dy, x, y, w, positive, how: spread_back(w * y + positive, dy, how),
    "SmoothL1Loss": lambda x, y, beta, how: reduced(smooth_l1(x, y, beta), how),
    "SmoothL1LossGrad": lambda x, y, dy, beta, how: spread_back(np.clip((x - y) / beta, -1, 1), dy, how),
    "MSELossExt": lambda x, y, how: reduced((x - y) ** 2, how),
    "KLDivLoss": lambda x, y, reduction: reduced(y * (y - x), reduction),
    "KLDivLossGrad": lambda dy, x, y, reduction: spread_back(-y, dy, reduction),
    "SparseSoftmaxCrossEntropyWithLogits": sparse_cross_entropy,
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
}


def image(d, channels=None):
    return d.of(int(d.random.choice([2, 4, 6])), channels or int(d.random.choice([2, 4, 6])), 4, 2)


def bias(d):
    x = d.of(*d.shape(2, 4))
    return [x, d.of(x.shape[1]), 0]


def segments(d):
    ids, count = d.shape(1, 2), d.size()
    return [d.of(*ids, *d.shape(0, 2)), d.random.integers(0, count, ids), count]


def sloped(d):
    x = d.of(*d.shape(2, 4))
    return [x, d.of(x.shape[1] if d.flag() else 1)]


def normalized(d):
    x = d.of(*d.shape())
    dims = tuple(sorted({int(i) for i in d.random.integers(0, x.ndim, 2)}))
    return x, {"axis": dims if d.flag() else dims[0] - x.ndim}


def norm_of_powers(d):
    x, attributes = normalized(d)
    return [x, {**attributes, "keep_dims": d.flag()}]


def layer(d):
    group = int(d.random.choice([1, 1, 2]))
    x, out = image(d), int(d.random.choice([2, 4, 8]))
    return x, d.of(out, x.shape[1] // group, 3, 1), {"group": group}


def layer_gradient(d, of_input):
    x, w, attributes = layer(d)
    dy = d.of(len(x), len(w), *x.shape[2:])
    return [dy, w, x.shape, attributes] if of_input else [dy, x, w.shape, attributes]


def deep(d, of_input):
    """The same in three dims, whose inputs come in another order; dims of one size tell which is which."""
    dy, other, shape, attributes = layer_gradient(d, of_input)
    dy, other, shape = dy[:, :, None], other[:, :, None], (*shape[:2], 1, *shape[2:])
    return [other, dy, shape, attributes]


def pooled(d):
    x = image(d)
    y = COMPUTE["MaxPool"](x)
    return [x, y, d.of(*y.shape)]


def grouped(d):
    x = image(d)
    return [x, 2, d.of(x.shape[1]), d.of(x.shape[1]), 1e-5]


def grouped_gradient(d):
    x, groups, scale, shift, epsilon = grouped(d)
    _, mean, inverse = group_norm(x, groups, scale, shift, epsilon)
    return [d.of(*x.shape), x, mean, inverse, scale, groups, True, True, True]


def evaluated(d):
    x = image(d)
    return [x, *(d.of(x.shape[1]) for _ in range(3)), d.of(x.shape[1]) ** 2, False]


def taken(d):
    x = d.of(*d.shape())
    dim = d.dim(x.shape)
    shape = list(x.shape)
    shape[dim] = d.size()
    return x, dim, d.random.integers(0, x.shape[dim], shape)


def put(d, src):
    x, dim, _ = taken(d)
    indices = np.argsort(d.random.random(x.shape), axis=dim)  # none twice
    return [x, dim, indices, *([d.of(*indices.shape), 0] if src else [2.0, 0])]


def at_coordinates(d, twice=True):
    x = d.of(*d.shape())
    named, own = int(d.random.integers(1, x.ndim + 1)), d.shape(1, 2)
    indices = np.stack([d.random.integers(0, x.shape[i], own) for i in range(named)], -1)
    return x, indices, d.of(*own, *x.shape[named:])


def different(d):
    shape = d.shape()
    return d.random.permutation(int(np.prod(shape))).reshape(shape).astype(np.float64)


def sorted_inputs(d):
    x = different(d)
    return [x, d.dim(x.shape)]


def top(d):
    x = different(d)
    return [x, np.array(int(d.random.integers(1, x.shape[-1] + 1)))]


def pads(d):
    x = d.of(*d.shape())
    count = 2 * int(d.random.integers(1, x.ndim + 1))
    return [x, tuple(int(n) for n in d.random.choice([0, 0, 1, 2], count)), 1.5]


def judged(d, *more, place=None, words=False):
    """x, y and `more` of the same shape, then how they are reduced; a gradient's dy at `place`."""
    shape, how = d.shape(), int(d.random.integers(3))
    tensors = [d.of(*shape) for _ in range(2 + len(more))]
    if place is not None:
        tensors.insert(place, d.of(*shape) if how == 2 else np.array(3.0))
    return [*tensors, {"reduction": ["sum", "mean", "none"][how]}] if words else [*tensors, how]


def with_beta(arguments):
    return [*arguments[:-1], 0.5, arguments[-1]]


def classified(d):
    logits = d.of(d.size(), d.size())
    return [logits, d.random.integers(0, logits.shape[1], len(logits)), {"is_grad": d.flag()}]


SAMPLES = {
    **dict.fromkeys(("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"), segments),
    "PReLU": sloped,
    "PReLUGrad": lambda d: (lambda a: [d.of(*a[0].shape), *a])(sloped(d)),
    "L2Normalize": lambda d: list(normalized(d)),
    "L2NormalizeGrad": lambda d: (lambda x, a: [x, d.of(*x.shape), d.of(*x.shape), a])(*normalized(d)),
    "LpNorm": norm_of_powers,
    "CumulativeLogsumexp": with_dim,
    "AdaptiveAvgPool2DGrad": lambda d: (lambda x: [d.of(*x.shape[:2], 2, 1), np.array(x.shape)])(image(d)),
    "AdaptiveMaxPool2D": lambda d: [image(d), (2, 1)],
    "BiasAdd": bias,
    "BiasAddGrad": lambda d: [d.of(*d.shape(2, 4)), 0],
    "Conv2D": lambda d: list(layer(d)),
    "Conv2DBackpropInput": functools.partial(layer_gradient, of_input=True),
    "Conv2DBackpropFilter": functools.partial(layer_gradient, of_input=False),
    "Conv3DBackpropInput": functools.partial(deep, of_input=True),
    "Conv3DBackpropFilter": functools.partial(deep, of_input=False),
    "MaxPool": lambda d: [image(d)],
    "MaxPoolGrad": pooled,
    "AvgPool": lambda d: [image(d)],
    "AvgPoolGrad": pooled,
    "ResizeBilinearGrad": lambda d: (lambda x: [d.of(*x.shape[:2], 8, 4), x])(image(d)),
    "GroupNorm": grouped,
    "GroupNormGrad": grouped_gradient,
    "BatchNorm": evaluated,
    "BatchNormGrad": lambda d: (lambda a: [d.of(*a[0].shape), a[0], a[1], a[3], a[4], a[2], False])(evaluated(d)),
    "Tril": lambda d: [d.of(*d.shape(2, 4))],
    "Flatten": lambda d: [d.of(*d.shape(2, 4))],
    "FlashAttentionScore": flash_kinds.sample,
    "FlashAttentionScoreGrad": flash_kinds.sample_gradient,
    "GatherD": lambda d: list(taken(d)),
    "GatherDGradV2": lambda d: (lambda a: [*a, d.of(*a[2].shape)])(taken(d)),
    "Scatter": lambda d: put(d, True),
    "ScatterValue": lambda d: put(d, False),
    "GatherNd": lambda d: list(at_coordinates(d)[:2]),
    "ScatterNd": lambda d: (lambda a: [a[1], a[2], a[0].shape])(at_coordinates(d)),
    "TensorScatterAdd": lambda d: list(at_coordinates(d)),
    "Sort": lambda d: (lambda a: [a[0], {"axis": a[1]}])(sorted_inputs(d)),
    "SortExt": sorted_inputs,
    "TopK": top,
    "TopkExt": lambda d: [*top(d), -1],
    "Argmax": sorted_inputs,
    "PadV3": pads,
    "Roll": lambda d: (lambda x: [x, int(d.random.integers(-3, 4)), d.dim(x.shape)])(d.of(*d.shape())),
    "Unstack": lambda d: (lambda x: [x, {"axis": d.dim(x.shape)}])(d.of(*d.shape())),
    "BinaryCrossEntropy": lambda d: judged(d, "w"),
    "BinaryCrossEntropyGrad": lambda d: judged(d, "w", place=2),
    "BCEWithLogitsLoss": lambda d: judged(d, "w", "positive"),
    "BinaryCrossEntropyWithLogitsBackward": lambda d: judged(d, "w", "positive", place=0),
    "SmoothL1Loss": lambda d: with_beta(judged(d)),
    "SmoothL1LossGrad": lambda d: with_beta(judged(d, place=2)),
    "MSELossExt": judged,
    "KLDivLoss": lambda d: judged(d, words=True),
    "KLDivLossGrad": lambda d: judged(d, place=0, words=True),
    "SparseSoftmaxCrossEntropyWithLogits": classified,
    "SoftmaxCrossEntropyWithLogits": lambda d: (lambda x: [x, d.of(*x.shape)])(d.of(d.size(), d.size())),
}
