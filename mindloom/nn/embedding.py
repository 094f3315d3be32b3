# SPDX-License-Identifier: Apache-2.0
"""Learned embeddings: words, positions, queries."""

import itertools

import mindspore
from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Initializer, Normal, TruncatedNormal, initializer

from mindloom.model_config import DecoderConfig


class Embedding(nn.Cell):
    """Rows of a float32 table, looked up by id."""

    def __init__(self, num_rows: int, hidden_size: int, init: Initializer):
        super().__init__()
        self.weight = Parameter(initializer(init, (num_rows, hidden_size), mstype.float32))
        self.gather = ops.Gather()

    def construct(self, ids):  # (B, T) -> (B, T, D)
        return self.gather(self.weight, ids, 0)


class TokenEmbedding(nn.Cell):
    """Word plus position embedding, then dropout, as rows of the residual stream."""

    def __init__(self, config: DecoderConfig, dtype: mstype.Type):
        super().__init__()
        self.word = Embedding(config.vocab_size, config.hidden_size, Normal(config.embedding_init_std))
        self.position = Embedding(config.seq_len, config.hidden_size, TruncatedNormal(config.embedding_init_std))
        self.hidden_size = config.hidden_size
        self.dtype = dtype
        self.add = ops.Add()
        self.cast = ops.Cast()
        self.reshape = ops.Reshape()
        self.dropout = Dropout(config.dropout_rate)

    def construct(self, tokens, positions):  # (B, T), (B, T) -> (B*T, D)
        x = self.add(self.word(tokens), self.position(positions))
        x = self.reshape(x, (-1, self.hidden_size))  # (B, T, D) -> (B*T, D)
        return self.cast(self.dropout(x), self.dtype)


_dropouts = itertools.count(1)


class Dropout(nn.Cell):
    """Zeroes a share of the entries while training; nothing at rate 0 or when not training.

    With `mindspore.set_seed` each instance draws its own sequence of masks, the same in every process and every run;
    on CPU only the first five of each: there MindSpore's kernel later draws in threads whose number it finds by timing.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.active = rate > 0
        seed = mindspore.get_seed()
        seeds = (0, 0) if seed is None else (seed, next(_dropouts))  # two zeros: other masks in every process
        self.dropout = ops.Dropout(1.0 - rate, *seeds)

    def construct(self, x):
        if self.active and self.training:
            x, _ = self.dropout(x)
        return x
