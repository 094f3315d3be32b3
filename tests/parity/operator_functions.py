# SPDX-License-Identifier: Apache-2.0
"""Operators by which the partitioner is swept, one or a few each: functions of one or two tensors of (8, 12).

Those of `spmd_functions` besides: tables of what only has a name, and functions of two.
"""

import inspect

import mindspore as ms
import numpy as np
import spmd_functions
from mindspore import Tensor, ops
from spmd_functions import COLUMN, COLUMNS, PLACES, ROWS, images

ONE_COLUMN = Tensor(np.array([[1.0], [-1.0]] * 4, np.float32))
SIGNS = Tensor(np.where(np.random.default_rng(8).random((ROWS, COLUMNS)) < 0.5, -1, 1).astype(np.float32))
ROW_OF_EACH = Tensor(np.random.default_rng(9).integers(0, ROWS, (5, COLUMNS)).astype(np.int32))
TWO_OF_EACH = Tensor(np.random.default_rng(10).integers(0, COLUMNS, (ROWS, 2)).astype(np.int32))
NORM, NORM_OF_TWO = ops.LayerNorm(-1, -1), ops.LayerNorm(1, 1)
PLAIN = (
    *("abs", "asinh", "atan", "cos", "cosh", "sin", "sinh", "tanh", "exp", "expm1", "square", "neg", "erfc", "relu"),
    *("relu6", "elu", "celu", "selu", "mish", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink"),
    *("softsign", "logsigmoid", "sigmoid", "softmin", "nan_to_num"),
)
POSITIVE = ("log", "log1p", "sqrt", "reciprocal", "log2", "log10")
"""Of x * x + 0.5."""
SMALL = ("acos", "asin", "atanh", "tan", "erfinv")
"""Of 0.9 tanh(x)."""
IN_STEPS = ("ceil", "round", "trunc", "sign")
"""Whose product with x is looked at."""
OF_TWO = (
    *("add", "sub", "mul", "minimum", "atan2", "logaddexp", "l1_loss", "gaussian_nll", "floor_mod", "fmod", "hypot"),
)
COMPARED = ("greater", "greater_equal", "less", "less_equal", "not_equal")
"""Whose product with x is looked at, too."""
ELEMENTWISE = (*PLAIN, *POSITIVE, *SMALL, *IN_STEPS, *OF_TWO, *COMPARED)


def acosh(x):
    return ops.acosh(x * x + 1.5)


def argmin(x):
    return x * ops.argmin(x, 1).astype(ms.float32).expand_dims(1)


def amax_of_both(x):
    return ops.amax(x, (0, 1)) * x


def amin_of_rows(x):
    return ops.amin(x, 0) * x


def addcdiv(x, y):
    return ops.addcdiv(x, x, y * y + 1.0, 0.5)


def addcmul(x, y):
    return ops.addcmul(x, x, y, 0.5)


def addmm(x, y):
    return ops.addmm(x[:, :8], x, y.T)


def addmv(x, y):
    return ops.addmv(x[:, 0], x, y[0])


def attention(x, y):
    scores = ops.matmul(x.reshape(4, 2, 3, 4), y.reshape(4, 2, 3, 4).swapaxes(2, 3))
    return ops.matmul(ops.softmax(scores, -1), x.reshape(4, 2, 3, 4))


def avg_pool1d(x):
    return ops.avg_pool1d(x.reshape(4, 2, 12), 2, 2)


def baddbmm(x, y):
    return ops.baddbmm(x.reshape(2, 4, 12)[:, :, :4], x.reshape(2, 4, 12), y.reshape(2, 12, 4))


def bmm_of_two(x, y):
    return ops.bmm(x.reshape(4, 2, 12), y.reshape(4, 12, 2))


def bmm_broadcast(x, y):
    return ops.matmul(x.reshape(2, 4, 12), y.reshape(12, 8))


def broadcast_of_columns(x, y):
    return x * y[:, :1]


def broadcast_of_rows(x, y):
    return x + y[2]


def cat_of_two(x, y):
    return ops.cat((x, y), 1) * ops.cat((y, x), 1)


def cat_of_rows_of_two(x, y):
    return ops.cat((x, y * y), 0)


def conv1d(x, y):
    return ops.conv1d(x.reshape(4, 2, 12), y.reshape(-1)[:24].reshape(4, 2, 3), pad_mode="same")


def conv2d(x, y):
    return ops.conv2d(images(x), y.reshape(-1)[:72].reshape(4, 2, 3, 3), pad_mode="same")


def cosine_embedding(x, y):
    return ops.cosine_embedding_loss(x, y, Tensor(np.array([1, -1] * 4, np.int32)), 0.1)


def count_nonzero(x):
    return x * ops.count_nonzero(ops.relu(x), 1).astype(ms.float32).expand_dims(1)


def cumprod_of_rows(x):
    return ops.cumprod(x, 0)


def dense(x, y):
    return ops.dense(x, y)


def dense_with_bias(x, y):
    return ops.dense(x, y, y[:, 0])


def diagonal(x):
    return ops.diagonal(x)


def dot(x, y):
    return ops.tensor_dot(x, y, ((1,), (1,)))


def dot_of_rows(x, y):
    return ops.tensor_dot(x, y, ((0,), (0,)))


def einsum(x, y):
    return ops.matmul(x.T, y)


def embedding(x, y):
    return ops.gather(y, PLACES, 0) * x


def embedding_of_many(x, y):
    return ops.gather(y, ROW_OF_EACH, 0) * x[0]


def expand(x):
    return ops.broadcast_to(x.reshape(ROWS, 1, COLUMNS), (ROWS, 2, COLUMNS))


def fliplr(x):
    return ops.fliplr(x) * x


def frac(x):
    return ops.frac(x)


def gather_rows_of_each(x):
    return ops.gather_elements(x, 0, ROW_OF_EACH)


def gather_columns_of_each(x):
    return ops.gather_elements(x, 1, TWO_OF_EACH)


def geglu(x, y):
    return ops.gelu(x) * y


def group_norm(x, y):
    return ops.group_norm(images(x), 2, y[0, :2], y[1, :2])


def hinge(x):
    return ops.hinge_embedding_loss(x, SIGNS)


def hsplit(x):
    return ops.hsplit(x, 3)[0] * ops.hsplit(x, 3)[2]


def inner(x, y):
    return ops.inner(x, y)


def index_add(x, y):
    return ops.index_add(x * 1.0, PLACES, y, 0)


def index_fill(x):
    return ops.index_fill(x, 1, Tensor([0, 3], ms.int32), 0.5)


def interpolate_nearest(x):
    return ops.interpolate(images(x), size=(6, 8), mode="nearest")


def kron(x, y):
    return ops.kron(x[:2, :3], y[:2])


def layer_norm(x, y):
    return NORM(x, y[0], y[1])[0]


def layer_norm_of_two(x, y):
    return NORM_OF_TWO(x.reshape(ROWS, 3, 4), y[0].reshape(3, 4), y[1].reshape(3, 4))[0]


def logsumexp_of_all(x):
    return ops.logsumexp(x, (0, 1)) * x


def margin_ranking(x, y):
    return ops.margin_ranking_loss(x, y, SIGNS, 0.1)


def masked_by_other(x, y):
    return ops.where(y > 0.0, x, y)


def max_pool3d(x):
    return ops.max_pool3d(x.reshape(4, 2, 3, 2, 2), 2, 1)


def mean_keep(x):
    return x * x.mean(1, keep_dims=True)


def meshgrid_of_two(x, y):
    a, b = ops.meshgrid(x[0], y[:, 1])
    return a * b


def min_of_all(x):
    return x.min() * x


def mv(x, y):
    return ops.mv(x, y[3])


def narrow(x):
    return ops.narrow(x, 1, 2, 5)


def one_hot_product(x, y):
    return ops.matmul(ops.one_hot(PLACES, ROWS).astype(ms.float32), x) * y


def outer_of_rows(x, y):
    return x.expand_dims(1) * y.expand_dims(0)


def permute_and_merge(x):
    return x.reshape(4, 2, 3, 4).transpose(0, 2, 1, 3).reshape(12, 8)


def pixel_shuffle(x):
    return ops.pixel_shuffle(x.reshape(2, 4, 3, 4), 2)


def prod_of_all(x):
    return ops.prod(ops.tanh(x) * 0.05 + 1.0) * x


def quotient(x, y):
    return x / (y * y + 1.0)


def quotient_of_sums(x, y):
    return x.sum(0) / (y.sum(0) ** 2 + 1.0)


def repeat_of_rows(x):
    return ops.repeat_interleave(x, 2, 0)


def rms_norm(x, y):
    return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * y[0]


def rotate(x, y):
    a, b = ops.split(x, 6, axis=1)
    return ops.cat((a, b), 1) * ops.cos(y) + ops.cat((-b, a), 1) * ops.sin(y)


def scatter_min(x, y):
    return ops.tensor_scatter_min(x, Tensor(np.array([[1], [6], [2]], np.int32)), y[:3])


def scatter_update(x, y):
    return ops.tensor_scatter_update(x, Tensor(np.array([[1], [6], [2]], np.int32)), y[:3])


def scatter_elements(x, y):
    return ops.tensor_scatter_elements(x, COLUMN, y[:, :1], 1)


def segment_min(x):
    return ops.unsorted_segment_min(x, PLACES, 8)[:4]


def segment_sum_of_two(x, y):
    return ops.unsorted_segment_sum(x * y, PLACES, 8)


def set_rows(x, y):
    x = x * 1.0
    x[1:3] = y[:2]
    return x


def slice_of_rows(x):
    return x[2:7]


def slice_in_steps(x):
    return x[::2, 1::3]


def softmax_of_both(x):
    return ops.softmax(x.reshape(-1), 0) * 20


def softmax_of_four(x, y):
    return ops.softmax(images(x), 2) * images(y)


def split_of_rows(x):
    return ops.split(x, 4, axis=0)[0] * ops.split(x, 4, axis=0)[1]


def square_of_sums(x, y):
    return (x + y).sum(0) * (x * y).sum(1, keepdims=True) * 0.1


def stack_of_two(x, y):
    return ops.stack((x, y), 0)


def std_of_all(x):
    return x.std() * x


def sum_of_dims(x):
    return images(x).sum((0, 2)) * 0.3


def sum_of_products(x, y):
    return (x * y).sum(1)


def swiglu(x, y):
    return ops.silu(ops.matmul(x, y.T) * 0.2) * ops.matmul(x, (y * y).T) * 0.1


def take_last(x):
    return x[:, -3:] * x[:, :3]


def tied(x, y):
    return ops.matmul(ops.gather(y, PLACES, 0) + x, y.T)


def tile_of_columns(x):
    return ops.tile(x, (1, 3))


def top_of_columns(x, y):
    values, places = ops.topk(x, 3, -1)
    return values * ops.gather_elements(y, 1, places)


def trace(x):
    return ops.trace(x[:, :8]) * x


def transpose_of_product(x, y):
    return ops.matmul(x, y.T).T


def unbind(x):
    return ops.unbind(x, 0)[3] * ops.unbind(x, 0)[4]


def variance_of_all(x):
    return x.var() * x


def vsplit(x):
    return ops.vsplit(x, 2)[0] * ops.vsplit(x, 2)[1]


def weighted_mean(x, y):
    weights = ops.exp(y)
    return (x * weights).sum() / weights.sum()


def xlogy(x, y):
    return ops.xlogy(x, y * y + 0.5)


def _named(name):
    function = getattr(ops, name)
    if name in POSITIVE:
        return lambda x: function(x * x + 0.5)
    if name in SMALL:
        return lambda x: function(ops.tanh(x) * 0.9)
    if name in IN_STEPS:
        return lambda x: x * function(x * 3.0)
    return lambda x: function(x)


def _of_two(name):
    function = getattr(ops, name)
    if name in COMPARED:
        return lambda x, y: x * function(x, y).astype(ms.float32)
    return lambda x, y: function(x, y)


_defined = {
    name: function
    for name, function in list(globals().items())
    if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == __name__
}
_named_ones = {name: _named(name) for name in ELEMENTWISE if name not in (*OF_TWO, *COMPARED) and hasattr(ops, name)}
_named_ones |= {name: _of_two(name) for name in (*OF_TWO, *COMPARED) if hasattr(ops, name)}
FUNCTIONS = {**spmd_functions.FUNCTIONS, **_named_ones, **_defined}
TAKES_TWO = {name for name, function in FUNCTIONS.items() if len(inspect.signature(function).parameters) == 2}
