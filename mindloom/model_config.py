# SPDX-License-Identifier: Apache-2.0
"""What describes a decoder model: its dimensions and choices. No MindSpore here, so that tools can check first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mindloom.errors import ConfigError
from mindloom.numbers import Count, Natural, NotNegative, Positive, Rate, number_problems

Activation = Literal["gelu", "gelu_tanh", "fast_gelu"]
FinalNorm = Literal["before_query", "after_query"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions of a decoder with a top query layer (PanGu-alpha, CodeGeeX)."""

    vocab_size: Count
    """Rows of the word embedding, and width of the logits."""
    hidden_size: Count
    num_layers: Count
    """Layers INCLUDING the top query layer, as MindSpore's originals count; Megatron's --num-layers is one less."""
    num_heads: Count
    seq_len: Count = 1024
    """Longest context, tokens: rows of the position embeddings."""
    activation: Activation = "gelu_tanh"
    """Of the MLP: gelu (erf), gelu_tanh, fast_gelu (x * sigmoid(1.702 x))."""
    final_norm: FinalNorm = "before_query"
    """Where the last LayerNorm sits. `after_query` is the other network the originals built in pipeline mode."""
    dropout_rate: Rate = 0.1
    """Applied to the embedding, the attention probabilities and both residual branches while training."""
    layer_norm_epsilon: Positive = 1e-5
    eod_id: Natural = 9
    """End-of-document token: attention and positions start anew after it."""
    loss_ignore_id: int = 6
    """Input token whose position is not trained on (the originals' pad or end-of-text token)."""
    compute_dtype: ComputeDtype = "float32"
    """Of matrix products and the residual stream; parameters, LayerNorm, softmax and loss stay float32."""
    embedding_init_std: NotNegative = 0.02
    qkv_init_std: NotNegative = 0.01
    """MindSpore's 'normal' initializer, which the originals used for query, key and value."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        yield from number_problems(self, str)
        if self.num_heads > 0 and self.hidden_size % self.num_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
        for name, kind in (("activation", Activation), ("final_norm", FinalNorm), ("compute_dtype", ComputeDtype)):
            if getattr(self, name) not in get_args(kind):
                yield f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
        if self.eod_id >= self.vocab_size:
            yield f"eod_id {self.eod_id} is outside the vocabulary of {self.vocab_size}"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn_hidden_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        d = self.hidden_size
        embeddings = (self.vocab_size + 2 * self.seq_len) * d
        layer = 12 * d * d + 13 * d  # 4 attention and 2 x 4 MLP matrices; their biases and two LayerNorms
        return embeddings + self.num_layers * layer + 2 * d

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
