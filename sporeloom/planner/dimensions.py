# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a decoder for the cost model, and values that follow from them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Amount, Count, Natural, Positive, number_problems
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.models.config import ExpertConfig, ModelConfig, Widths
from sporeloom.models.parameters import layer_shapes, parameter_shapes
from sporeloom.planner.products import Products, products_of
from sporeloom.strategy.config import Order, stage_of_part


@dataclass(frozen=True, kw_only=True)
class Dimensions(Widths):
    """A decoder-only transformer. Lengths in tokens, widths in features."""

    num_layers: Count
    """Number of all layers; PanGu's top query layer counts as one."""
    hidden_size: Count
    num_heads: Count
    vocab_size: Count
    seq_len: Count
    num_kv_heads: Natural = 0
    """Heads of keys and values: 0 as many as of queries, fewer GQA, one MQA."""
    ffn_hidden_size: Natural = 0
    """Width of the MLP; 0: four times hidden_size."""
    head_dim: Natural = 0
    """Width of a head; 0: hidden_size / num_heads."""
    gated_mlp: bool = False
    """Gated MLPs such as SwiGLU: three matrices instead of two."""
    position_tables: Natural = 1
    """Learned tables of positions: 0 with RoPE or ALiBi, 2 for PanGu and CodeGeeX (positions and top queries)."""
    longest_seq_len: Natural = 0
    """Rows of these tables, where sequences are shorter; 0: seq_len."""
    tied_embedding: bool = True
    """The head is tied to the token embedding."""
    value_head: bool = False
    """The head returns one value for each token, as a reward model's, in place of logits."""
    block: Literal["sequential", "parallel", "sandwich"] = "sequential"
    """parallel: attention and MLP side by side on one norm, half the all-reduces; sandwich: two more norms."""
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    num_experts: Natural = 0
    """Number of experts in a layer; 0: there are none."""
    experts_per_token: Natural = 0
    expert_ffn_size: Natural = 0
    """Width of each expert."""
    shared_ffn_size: Natural = 0
    """Width of the shared expert, which every token passes."""
    expert_layers: Natural = 0
    """Number of layers that have experts instead of an MLP."""
    hash_router: bool = False
    """The router has no trained parameters."""
    router_scale: bool = False
    """The router has a factor for each expert besides its matrix."""
    router_bias: bool = False
    """The router has a correction bias for each expert."""
    router_sums: Natural = 0
    """Number of values of a layer's router losses and counters that are summed over the replicas."""
    router_losses: Natural = 0
    """Number of losses of a layer's router: 0 to 2."""
    expert_rows: Positive = 1.0
    """Computed rows per row that experts get: the capacity factor; E / k without a capacity limit."""
    expert_imbalance: Positive = 1.0
    """Rows of the busiest rank's experts, relative to perfect balance. With fixed shapes, as here, it is 1."""
    attention_matrices: Natural = 0
    """Entries of one layer's attention matrices, where they differ from query, key, value and output (MLA)."""
    cache_width: Natural = 0
    """Entries of the KV cache for a token and layer, where they differ from its keys and values (MLA)."""
    further_entries: Natural = 0
    """Entries of all layers' residual streams and sparse attention, whole on every tensor parallel rank; their
    activations are not counted."""
    mtp_entries: Amount = 0
    """Entries of all layers of multi-token prediction."""
    mtp_layers: Natural = 0
    """Number of these layers, which are in the last stage; their time and activations are not counted."""
    products: Products | None = None
    """Products besides those of a layer of query, key, value, output, MLP and experts."""
    dropout: bool = True
    """Dropout masks are kept for the backward pass."""
    float32_softmax: bool = False
    """Attention probabilities in float32 and masks as numbers, as in this package's models; else 2 bytes and 1."""

    def __post_init__(self) -> None:
        if problems := list(number_problems(self, str)) or self.misfits():
            raise ConfigError(problems)

    @property
    def position_table(self) -> int:
        """Entries of a table of positions."""
        return (self.longest_seq_len or self.seq_len) * self.hidden_size

    @property
    def num_outputs(self) -> int:
        """Number of values that the head returns for each token."""
        return 1 if self.value_head else self.vocab_size

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    @functools.cached_property
    def kinds(self) -> tuple[Dimensions, Dimensions]:
        """The model as if none of its layers had experts, and as if all had."""
        if not self.num_experts:
            return self, self
        return dataclasses.replace(self, expert_layers=0), dataclasses.replace(self, expert_layers=self.num_layers)

    @property
    def expert_share(self) -> float:
        """Fraction of the layers that have experts."""
        return self.expert_layers / self.num_layers

    @property
    def always_used_ffn(self) -> int:
        """Width of the MLP that every token passes, the shared expert in layers with experts; mean of all layers."""
        dense = (self.num_layers - self.expert_layers) * self.ffn_size
        return (dense + self.expert_layers * self.shared_ffn_size) // self.num_layers

    @property
    def layer_matrices(self) -> int:
        """Entries of one layer's matrices, without experts and router."""
        h = self.hidden_size
        attention = self.attention_matrices or 2 * h * (self.query_size + self.kv_size)
        return attention + self.mlp_matrices * h * self.always_used_ffn

    @property
    def expert_parameters(self) -> int:
        """Entries of one expert."""
        biases = (self.mlp_matrices - 1) * self.expert_ffn_size + self.hidden_size
        return self.mlp_matrices * self.hidden_size * self.expert_ffn_size + self.mlp_bias * biases

    @property
    def layer_router(self) -> int:
        """Entries of the router, mean of all layers."""
        width = 0 if self.hash_router else self.hidden_size + self.router_scale + self.router_bias
        return self.expert_layers * self.num_experts * width // self.num_layers

    @property
    def layer_kv(self) -> int:
        """Entries of one layer's parameters for keys and values."""
        return 2 * self.kv_size * (self.hidden_size + self.qkv_bias)

    @property
    def layer_biases_cut(self) -> int:
        """Entries of one layer's biases that tensor parallel shards, those of keys and values among them."""
        qkv = self.qkv_bias * (self.query_size + 2 * self.kv_size)
        return qkv + self.mlp_bias * (self.mlp_matrices - 1) * self.always_used_ffn

    @property
    def layer_biases_whole(self) -> int:
        """Entries of one layer's biases that every tensor parallel rank holds."""
        has_mlp = self.always_used_ffn > 0
        return (self.output_bias + (self.mlp_bias and has_mlp)) * self.hidden_size

    @property
    def norm(self) -> int:
        """Entries of a norm."""
        return (1 + self.norm_bias) * self.hidden_size

    @property
    def mtp_vectors_and_projection(self) -> int:
        """Entries of a layer of multi-token prediction besides those of a layer, whole on every tensor parallel rank."""
        return 2 * self.hidden_size**2 + 3 * self.norm

    @property
    def num_norms(self) -> int:
        """Number of norms in a layer."""
        return {"sequential": 2, "parallel": 1, "sandwich": 4}[self.block]

    @property
    def layer_vectors_whole(self) -> int:
        """Entries of one layer's norms, and of the biases that every tensor parallel rank holds."""
        return self.num_norms * self.norm + self.layer_biases_whole + self.layer_router

    @property
    def num_parameters(self) -> int:
        dense, sparse = (k.layer_matrices + k.layer_biases_cut + k.layer_vectors_whole for k in self.kinds)
        layers = (self.num_layers - self.expert_layers) * dense + self.expert_layers * sparse
        words = (self.vocab_size + (0 if self.tied_embedding else self.num_outputs)) * self.hidden_size
        positions = self.position_tables * self.position_table
        experts = self.expert_layers * self.num_experts * self.expert_parameters
        return layers + experts + words + positions + self.norm + self.further_entries + self.mtp_entries

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token uses."""
        unused = self.num_experts - self.experts_per_token
        layers = self.expert_layers + (self.mtp_layers if self.expert_layers else 0)
        return self.num_parameters - layers * unused * self.expert_parameters

    @property
    def timed(self) -> Dimensions:
        """The part of the model that estimated times are of: without multi-token prediction, sparse attention's indexer and
        residual streams."""
        if self.products is None:
            return self
        without = dataclasses.replace(self.products, streams=0, mtp=0, indexer_entries=0, indexer_features=0)
        return dataclasses.replace(self, mtp_layers=0, products=without)

    def model_flops(self, tokens: float, causal: bool = False, frozen: bool = False) -> float:
        """FLOPs of forward and backward of `tokens`, without recomputation; `causal` counts half of the attention, `frozen`
        no gradients of weights.

        Source: arXiv:2205.05198 appendix A, for the general layer: 6 a matrix entry and token, 12 seq_len for each feature
        of the queries for the scores and the context.
        """
        dense, sparse = (kind.layer_matrices + kind.layer_router for kind in self.kinds)
        matrices = (self.num_layers - self.expert_layers) * dense + self.expert_layers * sparse
        matrices += self.expert_layers * self.experts_per_token * self.expert_parameters
        matrices += self.num_outputs * self.hidden_size
        trained, part = 4.0 if frozen else 6.0, 0.5 if causal else 1.0
        if self.products is None:
            return tokens * (trained * matrices + 12 * self.seq_len * self.query_size * self.num_layers * part)
        more = self.products
        matrices += more.streams + more.mtp - more.vectors * self.num_layers
        attention, indexer = more.attention(self.seq_len), more.indexer(self.seq_len)
        return tokens * (
            trained * matrices + part * (6 * attention * (self.num_layers + self.mtp_layers) + 2 * indexer)
        )


def of_decoder(config: ModelConfig, seq_len: int | None = None, has_drops: bool = True) -> Dimensions:
    """Dimensions of a family's model, trained on sequences of `seq_len`; without it, of its maximum context
    length. `has_drops`: experts take no more than their capacity, as in training on plain text."""
    return Dimensions(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        vocab_size=config.vocab_size,
        seq_len=seq_len or config.seq_len,
        longest_seq_len=config.seq_len,
        num_kv_heads=config.kv_heads,
        cache_width=sum(config.cache_widths) if config.latent else 0,
        attention_matrices=_latent_entries(config) if config.latent else 0,
        head_dim=config.head_size,
        ffn_hidden_size=config.ffn_size,
        gated_mlp=config.gated_mlp,
        **_of_experts(config, has_drops),
        position_tables=(config.position == "learned") + config.query_layer,
        tied_embedding=config.tied_embedding,
        value_head=config.value_head,
        block=config.block,
        qkv_bias=config.qkv_bias and not config.latent,
        output_bias=config.output_bias and not config.latent,
        mlp_bias=config.mlp_bias,
        norm_bias=config.norm_bias and config.norm == "layer",
        dropout=config.dropout_rate > 0,
        further_entries=_further_entries(config),
        mtp_entries=sum(math.prod(s) for name, s in parameter_shapes(config).items() if name.startswith("mtp.")),
        mtp_layers=config.num_mtp_layers,
        products=products_of(config, seq_len or config.seq_len),
        float32_softmax=True,
    )


def _latent_entries(config: ModelConfig) -> int:
    """Entries of a layer's latent attention, norms and biases among them, without sparse attention."""
    shapes = layer_shapes(dataclasses.replace(config, indexer=None), 0).items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith("attention."))


