# SPDX-License-Identifier: Apache-2.0
"""Configuration of a decoder: its dimensions, and the kind of each part. Defaults are PanGu-alpha's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Depth, Natural, NotNegative, Positive, Rate, annotated_types, number_problems
from sporeloom.models.latent import LatentConfig
from sporeloom.models.rope_scaling import RopeScaling
from sporeloom.models.streams import IndexerConfig, StreamsConfig, fields_of_layers, further_problems

Activation = Literal["gelu", "gelu_tanh", "fast_gelu", "silu"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
AttentionKernel = Literal["auto", "plain", "flash"]
MTPInput = Literal["before_norm", "after_norm"]

NO_LABEL = -1
"""Label of a token that no other follows: it is padding, which experts do not process."""
FURTHER = (("indexer", IndexerConfig), ("streams", StreamsConfig))
"""Parts of openPangu 2.0."""


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
class ExpertConfig:
    """Experts in place of a layer's MLP, and the router that assigns tokens to them. E experts, k of which process
    each token."""

    num_experts: Count
    """E."""
    experts_per_token: Count
    """k."""
    router: Literal["softmax", "grouped", "sigmoid", "hash"] = "softmax"
    """softmax: the k most probable. grouped: softmax over all, then the most probable of each of k groups of neighbours
    (MoGE). sigmoid: the k of highest sigmoid. hash: fixed by the token's id, nothing to train."""
    num_groups: Count = 1
    """Groups of neighbouring experts; a token's experts are in the `groups_per_token` groups whose two best experts have
    the highest sum of probabilities. For router: sigmoid or softmax."""
    groups_per_token: Count = 1
    normalize: Literal["none", "before_drop", "after_drop"] = "none"
    """Whether the combine weights of a token's experts are divided by their sum, and whether dropped choices are
    in it."""
    ffn_hidden_size: Count | None = None
    """Width of each expert; default: that of the model's MLP."""
    shared_ffn_hidden_size: Natural = 0
    """Width of the shared expert, which every token passes, unweighted; 0: there is none."""
    first_dense_layers: Natural = 0
    """Number of first layers that keep their MLP."""
    layer_frequency: Count = 1
    """Interval of the layers with experts among the others: 2 is layers 1, 3, 5, ... A top query layer never has
    experts."""
    router_scale: bool = False
    """Each expert's combine weight is multiplied by a learned factor of its own."""
    routed_scaling_factor: Positive = 1.0
    """Factor of all combine weights."""
    capacity_factor: Positive | None = None
    """In training an expert takes at most ceil(k * tokens * this / E) tokens of a group; further ones are dropped.
    Default: unlimited, no token is dropped. Outside of training no token is dropped either."""
    capacity_group: Count | None = None
    """Tokens of a group, neighbours in the batch; default: a sequence. This, not the mesh, determines which tokens
    are dropped."""
    balance: Literal["all", "first"] = "all"
    """Choices that the load-balancing loss counts: all k of a token or its first."""
    balance_over: Literal["group", "batch"] = "group"
    """Tokens over which it is computed: each group of `capacity_group`, or the full (micro)batch."""
    balance_loss: NotNegative = 0.0
    """Coefficient of the load-balancing loss, which is E * sum over experts (fraction of the choices * mean
    probability), of each layer."""
    router_z_loss: NotNegative = 0.0
    """Coefficient of the router z-loss, which is the mean of log(sum(exp(router logits)))^2, of each layer."""
    balance_bias_rate: NotNegative = 0.0
    """Above 0: probabilities are compared with a bias of each expert, which every step moves by this much towards
    balance."""
    correction_bias: bool = False
    """There is such a bias whatever that rate is, as in published models: it affects which experts are chosen, not their
    combine weights."""
    hash_seed: Natural = 0
    """Random seed of the hash router's map."""
    num_domains: Count = 1
    """For the hash router: number of groups of neighbouring experts; a token's expert is in the group of its
    domain."""
    domain: Natural = 0
    """Domain of text without a domain of its own."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        wrong = [*number_problems(self, lambda name: f"experts.{name}"), *_choice_problems(self, "experts.")]
        yield from wrong
        if wrong:
            return
        experts, chosen = self.num_experts, self.experts_per_token
        if chosen > experts:
            yield f"experts.experts_per_token {chosen} is more than the num_experts {experts}"
        elif self.router == "grouped" and experts % chosen:
            yield (
                f"experts.num_experts {experts} is not divisible by the experts_per_token {chosen}: "
                "a grouped router takes one expert of each of as many groups"
            )
        if self.router == "hash":
            if chosen > 1:
                yield f"experts.experts_per_token must be 1 with router: hash, got {chosen}"
            trained = ("router_scale", "balance_loss", "router_z_loss", "balance_bias_rate", "correction_bias")
            if given := [name for name in trained if getattr(self, name)]:
                yield f"experts.{given[0]}: a hash router has nothing to train; remove it"
            if experts % self.num_domains:
                yield f"experts.num_experts {experts} is not divisible by the num_domains {self.num_domains}"
            elif self.domain >= self.num_domains:
                yield f"experts.domain {self.domain}: num_domains is {self.num_domains}, counted from 0"
        elif self.num_domains > 1 or self.domain:
            yield "experts.num_domains and domain are for router: hash"
        yield from self._group_problems()
        if self.normalize == "after_drop" and self.capacity_factor is None:
            yield "experts.normalize after_drop: without capacity_factor nothing is dropped; write before_drop"

    def _group_problems(self) -> Iterator[str]:
        groups, kept = self.num_groups, self.groups_per_token
        if groups > 1 and self.router not in ("sigmoid", "softmax"):
            yield f"experts.num_groups is for router: sigmoid or softmax, not {self.router}"
        elif self.num_experts % groups or (groups > 1 and self.num_experts // groups < 2):
            yield f"experts.num_experts {self.num_experts} do not make num_groups {groups} equal groups of 2 or more"
        elif kept > groups:
            yield f"experts.groups_per_token {kept} is more than the num_groups {groups}"
        elif self.experts_per_token > self.num_experts // groups * kept:
            yield (
                f"experts.experts_per_token {self.experts_per_token} is more than the "
                f"{self.num_experts // groups * kept} experts of groups_per_token {kept} groups"
            )

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the probabilities that experts are chosen by."""
        return self.correction_bias or self.balance_bias_rate > 0

    def capacity(self, tokens: int) -> int:
        """Number of tokens that an expert takes of a group of this size, in training."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.experts_per_token * tokens * self.capacity_factor / self.num_experts))


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
        for name, kind in (
            ("rope_scaling", RopeScaling),
            ("latent", LatentConfig),
            ("experts", ExpertConfig),
            *FURTHER,
        ):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, kind(**getattr(self, name)))
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        wrong = list(number_problems(self, str))
        yield from wrong
        yield from _choice_problems(self)
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
        yield from further_problems(self)
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
        return (self.latent.kv_width, self.latent.rope_dim) if self.latent else (self.kv_size, self.kv_size)

    @property
    def has_convolutions(self) -> bool:
        """Whether attention has causal convolutions."""
        return self.latent is not None and self.latent.conv_width > 0

    def has_indexer(self, layer: int) -> bool:
        """Whether layer number `layer` has sparse attention."""
        return self.indexer is not None and layer in self.indexer.layers

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end a generated text."""
        return tuple(dict.fromkeys((self.eod_id, *self.stop_ids)))

    def with_layers(self, count: int) -> ModelConfig:
        """This model with the first `count` of its layers."""
        return dataclasses.replace(self, **fields_of_layers(self, count))

    def with_value_head(self) -> ModelConfig:
        """The reward model, or critic, of this size."""
        return dataclasses.replace(self, value_head=True, tied_embedding=False, num_mtp_layers=0)

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
        """Offset that marks a token's id with a domain (see `sporeloom.nn.moe.HashRouter`)."""
        if domain is None:
            return 0
        return (domain - self.mixture.domain) % self.num_domains * self.vocab_size

    @property
    def output_std(self) -> float:
        """Initial standard deviation of the two matrices of a layer that write to the residual stream."""
        std = self.output_init_std
        return self.init_std / math.sqrt(2 * self.num_layers) if std is None else std

    @property
    def flash_problem(self) -> str | None:
        """Why FlashAttentionScore cannot compute this model's attention. Source: its documentation in MindSpore
        2.9."""
        if self.latent:
            return "latent attention, whose values are not as wide as its keys"
        if self.head_size % 16 or self.head_size > 512:
            return f"heads of {self.head_size} features; it takes multiples of 16 up to 512"
        if self.dropout_rate:
            return f"dropout_rate {self.dropout_rate}; probabilities that are never kept are not dropped"
        return None

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


def _choice_problems(config: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in annotated_types(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            yield f"{prefix}{name} must be one of {', '.join(get_args(hint))}, got {getattr(config, name)!r}"
