# SPDX-License-Identifier: Apache-2.0
"""What describes a decoder: its dimensions, and which kind of each part it has. Defaults are PanGu-alpha's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mindloom.errors import ConfigError
from mindloom.numbers import Count, Natural, NotNegative, Positive, Rate, number_problems

Activation = Literal["gelu", "gelu_tanh", "fast_gelu", "silu"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


class Widths:
    """Widths that follow from others, for what says those. Of a number that is left out there is None or 0."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    ffn_hidden_size: int | None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all queries together."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all keys together, and of all values."""
        return self.kv_heads * self.head_size

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def misfits(self) -> list[str]:
        """Numbers of heads that do not divide what they share."""
        if not self.head_dim and self.hidden_size % self.num_heads:
            return [f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; give head_dim"]
        if self.num_heads % self.kv_heads:
            return [f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"]
        return []


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Widths):
    """A decoder of `mindloom.nn`. Lengths in tokens, widths in features."""

    vocab_size: Count
    """Rows of the word embedding, and width of the logits."""
    hidden_size: Count
    num_layers: Count
    """All of them, the top query layer included where there is one; Megatron's --num-layers is then one less."""
    num_heads: Count
    """Heads of queries."""
    num_kv_heads: Count | None = None
    """Heads of keys and values: fewer than of queries is grouped-query attention, 1 multi-query; without it, as many."""
    head_dim: Count | None = None
    """Width of a head; without it, hidden_size / num_heads."""
    ffn_hidden_size: Count | None = None
    """Width of the MLP; without it, four times hidden_size."""
    seq_len: Count = 1024
    """Longest context, tokens: rows of the learned embeddings of positions."""
    block: Literal["sequential", "parallel", "sandwich"] = "sequential"
    """Of a layer: attention, then MLP, each on a norm; both on one norm; or each between two norms."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm, which subtracts no mean."""
    layer_norm_epsilon: Positive = 1e-5
    """Of every norm."""
    position: Literal["learned", "rotary"] = "learned"
    """How a token knows its place: an embedding that is added, or queries and keys that are turned (RoPE)."""
    rope_theta: Positive = 10000.0
    rope_dim: Count | None = None
    """How many features of each head, the first ones, are turned; without it, all."""
    rope_pairs: Literal["half", "adjacent"] = "half"
    """Which two features turn together: i and i + rope_dim / 2, or 2 i and 2 i + 1."""
    activation: Activation = "gelu_tanh"
    """Of the MLP: gelu (erf), gelu_tanh, fast_gelu (x * sigmoid(1.702 x)), silu (x * sigmoid(x))."""
    gated_mlp: bool = False
    """activation(gate(x)) * up(x) instead of activation(up(x)): with silu it is SwiGLU."""
    qkv_bias: bool = True
    output_bias: bool = True
    """Of the attention's output."""
    mlp_bias: bool = True
    norm_bias: bool = True
    """RMSNorm has none."""
    tied_embedding: bool = True
    """The head uses the word embedding's table."""
    logits_scale: Positive = 1.0
    """What logits are multiplied by."""
    query_layer: bool = True
    """The last layer is PanGu-alpha's top query layer, whose queries are learned for each position."""
    final_norm: Literal["before_query", "after_query"] = "before_query"
    """Where the last norm sits beside a top query layer. `after_query` is what the originals built in pipeline mode."""
    z_loss: NotNegative = 0.0
    """Added to the loss: this much of the mean of log(sum(exp(logits)))^2."""
    dropout_rate: Rate = 0.1
    """Applied to the embedding, the attention probabilities and both residual branches while training."""
    eod_id: Natural = 9
    """End-of-document token: attention and positions start anew after it."""
    loss_ignore_id: int = 6
    """Input token whose position is not trained on (the originals' pad or end-of-text token)."""
    stop_ids: tuple[Natural, ...] = ()
    """Tokens that end a generated text besides eod_id."""
    compute_dtype: ComputeDtype = "float32"
    """Of matrix products and the residual stream; parameters, norms, softmax and loss stay float32."""
    embedding_init_std: NotNegative = 0.02
    qkv_init_std: NotNegative = 0.01
    """MindSpore's 'normal' initializer, which the originals used for query, key and value."""
    init_std: NotNegative = 0.02
    """Of the other matrices."""
    output_init_std: NotNegative | None = None
    """Of the two matrices that write to the residual stream; without it, init_std / sqrt(2 num_layers)."""
    sandwich_gains: tuple[Positive, ...] = (1.0, 1.0)
    """Initial weight of the norms after attention and after the MLP of a sandwich block."""

    def __post_init__(self) -> None:
        for name in ("stop_ids", "sandwich_gains"):  # lists in JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        wrong = list(number_problems(self, str))
        yield from wrong
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                yield f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(self, name)!r}"
        if wrong:
            return
        if misfits := self.misfits():
            yield from misfits
        elif self.position == "rotary" and (self.rotated % 2 or self.rotated > self.head_size):
            yield f"rope_dim {self.rotated} must be even and at most the {self.head_size} of a head"
        if self.query_layer and (self.position, self.block) != ("learned", "sequential"):
            yield f"query_layer goes with learned positions and sequential blocks, not with {self.position} and {self.block}"
        if len(self.sandwich_gains) != 2:
            yield f"sandwich_gains takes 2 numbers, got {len(self.sandwich_gains)}"
        for token in (self.eod_id, *self.stop_ids):
            if token >= self.vocab_size:
                name = "eod_id" if token == self.eod_id else "stop_ids:"
                yield f"{name} {token} is outside the vocabulary of {self.vocab_size}"

    @property
    def output_std(self) -> float:
        """Initial standard deviation of the two matrices of a layer that write to the residual stream."""
        std = self.output_init_std
        return self.init_std / math.sqrt(2 * self.num_layers) if std is None else std

    @property
    def rotated(self) -> int:
        """Features of a head that RoPE turns."""
        return self.rope_dim or self.head_size

    @property
    def layers(self) -> tuple[str, ...]:
        """Path of each layer in the model."""
        plain = self.num_layers - self.query_layer
        return (*(f"layers.{i}" for i in range(plain)), *(["query_layer"] if self.query_layer else []))

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }
