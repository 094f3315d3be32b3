# SPDX-License-Identifier: Apache-2.0
"""What kinds of operators compute, in NumPy, as MindSpore defines them; and random inputs for each."""

import math

import numpy as np


def axes_of(dims):
    return None if dims is None or dims == () else (dims if isinstance(dims, int) else tuple(dims))


def matmul(x, w, ta, tb):
    return (np.swapaxes(x, -1, -2) if ta else x) @ (np.swapaxes(w, -1, -2) if tb else w)


def layer_norm(x, gamma, beta, begin_norm, begin_params, epsilon):
    axes = tuple(range(begin_norm % x.ndim, x.ndim))
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon) * gamma + beta, mean, var


def layer_norm_grad(x, dy, var, mean, gamma, begin_norm, begin_params):
    epsilon, n = 1e-5, math.prod(x.shape[begin_norm % x.ndim :])
    axes, rows = tuple(range(begin_norm % x.ndim, x.ndim)), tuple(range(begin_norm % x.ndim))
    inverse = 1 / np.sqrt(var + epsilon)
    normal, d = (x - mean) * inverse, dy * gamma
    dx = inverse * (d - d.mean(axes, keepdims=True) - normal * (d * normal).mean(axes, keepdims=True))
    assert n
    return dx, (dy * normal).sum(rows), dy.sum(rows)


def rms_norm(x, gamma, epsilon):
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * inverse * gamma, inverse


def rms_norm_grad(dy, x, inverse, gamma):
    normal, d = x * inverse, dy * gamma
    return inverse * (d - normal * (d * normal).mean(-1, keepdims=True)), (dy * normal).sum(tuple(range(x.ndim - 1)))


def softmax(x, dim):
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def softmax_backward(dy, y, dim):
    return y * (dy - (dy * y).sum(dim, keepdims=True))


def segment_sum(x, ids, count):
    """Negative ids are of no segment."""
    result = np.zeros((count, *x.shape[ids.ndim :]), x.dtype)
    np.add.at(result, ids[ids >= 0], x[ids >= 0])
    return result


def lookup(table, ids, offset):
    inside = (ids >= offset) & (ids < offset + len(table))
    return np.where(inside[(...,) + (None,) * (table.ndim - 1)], table[np.where(inside, ids - offset, 0)], 0)


def gather(table, ids, dim, batch_dims=0):
    if not batch_dims:
        return np.take(table, ids, dim)
    assert batch_dims == 1
    return np.stack([np.take(t, i, dim - 1) for t, i in zip(table, ids, strict=True)])


def top_k(x, k):
    order = np.argsort(-x, -1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, -1), order


def largest_along(x, dim, keep):
    place = np.argmax(x, dim)
    return (np.expand_dims(place, dim), x.max(dim, keepdims=True)) if keep else (place, x.max(dim))


def scatter_elements(x, indices, updates, axis=1):
    result = x.copy()
    part = result[tuple(slice(None) if dim == axis else slice(size) for dim, size in enumerate(indices.shape))]
    np.put_along_axis(part, indices, updates, axis)
    return result


def one_hot(ids, depth, on, off, axis):
    hot = np.where(ids[..., None] == np.arange(depth), on, off)
    return np.moveaxis(hot, -1, axis)


def index_of(begin, end, strides, from_begin=0, to_end=0, ellipsis=0, new_axes=0, dropped=0):
    assert not ellipsis and not new_axes
    return tuple(
        b if dropped >> i & 1 else slice(None if from_begin >> i & 1 else b, None if to_end >> i & 1 else e, s)
        for i, (b, e, s) in enumerate(zip(begin, end, strides, strict=True))
    )


def strided_slice(x, *where):
    return x[index_of(*where)]


def strided_slice_grad(dy, shape, *where):
    x = np.zeros(shape, dy.dtype)
    x[index_of(*where)] = dy
    return x


def slice_of(x, begin, size):
    return x[tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True))]


def reduce_sum(x, dims, keep, skip=False):
    return x if skip and dims == () else np.sum(x, axes_of(dims), keepdims=bool(keep))


