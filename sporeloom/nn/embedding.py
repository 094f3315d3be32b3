# SPDX-License-Identifier: Apache-2.0
"""Learned embeddings: tokens, positions, queries."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.dropout import Dropout
from sporeloom.nn.parameter import declared_parameter


class Embedding(nn.Cell):
    """Rows of a float32 table, looked up by id."""

    def __init__(self, specs: ParameterSpecs):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.gather = ops.Gather()

    def construct(self, ids):  # of any shape: (...) -> (..., D)
        return self.gather(self.weight, ids, 0)


class TokenEmbedding(nn.Cell):
    """Token embedding, plus that of the position where positions are learned, then dropout, as rows of the
    residual stream."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.word = Embedding(specs.within("word"))
        self.has_positions = config.position == "learned"
        if self.has_positions:
            self.position = Embedding(specs.within("position"))
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
