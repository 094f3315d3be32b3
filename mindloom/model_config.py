# SPDX-License-Identifier: Apache-2.0
"""What describes a decoder model: its dimensions and choices. No MindSpore here, so that tools can check first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mindloom.errors import ConfigError, did_you_mean

Activation = Literal["gelu", "gelu_tanh", "fast_gelu"]
FinalNorm = Literal["before_query", "after_query"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions of a decoder with a top query layer (PanGu-alpha, CodeGeeX)."""

    vocab_size: int
    """Rows of the word embedding, and width of the logits."""
    hidden_size: int
    num_layers: int
    """Layers INCLUDING the top query layer, as MindSpore's originals count; Megatron's --num-layers is one less."""
    num_heads: int
    seq_len: int = 1024
    """Longest context, tokens: rows of the position embeddings."""
    activation: Activation = "gelu_tanh"
    """Of the MLP: gelu (erf), gelu_tanh, fast_gelu (x * sigmoid(1.702 x))."""
    final_norm: FinalNorm = "before_query"
    """Where the last LayerNorm sits. `after_query` is the other network the originals built in pipeline mode."""
    dropout_rate: float = 0.1
    """Applied to the embedding, the attention probabilities and both residual branches while training."""
    layer_norm_epsilon: float = 1e-5
    eod_id: int = 9
    """End-of-document token: attention and positions start anew after it."""
    loss_ignore_id: int = 6
    """Input token whose position is not trained on (the originals' pad or end-of-text token)."""
    compute_dtype: ComputeDtype = "float32"
    """Of matrix products and the residual stream; parameters, LayerNorm, softmax and loss stay float32."""
    embedding_init_std: float = 0.02
    qkv_init_std: float = 0.01
    """MindSpore's 'normal' initializer, which the originals used for query, key and value."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_len"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, got {getattr(self, name)}"
        if self.num_heads > 0 and self.hidden_size % self.num_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
        for name, kind in (("activation", Activation), ("final_norm", FinalNorm), ("compute_dtype", ComputeDtype)):
            if getattr(self, name) not in get_args(kind):
                yield f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
        if not 0 <= self.dropout_rate < 1:
            yield f"dropout_rate must be in [0, 1), got {self.dropout_rate}"
        if not 0 <= self.eod_id < self.vocab_size:
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


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def override(config: DecoderConfig, values: dict[str, Any], source: str) -> DecoderConfig:
    """A copy of `config` with the fields of `values` replaced; `source` names where they came from.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type or range.
    """
    kinds = get_type_hints(type(config))
    problems = []
    for name, value in values.items():
        if name not in kinds:
            problems.append(f"{source}: {name} is not a field of {type(config).__name__}{did_you_mean(name, kinds)}")
        elif not _fits(value, kinds[name]):
            wanted = " | ".join(map(str, get_args(kinds[name]))) or kinds[name].__name__
            problems.append(f"{source}: {name} must be {wanted}, got {value!r}")
    if problems:
        raise ConfigError(problems)
    try:
        return dataclasses.replace(config, **values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {problem}" for problem in error.problems) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected, got {type(value).__name__}")
    return value