COPIES = ("Load", "StopGradient", "TensorMove")
COMPUTE = {
    "Add": np.add,
    "Sub": np.subtract,
    "Neg": np.negative,
    "Mul": np.multiply,
    "Muls": np.multiply,
    "Div": np.divide,
    "Exp": np.exp,
    "Square": np.square,
    "Tanh": np.tanh,
    "Maximum": np.maximum,
    "Abs": np.abs,
    "FloorDiv": np.floor_divide,
    "LessEqual": np.less_equal,
    "Select": np.where,
    "MaskedFill": lambda x, mask, number: np.where(mask, number, x),
    "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "AddN": lambda items: sum(items[1:], items[0]),
    "MatMul": matmul,
    "BatchMatMul": matmul,
    **dict.fromkeys(("MatMulExt", "BatchMatMulExt"), np.matmul),
    "ReduceSum": reduce_sum,
    "ReduceMean": lambda x, dims, keep: np.mean(x, axes_of(dims), keepdims=bool(keep)),
    "ReduceMax": lambda x, dims, keep: np.max(x, axes_of(dims), keepdims=bool(keep)),
    **dict.fromkeys(("ReduceMin", "AminExt"), lambda x, dims, keep: np.min(x, axes_of(dims), keepdims=bool(keep))),
    "ReduceProd": lambda x, dims, keep: np.prod(x, axes_of(dims), keepdims=bool(keep)),
    "ReduceAny": lambda x, dims, keep: np.any(x, axes_of(dims), keepdims=bool(keep)),
    "Argmax": lambda x, dim: np.argmax(x, dim),
    "ArgMaxWithValue": largest_along,
    "TopK": top_k,
    "TensorScatterElements": scatter_elements,
    "CumSum": lambda x, dim: np.cumsum(x, dim),
    "Dense": lambda x, w, bias: x @ w.T + (0 if bias is None else bias),
    "Transpose": lambda x, order: np.transpose(x, order),
    "Reshape": lambda x, shape: x.reshape(shape),
    "ExpandDims": np.expand_dims,
    "Squeeze": lambda x: np.squeeze(x),
    "BroadcastTo": lambda x, shape: np.broadcast_to(x, shape),
    "Tile": np.tile,
    "Concat": lambda items, dim: np.concatenate(items, dim),
    "Stack": lambda items, dim: np.stack(items, dim),
    "Split": lambda x, dim, count: tuple(np.split(x, count, dim)),
    "SplitTensor": lambda x, size, dim: tuple(np.split(x, range(size, x.shape[dim], size), dim)),
    "SplitWithSize": lambda x, sizes, dim: tuple(np.split(x, np.cumsum(sizes)[:-1], dim)),
    "StridedSlice": strided_slice,
    "StridedSliceGrad": strided_slice_grad,
    "Slice": slice_of,
    "ReverseV2": lambda x, dims: np.flip(x, dims),
    "Gather": gather,
    "EmbeddingLookup": lookup,
    "UnsortedSegmentSum": segment_sum,
    "OneHot": one_hot,
    "Softmax": softmax,
    "SoftmaxBackward": softmax_backward,
    "LayerNorm": layer_norm,
    "LayerNormGrad": layer_norm_grad,
    "RmsNorm": rms_norm,
    "RmsNormGrad": rms_norm_grad,
    **dict.fromkeys(COPIES, lambda x: x.copy()),
    "L2Loss": lambda x: (x * x).sum() / 2,
}


