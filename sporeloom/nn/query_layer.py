# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha's top query layer: the last layer's queries are learned, one for each position."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.blocks import DecoderLayer
from sporeloom.nn.decoder import Decoder
from sporeloom.nn.embedding import Embedding


class QueryLayer(DecoderLayer):
    """A decoder layer whose queries are embeddings of the positions: neither normed nor added to the stream."""

    def construct(self, x, query, bias, slots=None, dropout_keys=None, losses=None, of_tokens=None):
        a = self.attention_norm(x)
        a, losses = self.attend(query, a, bias, None, slots, dropout_keys, losses, of_tokens)
        x = self.attention_add(x, a)
        return self.mlp_add(x, self.mlp(self.mlp_norm(x), dropout_keys)), losses


class QueryEmbedding(nn.Cell):
    """The learned query of each position, as rows next to the residual stream."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__()
        self.table = Embedding(specs.within("table"))
        self.hidden_size, self.dtype = config.hidden_size, dtype
        self.cast, self.reshape = ops.Cast(), ops.Reshape()

    def construct(self, positions):  # (B, T) -> (B*T, D)
        return self.cast(self.reshape(self.table(positions), (-1, self.hidden_size)), self.dtype)


class TopQueryDecoder(Decoder):
    """A decoder that ends in a top query layer."""

    def build_top(self, config, specs, dtype):
        self.query_embedding = QueryEmbedding(config, specs.within("query_embedding"), dtype)
        self.query_layer = QueryLayer(config, specs.within("query_layer"), dtype, config.num_layers - 1)
        self.norm_first = config.final_norm == "before_query"

    def top(self, x, positions, bias, slots, dropout_keys, losses=None, of_tokens=None):
        query = self.query_embedding(positions)
        if self.norm_first:
            return self.query_layer(self.final_norm(x), query, bias, slots, dropout_keys, losses, of_tokens)
        x, losses = self.query_layer(x, query, bias, slots, dropout_keys, losses, of_tokens)
        return self.final_norm(x), losses


def decoder_of(config: ModelConfig) -> Decoder:
    """Build the network of a configuration."""
    return TopQueryDecoder(config) if config.query_layer else Decoder(config)
