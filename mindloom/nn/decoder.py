# SPDX-License-Identifier: Apache-2.0
"""The decoder with a top query layer that PanGu-alpha and CodeGeeX share.

Shapes: B batch, T tokens, D hidden, V vocabulary. The residual stream is (B*T, D) from the embedding to the head.
"""

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.common.initializer import TruncatedNormal

from mindloom.model_config import DecoderConfig
from mindloom.nn.attention import Attention, DocumentMask, SlotMask
from mindloom.nn.cache import KVCache
from mindloom.nn.dropout import number_dropouts
from mindloom.nn.embedding import Embedding, TokenEmbedding
from mindloom.nn.loss import CrossEntropy
from mindloom.nn.mlp import MLP
from mindloom.nn.norm import LayerNorm


class DecoderLayer(nn.Cell):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, dtype: mstype.Type):
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon, dtype)
        self.attention = Attention(config, dtype)
        self.attention_add = ops.Add()
        self.mlp_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon, dtype)
        self.mlp = MLP(config, dtype)
        self.mlp_add = ops.Add()

    def construct(self, x, bias, slots=None, dropout_keys=None):
        a = self.attention_norm(x)
        x = self.attention_add(x, self.attention(a, a, bias, slots, dropout_keys))
        return self.mlp_add(x, self.mlp(self.mlp_norm(x), dropout_keys))


class QueryLayer(DecoderLayer):
    """A decoder layer whose queries are embeddings of the positions: neither normed nor added to the stream."""

    def construct(self, x, query, bias, slots=None, dropout_keys=None):
        x = self.attention_add(x, self.attention(query, self.attention_norm(x), bias, slots, dropout_keys))
        return self.mlp_add(x, self.mlp(self.mlp_norm(x), dropout_keys))


class QueryEmbedding(nn.Cell):
    """The learned query of each position, as rows beside the residual stream."""

    def __init__(self, config: DecoderConfig, dtype: mstype.Type):
        super().__init__()
        self.table = Embedding(config.seq_len, config.hidden_size, TruncatedNormal(config.embedding_init_std))
        self.hidden_size, self.dtype = config.hidden_size, dtype
        self.cast, self.reshape = ops.Cast(), ops.Reshape()

    def construct(self, positions):  # (B, T) -> (B*T, D)
        return self.cast(self.reshape(self.table(positions), (-1, self.hidden_size)), self.dtype)


class Head(nn.Cell):
    """Logits over the vocabulary with the word embedding's own table."""

    def __init__(self, dtype: mstype.Type):
        super().__init__()
        self.dtype = dtype
        self.pick, self.matmul, self.cast = ops.Gather(), ops.MatMul(transpose_b=True), ops.Cast()

    def construct(self, x, word_table, rows=None):  # (B*T, D), (V, D) -> (B*T or len(rows), V) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        return self.cast(self.matmul(x, self.cast(word_table, self.dtype)), mstype.float32)


class Decoder(nn.Cell):
    """Tokens (B, T) and their positions within documents (B, T) -> logits (B*T, V), float32.

    `rows` picks the rows of (B*T) to give logits for, counted among those this device holds. With caches attached the
    tokens continue what the caches hold, and `slots` says where theirs belong (see `KVCache`). `dropout_keys` (B, T) are
    needed while training with dropout.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        dtype = getattr(mstype, config.compute_dtype)
        self.config = config
        self.embedding = TokenEmbedding(config, dtype)
        self.mask = DocumentMask()
        self.layers = nn.CellList([DecoderLayer(config, dtype) for _ in range(config.num_layers - 1)])
        self.query_embedding = QueryEmbedding(config, dtype)
        self.query_layer = QueryLayer(config, dtype)
        self.final_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon, dtype)
        self.norm_first = config.final_norm == "before_query"
        self.head = Head(dtype)
        number_dropouts(self)

    def attach_caches(self, num_rows: int, capacity: int) -> None:
        """Let attention keep the keys and values of `capacity` tokens for each of `num_rows` rows, in place of any before."""
        self.mask = SlotMask(capacity)
        shape = (num_rows, self.config.num_heads, capacity, self.config.head_dim)
        for name, cell in self.cells_and_names():
            if isinstance(cell, Attention):
                cell.cache = KVCache(shape, cell.dtype)
                cell.cache.update_parameters_name(f"{name}.cache.")

    def construct(self, tokens, positions, rows=None, slots=None, dropout_keys=None):
        bias = self.mask(positions)
        x = self.embedding(tokens, positions, dropout_keys)
        for layer in self.layers:
            x = layer(x, bias, slots, dropout_keys)
        query = self.query_embedding(positions)
        if self.norm_first:
            x = self.query_layer(self.final_norm(x), query, bias, slots, dropout_keys)
        else:
            x = self.final_norm(self.query_layer(x, query, bias, slots, dropout_keys))
        return self.head(x, self.embedding.word.weight, rows)


class DecoderWithLoss(nn.Cell):
    """Training network: a batch in, one number out.

    tokens, labels, positions: (B, T) int32; loss_weights: (B, T) float32, each token's share of the loss (see
    `mindloom.data.batch`). The weights already hold the denominator of the whole batch, so that the losses of its
    microbatches simply add up. dropout_keys: (B, T) int32, with a dropout rate above 0.
    """

    def __init__(self, model: nn.Cell):
        super().__init__()
        self.model = model
        self.loss = CrossEntropy()

    def construct(self, tokens, labels, positions, loss_weights, dropout_keys=None):
        logits = self.model(tokens, positions, dropout_keys=dropout_keys)
        return self.loss(logits, labels, loss_weights)
