# SPDX-License-Identifier: Apache-2.0
"""Learned embeddings: tokens, positions, queries."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Initializer, Normal, TruncatedNormal, initializer

from sporeloom.models.config import ModelConfig
from sporeloom.nn.dropout import Dropout


class Embedding(nn.Cell):
    """Rows of a float32 table, looked up by id."""

    def __init__(self, num_rows: int, hidden_size: int, init: Initializer):
        super().__init__()
        self.weight = Parameter(initializer(init, (num_rows, hidden_size), mstype.float32))
        self.gather = ops.Gather()

    def construct(self, ids):  # of any shape: (...) -> (..., D)
        return self.gather(self.weight, ids, 0)


class TokenEmbedding(nn.Cell):
    """Token embedding, plus that of the position where positions are learned, then dropout, as rows of the
    residual stream."""

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        self.word = Embedding(config.vocab_size, config.hidden_size, Normal(config.embedding_init_std))
        self.has_positions = config.position == "learned"
        if self.has_positions:
            self.position = Embedding(config.seq_len, config.hidden_size, TruncatedNormal(config.embedding_init_std))
            self.add, self.reshape = ops.Add(), ops.Reshape()
        self.hidden_size, self.dtype = config.hidden_size, dtype
        self.cast = ops.Cast()
        self.flat_tokens = ops.Reshape()
        self.vocab_size = config.vocab_size
        self.has_domains = config.num_domains > 1
        if self.has_domains:
            self.token_of = ops.FloorMod()
        self.dropout = Dropout(config.dropout_rate)

    def construct(self, tokens, positions, dropout_keys=None):  # (B, T) each -> (B*T, D)
        if self.has_domains:  # see HashRouter
            tokens = self.token_of(tokens, self.vocab_size)
        x = self.word(self.flat_tokens(tokens, (-1,)))
        if self.has_positions:
            x = self.add(x, self.reshape(self.position(positions), (-1, self.hidden_size)))  # (B, T, D) -> (B*T, D)
        return self.cast(self.dropout(x, dropout_keys), self.dtype)
