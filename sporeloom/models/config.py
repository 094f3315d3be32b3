# SPDX-License-Identifier: Apache-2.0
"""Configuration of a decoder: its dimensions, and the kind of each part. Defaults are PanGu-alpha's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Depth, Natural, NotNegative, Positive, Rate, choice_problems, number_problems
from sporeloom.models.parts import attention, indexer, streams
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.models.parts.indexer import IndexerConfig
from sporeloom.models.parts.latent_attention import LatentConfig
from sporeloom.models.parts.streams import StreamsConfig
from sporeloom.models.rope_scaling import RopeScaling

Activation = Literal["gelu", "gelu_tanh", "fast_gelu", "silu"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
AttentionKernel = Literal["auto", "plain", "flash"]
MTPInput = Literal["before_norm", "after_norm"]

NO_LABEL = -1
"""Label of a token that no other follows: it is padding, which experts do not process."""
PARTS = (
    ("rope_scaling", RopeScaling),
    ("latent", LatentConfig),
    ("experts", ExpertConfig),
    ("indexer", IndexerConfig),
    ("streams", StreamsConfig),
)
"""Fields that have settings of their own."""


class Widths:
    """Widths that follow from others, for files that give the former. A field that is left out is None or 0."""

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
        """List numbers of heads that do not divide the size they must divide."""
        if not self.head_dim and self.hidden_size % self.num_heads:
            return [f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; give head_dim"]
        if self.num_heads % self.kv_heads:
            return [f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"]
        return []


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Widths):
    """A decoder of `sporeloom.nn`. Lengths in tokens, widths in features."""

    vocab_size: Count
    """Rows of the token embedding, and width of the logits."""
    hidden_size: Count
    num_layers: Depth
    """Number of all layers, including the top query layer where there is one; Megatron's --num-layers is then one
    less."""
    num_heads: Count
    """Heads of queries."""
    num_kv_heads: Count | None = None
    """Heads of keys and values: fewer than query heads is grouped-query attention, 1 multi-query; default:
    num_heads."""
    head_dim: Count | None = None
    """Width of a head; default: hidden_size / num_heads."""
    ffn_hidden_size: Count | None = None
    """Width of the MLP; default: four times hidden_size."""
    seq_len: Count = 1024
    """Maximum context length in tokens: rows of the learned position embeddings."""
    block: Literal["sequential", "parallel", "sandwich"] = "sequential"
    """Structure of a layer: attention, then MLP, each on a norm; both on one norm; or each between two norms."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm, which subtracts no mean."""
    layer_norm_epsilon: Positive = 1e-5
    """Epsilon of every norm."""
    position: Literal["learned", "rotary"] = "learned"
    """Encoding of positions: an embedding that is added, or queries and keys that are rotated (RoPE)."""
    rope_theta: Positive = 10000.0
    rope_dim: Count | None = None
    """Number of rotated features of each head, the first ones; default: all."""
    rope_scaling: RopeScaling | None = None
    """Scaled angles; default: unscaled."""
    rope_pairs: Literal["half", "adjacent"] = "half"
    """Pairs of features that rotate together: i and i + rope_dim / 2, or 2 i and 2 i + 1."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP: gelu (erf), gelu_tanh, fast_gelu (x * sigmoid(1.702 x)), silu (x * sigmoid(x))."""
    gated_mlp: bool = False
    """activation(gate(x)) * up(x) instead of activation(up(x)): with silu it is SwiGLU."""
    qkv_bias: bool = True
    output_bias: bool = True
    """Bias of the attention's output."""
    mlp_bias: bool = True
    norm_bias: bool = True
    """Bias of norms; RMSNorm has none."""
    tied_embedding: bool = True
    """The head uses the token embedding."""
    value_head: bool = False
    """One value for each token in place of logits: a reward model or a critic."""
    logits_scale: Positive = 1.0
    """Factor of the logits."""
    query_layer: bool = True
    """The last layer is PanGu-alpha's top query layer, whose queries are learned for each position."""
    final_norm: Literal["before_query", "after_query"] = "before_query"
    """Position of the last norm with a top query layer. `after_query` is what the reference implementation built
    in pipeline mode."""
    num_mtp_layers: Natural = 0
    """Number of multi-token prediction layers: depth d predicts the token d + 1 positions on, in training."""
    mtp_loss_weight: NotNegative = 0.3
    """Coefficient of the mean of their losses."""
    mtp_input: MTPInput = "before_norm"
    """Hidden states that the first of these layers reads: of the model, before or after its final norm. Each further one
    reads those of the layer before, where the norm is that of its head."""
    mtp_repeats_embedding: bool = False
    """Each of these layers is published with a copy of the token embedding; computes nothing."""
    mtp_repeats_head: bool = False
    """Each of these layers is published with a copy of the head; computes nothing."""
    z_loss: NotNegative = 0.0
    """Coefficient of the z-loss, which is the mean of log(sum(exp(logits)))^2."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the embedding, the attention probabilities and both residual branches in training."""
    latent: LatentConfig | None = None
    """Latent attention (MLA) in place of keys and values of each head; default: none."""
    windows: tuple[Natural, ...] = ()
    """Sliding window of each layer, and of each of multi-token prediction: the number of tokens that a token attends to,
    itself included; 0: all. With `latent`; default: no windows."""
    indexer: IndexerConfig | None = None
    """Sparse attention of some layers, with `latent`; default: none."""
    streams: StreamsConfig | None = None
    """Hyper-connections in sandwich blocks; default: one residual stream."""
    experts: ExpertConfig | None = None
    """A mixture of experts in place of the MLP of some layers; default: none."""
    eod_id: Natural = 9
    """End-of-document token: attention and positions start anew after it."""
    loss_ignore_id: int = 6
    """Input token whose position is not trained on (the reference implementation's pad or end-of-text token)."""
    stop_ids: tuple[Natural, ...] = ()
    """Tokens that end a generated text besides eod_id."""
    compute_dtype: ComputeDtype = "float32"
    """Number type of matrix products and the residual stream; parameters, norms, softmax and loss stay float32."""
    attention: AttentionKernel = "auto"
    """plain: the scores of all pairs of tokens are computed and kept. flash: FlashAttentionScore, which keeps
    none. auto: flash on Ascend where head size, type and dropout allow it, plain elsewhere. The same numbers
    but for rounding."""
    embedding_init_std: NotNegative = 0.02
    qkv_init_std: NotNegative = 0.01
    """MindSpore's 'normal' initializer, which the reference implementation used for query, key and value."""
    init_std: NotNegative = 0.02
    """Initial standard deviation of the other matrices."""
    output_init_std: NotNegative | None = None
    """Initial standard deviation of the two matrices that write to the residual stream; default: init_std / sqrt(2
    num_layers)."""
    sandwich_gains: tuple[Positive, ...] = (1.0, 1.0)
    """Initial weight of the norms after attention and after the MLP of a sandwich block."""

    def __post_init__(self) -> None:
        for name in ("stop_ids", "sandwich_gains", "windows"):  # lists in JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, kind in PARTS:
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, kind(**getattr(self, name)))
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        wrong = list(number_problems(self, str))
        yield from wrong
        yield from choice_problems(self)
        if wrong:
            return
        if self.latent:
            yield from self._latent_problems()
        elif misfits := self.misfits():
            yield from misfits
        elif self.position == "rotary" and (self.rotated % 2 or self.rotated > self.head_size):
            yield f"rope_dim {self.rotated} must be even and at most the {self.head_size} of a head"
        if self.rope_scaling and self.position != "rotary":
            yield f"rope_scaling is for position rotary, not {self.position}"
        yield from self._window_problems()
        yield from indexer.problems(self, self.indexer) if self.indexer else ()
        yield from streams.problems(self, self.streams) if self.streams else ()
        if self.query_layer and (self.position, self.block) != ("learned", "sequential"):
            yield (f"query_layer needs learned positions and sequential blocks, not {self.position} and {self.block}")
        if self.num_mtp_layers and (self.query_layer or self.dropout_rate or self.value_head or self.num_domains > 1):
            yield "num_mtp_layers is for models without query_layer, value_head, domains and dropout_rate"
        if self.attention == "flash" and (problem := self.flash_problem):
            yield f"attention flash: {problem}; write plain"
        if self.value_head and self.tied_embedding:
            yield "value_head is not tied to the token embedding: give tied_embedding false, too"
        if len(self.sandwich_gains) != 2:
            yield f"sandwich_gains takes 2 numbers, got {len(self.sandwich_gains)}"
        if self.experts and not any(map(self.has_experts, range(self.num_layers))):
            yield f"experts: none of the {self.num_layers} layers has any; see first_dense_layers and layer_frequency"
        for token in (self.eod_id, *self.stop_ids):
            if token >= self.vocab_size:
                name = "eod_id" if token == self.eod_id else "stop_ids:"
                yield f"{name} {token} is outside the vocabulary of {self.vocab_size}"

    def _window_problems(self) -> Iterator[str]:
        for name in ("windows", "indexer"):
            if getattr(self, name) and self.latent is None:
                yield f"{name} is for models with latent"
        if self.windows and len(self.windows) != self.num_layers + self.num_mtp_layers:
            yield (
                f"windows has {len(self.windows)} entries for num_layers {self.num_layers} and num_mtp_layers "
                f"{self.num_mtp_layers}"
            )

    def _latent_problems(self) -> Iterator[str]:
        if (self.position, self.norm) != ("rotary", "rms"):
            yield f"latent needs position rotary and norm rms, not {self.position} and {self.norm}"
        for name in ("num_kv_heads", "head_dim", "rope_dim"):
            if getattr(self, name) is not None:
                yield f"{name}: latent attention has its own sizes (latent.*); leave it out"

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; all heads of latent attention share what is cached."""
        return 1 if self.latent else super().kv_heads

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys."""
        return self.latent.head_size if self.latent else super().head_size

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Width of what the KV cache holds of a token: all its keys and all its values, or its latent and its shared
        key."""
        return self.latent.cache_widths if self.latent else attention.cache_widths(self)

    @property
    def has_norm_bias(self) -> bool:
        return self.norm_bias and self.norm == "layer"

    @property
    def has_convolutions(self) -> bool:
        """Whether attention has causal convolutions."""
        return self.latent is not None and self.latent.conv_width > 0

    def has_indexer(self, layer: int) -> bool:
        """Whether layer number `layer` has sparse attention."""
        return self.indexer is not None and layer in self.indexer.layers

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexers of sparse attention have a loss in training."""
        return self.indexer is not None and self.indexer.loss_coefficient > 0

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end a generated text."""
        return tuple(dict.fromkeys((self.eod_id, *self.stop_ids)))

    def with_layers(self, count: int) -> ModelConfig:
        """This model with the first `count` of its layers."""
        return dataclasses.replace(self, **fields_of_layers(self, count))

    def without_mtp(self) -> ModelConfig:
        """This model without its layers of multi-token prediction."""
        return dataclasses.replace(self, num_mtp_layers=0, windows=self.windows[: self.num_layers])

    def with_value_head(self) -> ModelConfig:
        """The reward model, or critic, of this size."""
        return dataclasses.replace(self.without_mtp(), value_head=True, tied_embedding=False)

    @property
    def pad_id(self) -> int | None:
        """The padding token of samples; None where `loss_ignore_id` is the end of documents, a part of them."""
        return None if self.loss_ignore_id == self.eod_id else self.loss_ignore_id

    @property
    def num_domains(self) -> int:
        """Number of expert groups for texts of different domains."""
        return self.experts.num_domains if self.experts else 1

    def with_domain(self, domain: int | None) -> ModelConfig:
        """This model, for texts of a domain; None: of its present domain.

        Raises:
            ConfigError: it has no such domain.
        """
        if domain is None:
            return self
        if problem := self.domain_problem(domain):
            raise ConfigError(f"--domain {problem}")
        return dataclasses.replace(self, experts=dataclasses.replace(self.mixture, domain=domain))

    def domain_problem(self, domain: int) -> str | None:
        """Describe why a domain is not valid."""
        if self.num_domains == 1:
            return f"{domain}: the experts of this model have no domains (num_domains of its configuration)"
        if domain >= self.num_domains:
            return f"{domain}: this model has {self.num_domains} domains, counted from 0"
        return None

    def domain_offset(self, domain: int | None) -> int:
        """Offset that marks a token's id with a domain (see `sporeloom.nn.routing.HashRouter`)."""
        if domain is None:
            return 0
        return (domain - self.mixture.domain) % self.num_domains * self.vocab_size

    @property
    def flash_problem(self) -> str | None:
        """Why FlashAttentionScore cannot compute this model's attention."""
        return attention.flash_problem(self) or (self.latent.flash_problem if self.latent else None)

    @property
    def attention_on_ascend(self) -> Literal["plain", "flash"]:
        """Resolved value of `attention` on Ascend."""
        if self.attention == "auto":
            return "plain" if self.flash_problem or self.compute_dtype == "float32" else "flash"
        return self.attention

    @property
    def rotated(self) -> int:
        """Number of features of a head that RoPE rotates."""
        return self.latent.rope_dim if self.latent else self.rope_dim or self.head_size

    @property
    def rotary_width(self) -> int:
        """Number of features of a head that pass through RoPE, rotated or not."""
        return self.latent.rope_dim if self.latent else self.head_size

    @property
    def layers(self) -> tuple[str, ...]:
        """Path of each layer in the model."""
        plain = self.num_layers - self.query_layer
        return (*(f"layers.{i}" for i in range(plain)), *(["query_layer"] if self.query_layer else []))

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` has experts instead of an MLP."""
        if self.experts is None or layer < self.experts.first_dense_layers:
            return False
        if layer >= self.num_layers:  # of multi-token prediction
            return True
        return layer < self.num_layers - self.query_layer and (layer + 1) % self.experts.layer_frequency == 0

    @property
    def mixture(self) -> ExpertConfig:
        """`experts` of a model that has them."""
        assert self.experts is not None
        return self.experts

    @property
    def expert_size(self) -> int:
        """Width of each expert."""
        return (self.experts.ffn_hidden_size if self.experts else None) or self.ffn_size

    def to_dict(self) -> dict[str, Any]:
        """The fields as in config.json."""
        return {name: _as_json(value) for name, value in dataclasses.asdict(self).items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(entry) for name, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def fields_of_layers(config: ModelConfig, count: int) -> dict[str, Any]:
    """The fields of this model with the first `count` of its layers, that depend on their number."""
    indexer, streams = config.indexer, config.streams
    windows = (*config.windows[: config.num_layers][:count], *config.windows[config.num_layers :])
    if indexer:
        layers = tuple(layer for layer in indexer.layers if layer < count)
        indexer = dataclasses.replace(indexer, layers=layers) if layers else None
    if streams:
        streams = dataclasses.replace(streams, norm_layers=tuple(each for each in streams.norm_layers if each < count))
    return {"num_layers": count, "windows": windows, "indexer": indexer, "streams": streams}