class Draw:
    """Random inputs."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def size(self):
        return int(self.random.choice([1, 2, 3, 4, 6, 8, 12]))

    def shape(self, least=1, most=4):
        return tuple(self.size() for _ in range(self.random.integers(least, most + 1)))

    def of(self, *shape):
        """Whole numbers, so that sums of parts are exact."""
        return self.random.integers(-3, 4, shape).astype(np.float64)

    def dim(self, shape):
        return int(self.random.integers(-len(shape), len(shape)))

    def dims(self, shape):
        count = int(self.random.integers(0, len(shape) + 1))
        return tuple(int(d) for d in self.random.permutation(len(shape))[:count])

    def flag(self):
        return bool(self.random.integers(2))

    def broadcast(self, shape):
        """A shape that is broadcast to `shape`."""
        kept = tuple(1 if self.random.random() < 0.3 else size for size in shape)
        return kept[int(self.random.integers(0, len(shape) + 1)) if self.random.random() < 0.3 else 0 :]


def binary(d):
    shape = d.shape()
    pair = [d.of(*shape), d.of(*d.broadcast(shape))]
    return pair if d.flag() else pair[::-1]


def quotient(d):
    x, y = binary(d)
    return [x, np.where(y == 0, 1.0, y)]


def reduction(d):
    x = d.of(*d.shape())
    return [x, d.dims(x.shape), d.flag()]


def reshaped(d):
    x = d.of(*d.shape())
    left, shape = x.size, []
    while left > 1 and d.random.random() < 0.8:
        divisors = [n for n in (1, 2, 3, 4, 6, 8, 12) if left % n == 0]
        shape.append(int(d.random.choice(divisors)))
        left //= shape[-1]
    return [x, (*shape, left)]


def product(d, batch=()):
    m, k, n, ta, tb = d.size(), d.size(), d.size(), d.flag(), d.flag()
    other = d.broadcast(batch) if batch and d.flag() else batch
    return [d.of(*batch, *((k, m) if ta else (m, k))), d.of(*other, *((n, k) if tb else (k, n))), ta, tb]


def layer(d):
    """Of a vector, too; with a bias or without."""
    x, n = d.of(*d.shape(1, 3)), d.size()
    return [x, d.of(n, x.shape[-1]), d.of(n) if d.flag() else None]


def norm_inputs(d):
    rows, columns = d.shape(1, 2), d.size()
    return [d.of(*rows, columns), d.of(columns), d.of(columns), -1, -1, 1e-5]


def norm_grad(d):
    x, gamma = norm_inputs(d)[:2]
    return [x, d.of(*x.shape), x.var(-1, keepdims=True), x.mean(-1, keepdims=True), gamma, -1, -1]


def items_of(d, dim=None):
    shape = d.shape()
    at = d.dim(shape) if dim is None else None
    items = []
    for _ in range(int(d.random.integers(2, 4))):
        own = list(shape)
        if at is not None:
            own[at] = d.size()
        items.append(d.of(*own))
    return tuple(items), at


def stridden(d):
    x = d.of(*d.shape())
    begin = [0 if d.flag() else int(d.random.integers(0, n)) for n in x.shape]
    end = [n if d.flag() else int(d.random.integers(b + 1, n + 1)) for b, n in zip(begin, x.shape, strict=True)]
    masks = [int(d.random.integers(0, 2 ** len(x.shape))) if d.flag() else 0 for _ in range(3)]
    strides = tuple(int(d.random.integers(1, 3)) for _ in x.shape)
    return [x, tuple(begin), tuple(end), strides, masks[0], masks[1], 0, 0, masks[2]]


def unstridden(d):
    x, *where = stridden(d)
    return [d.of(*strided_slice(x, *where).shape), x.shape, *where]


def sliced(d):
    x, begin, end, *_ = stridden(d)
    return [x, begin, tuple(e - b for b, e in zip(begin, end, strict=True))]


def looked_up(d):
    table, ids = d.of(*d.shape(1, 3)), d.shape(0, 2)
    dim = 0 if d.flag() else d.dim(table.shape)
    return [table, d.random.integers(0, table.shape[dim], ids), dim, 0]


def looked_up_by_row(d):
    rows = d.size()
    table = d.of(rows, d.size(), d.size())
    return [table, d.random.integers(0, table.shape[1], (rows, d.size())), 1, 1]


def segments(d):
    ids, count = d.shape(1, 2), d.size()
    return [d.of(*ids, *d.shape(0, 2)), d.random.integers(0, count, ids), count]


def hot(d):
    depth = d.size()
    return [d.random.integers(0, depth, d.shape(1, 2)), depth, 1.0, 0.0, -1]


def scattered(d):
    """Each place at most once: what it gets is defined."""
    x = d.of(*d.shape(2, 3))
    count = int(d.random.integers(1, x.shape[1] + 1))
    others = [size if d.flag() else int(d.random.integers(1, size + 1)) for size in x.shape]
    shape = (others[0], count, *others[2:])
    order = np.argsort(d.random.random((others[0], x.shape[1], *others[2:])), 1)[:, :count]
    return [x, order, d.of(*shape)]


def with_dim(d):
    x = d.of(*d.shape())
    return [x, d.dim(x.shape)]


def split_inputs(d):
    x = d.of(*d.shape())
    dim = d.dim(x.shape)
    return [x, dim, int(d.random.choice([n for n in (1, 2, 3, 4) if x.shape[dim] % n == 0]))]


def split_by_size(d):
    x = d.of(*d.shape())
    dim = d.dim(x.shape)
    return [x, int(d.random.integers(1, x.shape[dim] + 1)), dim]


def split_by_sizes(d):
    x, size, dim = split_by_size(d)
    return [x, tuple(n for n in (size, x.shape[dim] - size) if n), dim]


def broadcasts(d):
    shape = d.shape()
    return [d.of(*d.broadcast(shape)), shape]


SAMPLES = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Maximum", "LessEqual"), binary),
    "Muls": lambda d: [d.of(*d.shape()), 3.0],
    "Div": quotient,
    **dict.fromkeys(
        ("Neg", "Abs", "Exp", "Square", "Tanh", "L2Loss", "Squeeze", *COPIES), lambda d: [d.of(*d.shape())]
    ),
    "MaskedFill": lambda d: (lambda x: [x[0], x[0] > 0, np.float32(d.flag())])(binary(d)),
    "Select": lambda d: (lambda x: [x[0] > x[1], d.of(*np.broadcast_shapes(x[0].shape, x[1].shape)), x[1]])(binary(d)),
    "TanhGrad": lambda d: (lambda s: [d.of(*s), d.of(*s)])(d.shape()),
    "AddN": lambda d: (lambda s: [tuple(d.of(*s) for _ in range(3))])(d.shape()),
    "MatMul": product,
    "BatchMatMul": lambda d: product(d, d.shape(1, 2)),
    "MatMulExt": lambda d: (lambda m, k, n: [d.of(m, k), d.of(k, n)])(d.size(), d.size(), d.size()),
    "BatchMatMulExt": lambda d: (lambda b, m, k, n: [d.of(b, m, k), d.of(b, k, n)])(*(d.size() for _ in range(4))),
    "Dense": layer,
    "ReduceSum": lambda d: [*reduction(d), d.flag()],
    **dict.fromkeys(("ReduceMean", "ReduceMax", "ReduceMin", "AminExt", "ReduceProd"), reduction),
    "ReduceAny": lambda d: (lambda r: [r[0] > 1, *r[1:]])(reduction(d)),
    **dict.fromkeys(("CumSum", "Argmax"), with_dim),
    "ArgMaxWithValue": lambda d: [*with_dim(d), d.flag()],
    "TopK": lambda d: (lambda x: [x, int(d.random.integers(1, x.shape[-1] + 1))])(d.of(*d.shape())),
    "TensorScatterElements": scattered,
    "Transpose": lambda d: (lambda x: [x, tuple(int(i) for i in d.random.permutation(x.ndim))])(d.of(*d.shape())),
    "Reshape": reshaped,
    "ExpandDims": lambda d: (lambda x: [x, int(d.random.integers(-x.ndim - 1, x.ndim + 1))])(d.of(*d.shape(1, 3))),
    "BroadcastTo": broadcasts,
    "Tile": lambda d: (lambda x: [x, tuple(int(d.random.choice([1, 1, 2])) for _ in x.shape)])(d.of(*d.shape())),
    "Concat": lambda d: list(items_of(d)),
    "Stack": lambda d: (lambda items: [items, d.dim((*items[0].shape, 1))])(items_of(d, dim=0)[0]),
    "Split": split_inputs,
    "SplitTensor": split_by_size,
    "SplitWithSize": split_by_sizes,
    "StridedSlice": stridden,
    "StridedSliceGrad": unstridden,
    "Slice": sliced,
    "ReverseV2": lambda d: (lambda x: [x, d.dims(x.shape)])(d.of(*d.shape())),
    "Gather": lambda d: looked_up(d) if d.flag() else looked_up_by_row(d),
    "UnsortedSegmentSum": segments,
    "OneHot": hot,
    "Softmax": with_dim,
    "SoftmaxBackward": lambda d: (lambda x: [d.of(*x[0].shape), softmax(x[0], x[1]), x[1]])(with_dim(d)),
    "LayerNorm": norm_inputs,
    "LayerNormGrad": norm_grad,
    "RmsNorm": lambda d: (lambda n: [n[0], n[1], 1e-5])(norm_inputs(d)),
    "RmsNormGrad": lambda d: (lambda n: [d.of(*n[0].shape), n[0], rms_norm(n[0], n[1], 1e-5)[1], n[1]])(norm_inputs(d)),
}
"""Kind -> what draws its inputs: arrays are tensors, tuples of arrays several; all else is known before the graph runs."""
