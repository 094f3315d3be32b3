# SPDX-License-Identifier: Apache-2.0
"""Functions of (8, 12), one operator or a few each, by which `spmd_networks` sweeps the handlers of operators.

Not `ops.pad` by a constant: from its second call on, MindSpore 2.9's own gradient is another in graph mode than in PyNative
mode, on one device.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

ROWS, COLUMNS = 8, 12
PLACES = Tensor(np.array([3, 0, 7, 1, 3, 2, 6, 5], np.int32))
CLASSES = Tensor(np.array([3, 0, 7, 1, 11, 2, 6, 5], np.int32))
PAIRS = Tensor(np.array([[0, 3], [7, 11], [3, 0]], np.int32))
COLUMN = Tensor(np.array([[2], [0], [11], [5], [5], [1], [7], [3]], np.int32))
SOME = Tensor(np.random.default_rng(2).random((ROWS, COLUMNS)).astype(np.float32))
THREE = Tensor(np.random.default_rng(3).random((3,)).astype(np.float32))


def images(x):
    return x.reshape(4, 2, 3, 4)


def argmax(x):
    return x * ops.argmax(x, 1).astype(ms.float32).expand_dims(1)


def argmax_of_rows(x):
    return x * ops.argmax(x, 0).astype(ms.float32)


def argsort(x):
    return x * ops.argsort(x, 1).astype(ms.float32)


def adaptive_pool(x):
    return ops.adaptive_avg_pool2d(images(x), (3, 2))


def bmm(x):
    return ops.bmm(x.reshape(4, 2, 12), x.reshape(4, 12, 2))


def broadcast(x):
    return ops.broadcast_to(x.expand_dims(1), (ROWS, 3, COLUMNS))


def cat_of_rows(x):
    return ops.cat((x, x * x), 0)


def cat_of_columns(x):
    return ops.cat((x, x * x), 1)


def chunk(x):
    return ops.chunk(x, 3, 1)[1] * ops.chunk(x, 3, 1)[0]


def clamp(x):
    return ops.clamp(x, -0.5, 0.5)


def cosine(x):
    return ops.cosine_similarity(x, SOME)


def cross_entropy(x):
    return ops.cross_entropy(x, CLASSES)


def cross_entropy_smooth(x):
    return ops.cross_entropy(x, CLASSES, label_smoothing=0.1)


def cross_entropy_sum(x):
    return ops.cross_entropy(x, CLASSES, reduction="sum") * 0.1


def cross_entropy_none(x):
    return ops.cross_entropy(x, CLASSES, reduction="none")


def cumprod(x):
    return ops.cumprod(x, 1)


def cumsum_of_rows(x):
    return ops.cumsum(x, 0)


def cumsum_of_columns(x):
    return ops.cumsum(x, 1)


def divergence(x):
    return ops.kl_div(ops.log_softmax(x, -1), SOME, "mean")


def divergence_sum(x):
    return ops.kl_div(ops.log_softmax(x, -1), SOME, "sum")


def divergence_batch(x):
    return ops.kl_div(ops.log_softmax(x, -1), SOME, "batchmean")


def diag(x):
    return ops.diag(x[0])


def erf(x):
    return ops.erf(x)


def flatten(x):
    return ops.flatten(images(x))


def flip(x):
    return ops.flip(x, (0,)) * x


def gather_of_rows(x):
    return ops.gather(x, PLACES, 0)


def gather_of_columns(x):
    return ops.gather(x, PLACES, 1)


def gather_elements(x):
    return ops.gather_elements(x, 1, COLUMN)


def gather_nd(x):
    return ops.gather_nd(x, PAIRS)


def gelu(x):
    return ops.gelu(x)


def gelu_tanh(x):
    return ops.gelu(x, approximate="tanh")


def glu(x):
    return ops.glu(x)


def huber(x):
    return ops.huber_loss(x, SOME)


def index_one_column(x):
    return x[:, 1]


def index_one_row(x):
    return x[2]


def index_some(x):
    return x[1:6, ::2]


def index_ellipsis(x):
    return images(x)[..., 1:3]


def interpolate(x):
    return ops.interpolate(images(x), size=(6, 8), mode="bilinear")


def leaky_relu(x):
    return ops.leaky_relu(x, 0.1)


def logsumexp(x):
    return ops.logsumexp(x, 1)


def logsumexp_of_rows(x):
    return ops.logsumexp(x, 0)


def log_softmax(x):
    return ops.log_softmax(x, 1)


def logcumsumexp(x):
    return ops.logcumsumexp(x, 0)


def masked_fill(x):
    return ops.masked_fill(x, x > 0, 1.5)


def matmul(x):
    return ops.matmul(x, x.T) * 0.1


def matmul_of_three(x):
    return ops.matmul(x.reshape(2, 4, 12), x.reshape(2, 12, 4))


def max_of_columns(x):
    return ops.max(x, axis=1)[0]


def max_of_rows(x):
    return ops.max(x, axis=0)[0]


def max_of_all(x):
    return x.max() * x


def maximum(x):
    return ops.maximum(x, SOME)


def mean_of_rows(x):
    return x.mean(0)


def mean_of_all(x):
    return x.mean() * x


def median(x):
    return ops.median(x, 1)[0]


def meshgrid(x):
    return ops.meshgrid(x[0], x[1])[0]


def min_of_columns(x):
    return ops.min(x, axis=1)[0]


def nll(x):
    return ops.nll_loss(ops.log_softmax(x, -1), CLASSES)


def norm(x):
    return ops.norm(x, dim=1)


def norm_of_all(x):
    return ops.norm(x) * x


def normalize(x):
    return ops.L2Normalize(axis=1)(x)


def one_hot(x):
    return ops.one_hot(CLASSES, COLUMNS) * x


def one_norm(x):
    return ops.norm(x, ord=1, dim=1)


def outer(x):
    return ops.outer(x[0], x[1])


def pad_reflect(x):
    return ops.pad(images(x), (1, 1, 1, 1), mode="reflect")


def pool(x):
    return ops.max_pool2d(images(x), 2, 1)


def pool_mean(x):
    return ops.avg_pool2d(images(x), 2, 1)


def prelu(x):
    return ops.prelu(x, Tensor([0.2], ms.float32))


def prod(x):
    return ops.prod(x, 1)


def prod_of_rows(x):
    return ops.prod(x, 0)


def times_range(x):
    return x * ops.arange(0, COLUMNS).astype(ms.float32)


def repeat(x):
    return ops.repeat_interleave(x, 2, 1)


def scatter(x):
    return ops.scatter(x, 1, COLUMN, COLUMN.astype(ms.float32))


def scatter_add(x):
    return ops.tensor_scatter_add(x, PAIRS, THREE)


def scatter_onto_zeros(x):
    return ops.scatter_nd(PLACES.expand_dims(1), x, (9, COLUMNS))


def segment_max(x):
    return ops.unsorted_segment_max(x, PLACES, 8)[:3]


def segment_sum(x):
    return ops.unsorted_segment_sum(x, PLACES, 8)


def select(x):
    return ops.where(x > SOME, x, x * x)


def silu(x):
    return ops.silu(x)


def smooth_l1(x):
    return ops.smooth_l1_loss(x, SOME)


def smooth_l1_sum(x):
    return ops.smooth_l1_loss(x, SOME, reduction="sum") * 0.1


def softmax(x):
    return ops.softmax(x, 1)


def softmax_of_rows(x):
    return ops.softmax(x, 0)


def softplus(x):
    return ops.softplus(x)


def sort(x):
    return ops.sort(x, 1)[0]


def sort_of_rows(x):
    return ops.sort(x, 0)[0]


def split(x):
    return ops.split(x, 6, axis=1)[1]


def squared_error(x):
    return ops.mse_loss(x, SOME)


def squeeze(x):
    return x.reshape(ROWS, 1, COLUMNS).squeeze(1) * x


def stack(x):
    return ops.stack((x, x * x), 1)


def standard_deviation(x):
    return x.std(axis=0)


def sum_of_all(x):
    return x.sum() * 0.1 * x


def swap(x):
    return x.swapaxes(0, 1)


def tile(x):
    return ops.tile(x, (2, 1))


def topk(x):
    return ops.topk(x, 3, -1)[0]


def tril(x):
    return ops.tril(x)


def unstack(x):
    return ops.unstack(x, axis=1)[1] * ops.unstack(x, axis=1)[0]


def variance(x):
    return x.var(axis=0)


def with_logits(x):
    return ops.binary_cross_entropy_with_logits(x, SOME, SOME, SOME)


def with_logits_none(x):
    return ops.binary_cross_entropy_with_logits(x, SOME, SOME, SOME, reduction="none")


def binary_entropy(x):
    return ops.binary_cross_entropy(ops.sigmoid(x), SOME)


def triu(x):
    return ops.triu(x)


def any_of_rows(x):
    return x * ops.any(x > 1.0, 0).astype(ms.float32)


def all_of_columns(x):
    return x * ops.all(x > -1.0, 1).astype(ms.float32).expand_dims(1)


def cdist(x):
    return ops.cdist(x[:2], x[2:4])


def cross(x):
    return ops.cross(x.reshape(ROWS, 4, 3), SOME.reshape(ROWS, 4, 3), dim=2)


def floor(x):
    return ops.floor(x) * x


def hardtanh(x):
    return ops.hardtanh(x)


def index_select(x):
    return ops.index_select(x, 0, PLACES)


def lerp(x):
    return ops.lerp(x, SOME, 0.3)


def movedim(x):
    return ops.movedim(images(x), 1, 3)


def permute(x):
    return ops.permute(images(x), (3, 0, 2, 1))


def power(x):
    return ops.pow(ops.abs(x) + 0.1, 1.5)


def rsqrt(x):
    return ops.rsqrt(x * x + 1.0)


def unfold(x):
    return ops.unfold(images(x), (2, 2))


def viewed(x):
    return x.view(4, 24)


FUNCTIONS = {
    name: function
    for name, function in list(globals().items())
    if callable(function) and name not in ("Tensor", "images")
}