def _further_entries(config: ModelConfig) -> int:
    """Entries of residual streams and sparse attention, outside of multi-token prediction."""
    parts = ("attention.indexer.", "attention_streams.", "mlp_streams.", "block_norm.", "streams_out.")
    shapes = parameter_shapes(config).items()
    return sum(
        math.prod(shape)
        for name, shape in shapes
        if not name.startswith("mtp.") and any(part in name for part in parts)
    )


def _of_experts(config: ModelConfig, has_drops: bool) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    room_for_all = experts.num_experts / experts.experts_per_token
    return {
        "num_experts": experts.num_experts,
        "experts_per_token": experts.experts_per_token,
        "expert_ffn_size": config.expert_size,
        "shared_ffn_size": experts.shared_ffn_hidden_size,
        "hash_router": experts.router == "hash",
        "router_scale": experts.router_scale,
        "router_bias": experts.has_bias,
        "router_sums": _router_sums(experts),
        "router_losses": (experts.balance_loss > 0) + (experts.router_z_loss > 0),
        "expert_layers": sum(map(config.has_experts, range(config.num_layers))),
        "expert_rows": min((has_drops and experts.capacity_factor) or room_for_all, room_for_all),
    }


def _router_sums(experts: ExpertConfig) -> int:
    """Number of values that a layer counts: for each expert its choices, those dropped, the entropy; and the
    losses."""
    balance = (
        2 * experts.num_experts + 2 if experts.balance_over == "batch" else 1
    )  # the tokens there are, and the loss
    losses = (balance if experts.balance_loss else 0) + (experts.router_z_loss > 0)
    return experts.num_experts + 1 + (experts.router != "hash") + losses


def read_dimensions(path: Path) -> Dimensions:
    """Read the dimensions from a YAML file with the fields of `Dimensions`.

    Raises:
        ConfigError: unreadable, an unknown or missing field, a wrong type.
    """
    return fields_from(Dimensions, read_yaml(path))


Recomputation = Literal["none", "selective", "full"]


class PartLayers(NamedTuple):
    """Layers of a virtual stage."""

    layers: int
    recomputed: int
    offloaded: int


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Distribution of a step over devices: the cost model's part of a strategy."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ulysses: bool = False
    """cp swaps heads and tokens in all-to-alls; else it gathers keys and values."""
    ep: int = 1
    """Number of ranks along dp (and cp) that the experts are sharded over."""
    expert_tp: int = 0
    """Number of parts into which tp shards each expert; 0: as many as tp."""
    sends_once: bool = False
    """A token goes to each node once, however many of its experts are there, from one tensor parallel rank, and what these
    ranks compute is added up once a token, as libraries for experts do; else once for each expert, from all these ranks, as
    our own engine does."""
    virtual_stages: int = 1
    """Number of model parts on each pipeline rank (interleaving)."""
    schedule: Order = "1f1b"
    microbatch: int = 1
    """Number of sequences of one microbatch, on one replica."""
    num_microbatches: int = 1
    recompute: Recomputation = "none"
    """selective: only the values between attention's matrix products."""
    repeats_results: bool = False
    """A layer that is fully recomputed also reduces its last product over tp again, as in PyTorch. A graph leaves
    out what nobody needs."""
    recomputed_layers: tuple[int, ...] | None = None
    """Number of layers that each stage recomputes; None: all of them."""
    layers_of_stages: tuple[int, ...] | None = None
    """Number of layers of each stage; None: as even as possible, leftovers to the first stages."""
    expert_layers_of_stages: tuple[int, ...] | None = None
    """Number of those layers that have experts; None: the same fraction on every stage."""
    layers_of_parts: tuple[tuple[PartLayers, ...], ...] | None = None
    """Virtual stages of each stage, in order; None: as even as possible, the first layers recomputed, the last
    ones offloaded."""
    offloaded_layers: tuple[int, ...] = ()
    """Number of layers of each stage whose activations are kept in the host's memory; empty: none."""
    optimizer_on_host: bool = False
    zero: int = 0
    """1: optimizer state sharded over the replicas; 2: and gradients; 3: and weights."""
    zero_shards: int = 0
    """Number of replicas that the optimizer state is sharded over; 0: all."""
    gathers: Literal["microbatch", "step"] = "microbatch"
    """Number of times that sharded weights are gathered, with zero 3."""
    sequence_parallel: bool = False
    scatter_gather: bool = False
    """Tensor parallel ranks send a slice each between stages and gather it there; implied by sequence parallel."""
    flash_attention: bool = False
    """Attention in one kernel that stores no scores."""
    mask_bytes: int = 0
    """Bytes of an entry of the attention mask, which is unsharded for each microbatch; 0: the kernel makes it."""
    precision: Literal["fp16", "bf16", "fp32", "fp8"] = "bf16"
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    """Bytes of a parameter. Mixed precision has 2, 4 and 12 (master weights, two moments); float32 weights 4, 4
    and 8."""
    muon: bool = False
    """Whether Muon updates the matrices of layers, which then have no second moment."""
    fragmentation: float = 1.0
    """Memory that a dynamic allocator takes for each byte requested; graphs with a memory plan lose nothing."""
    own_graphs: bool = False
    """Passes are graphs of this package: gradients are cast to float32 and added up in kernels of their own, those of
    replicas are reduced after the last pass, and a stage sends without waiting. Else as in the engines of published
    runs, which add up in the products' kernels and reduce while the last backward pass runs."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def parts_of_expert(self) -> int:
        """Number of parts into which tp shards each expert."""
        return self.expert_tp or self.tp

    @functools.cached_property
    def last_stage(self) -> int:
        """The stage with the last layer and the head."""
        return stage_of_part(self.pp * self.virtual_stages - 1, self.pp, self.schedule)

    def neighbours(self, stage: int) -> int:
        """Number of other stages' parts to which a stage passes each microbatch."""
        holders = [stage_of_part(part, self.pp, self.schedule) for part in range(self.pp * self.virtual_stages)]
        return sum(this == stage != following for this, following in itertools.pairwise(holders))

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def activation_bytes(self) -> int:
        """Bytes of an entry of the residual stream."""
        return 4 if self.precision == "fp32" else 2

    @property
    def shards(self) -> int:
        return (self.zero_shards or self.replicas) if self.zero else 1

    @property
    def shards_accumulated_gradients(self) -> bool:
        """Whether gradients of each microbatch are reduce-scattered, although weights stay gathered."""
        return self.own_graphs and self.zero == 2 and self.num_microbatches > 1

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.microbatch * self.num_microbatches

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage."""
        if self.layers_of_stages:
            return self.layers_of_stages
        return _even_stages(num_layers, self.pp)

    def recomputed(self, num_layers: int) -> tuple[int, ...]:
        """Number of layers of each stage that are recomputed."""
        if self.recompute == "none":
            return (0,) * self.pp
        stages = self.stages(num_layers)
        return stages if self.recomputed_layers is None else tuple(map(min, self.recomputed_layers, stages))

    def parts(self, num_layers: int) -> tuple[tuple[PartLayers, ...], ...]:
        """The virtual stages of each stage."""
        if self.layers_of_parts:
            return self.layers_of_parts
        offloaded = self.offloaded_layers or (0,) * self.pp
        counts = zip(self.stages(num_layers), self.recomputed(num_layers), offloaded, strict=True)
        return tuple(even_parts(*count, self.virtual_stages) for count in counts)

    def expert_layers(self, dims: Dimensions) -> tuple[int, ...]:
        """Layers of each stage that have experts."""
        if self.expert_layers_of_stages is not None:
            return self.expert_layers_of_stages
        if not dims.expert_layers:
            return (0,) * self.pp
        ends = itertools.accumulate(self.stages(dims.num_layers), initial=0)
        return tuple(round(dims.expert_share * b) - round(dims.expert_share * a) for a, b in itertools.pairwise(ends))


@functools.lru_cache(maxsize=1024)
def _even_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    least, more = divmod(num_layers, pp)
    return tuple(least + (stage < more) for stage in range(pp))


@functools.lru_cache(maxsize=4096)
def even_parts(layers: int, recomputed: int, offloaded: int, num_parts: int) -> tuple[PartLayers, ...]:
    """Distribute layers as evenly as possible, leftovers to the first parts; the first ones recomputed, the last
    ones offloaded."""
    least, more = divmod(layers, num_parts)
    parts, before = [], 0
    for part in range(num_parts):
        count = least + (part < more)
        again, kept = (min(count, max(0, limit - before)) for limit in (recomputed, layers - offloaded))
        parts.append(PartLayers(count, again, count - kept))
        before += count
    return tuple(parts)
