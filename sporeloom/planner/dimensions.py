# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a decoder for the cost model, and values that follow from them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Amount, Count, Natural, Positive, number_problems
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.models.config import ModelConfig, Widths
from sporeloom.models.parameters import attention_specs, mtp_specs
from sporeloom.models.parts import attention, experts, indexer, mlp, multi_token_prediction, norm, streams
from sporeloom.models.parts.spec import ParameterSpec, num_entries
from sporeloom.planner.products import Products, products_of


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
    grouped_router: bool = False
    """The router chooses one expert of each of as many groups as a token has experts."""
    router_scale: bool = False
    """The router has a factor for each expert besides its matrix."""
    router_bias: bool = False
    """The router has a correction bias for each expert."""
    router_sums: Natural = 0
    """Number of values of a layer's router losses and counters that are summed over the replicas."""
    router_losses: Natural = 0
    """Number of losses of a layer's router: 0 to 2."""
    expert_rows: Positive = 1.0
    """Computed rows per row that experts get: the capacity factor; 1 without a limit (see `Parallelism.expert_rows`)."""
    dropless: bool = False
    """Experts have no capacity limit."""
    expert_imbalance: Positive = 1.0
    """Rows of the busiest rank's experts, relative to perfect balance. With fixed shapes, as here, it is 1."""
    attention_matrices: Natural = 0
    """Entries of one layer's attention matrices, where they differ from query, key, value and output (MLA)."""
    cache_width: Natural = 0
    """Entries of the KV cache for a token and layer, where they differ from its keys and values (MLA)."""
    further_entries: Natural = 0
    """Entries of all layers' residual streams and sparse attention, whole on every tensor parallel rank."""
    mtp_entries: Amount = 0
    """Entries of all layers of multi-token prediction."""
    mtp_layers: Natural = 0
    """Number of these layers, which are in the last stage."""
    products: Products | None = None
    """Products besides those of a layer of query, key, value, output, MLP and experts."""
    dropout: bool = True
    """Dropout masks are kept for the backward pass."""
    float32_softmax: bool = False
    """Attention probabilities in float32 and masks as numbers, as in this package's models; else 2 bytes and 1."""
    operator_norm: bool = False
    """Norms are RMSNorm of several operators in float32, as this package's models have it, rather than one kernel."""

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
        return mlp.num_matrices(self)

    @property
    def has_norm_bias(self) -> bool:
        return self.norm_bias

    @property
    def sums_both_results(self) -> bool:
        """A parallel block in which nothing is computed with the results of attention and MLP before they are added up, so
        that tensor parallel ranks communicate their sum."""
        return self.block == "parallel" and not (self.output_bias or self.mlp_bias or self.dropout)

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

    @functools.cached_property
    def _layer_specs(self) -> tuple[ParameterSpec, ...]:
        """Parameters of a layer of attention and the MLP that every token passes."""
        width = self.always_used_ffn
        return (*attention.parameters(self), *(mlp.parameters("mlp", self, width) if width else ()))

    @functools.cached_property
    def layer_matrices(self) -> int:
        """Entries of one layer's matrices, without experts and router."""
        if self.attention_matrices:
            return self.attention_matrices + num_entries(mlp.parameters("mlp", self, self.always_used_ffn), "matrix")
        return num_entries(self._layer_specs, "matrix")

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Entries of one expert."""
        return num_entries(mlp.parameters("", self, self.expert_ffn_size))

    @property
    def layer_router(self) -> int:
        """Entries of the router, mean of all layers."""
        router = experts.router_parameters(
            self.hidden_size, self.num_experts, self.hash_router, self.router_bias, self.router_scale
        )
        return self.expert_layers * num_entries(router) // self.num_layers

    @property
    def layer_kv(self) -> int:
        """Entries of one layer's parameters for keys and values."""
        return num_entries(self._layer_specs, None, "kv")

    @functools.cached_property
    def layer_biases_cut(self) -> int:
        """Entries of one layer's biases that tensor parallel shards, those of keys and values among them."""
        return num_entries(self._layer_specs, "vector", "tp", "kv")

    @functools.cached_property
    def layer_biases_whole(self) -> int:
        """Entries of one layer's biases that every tensor parallel rank holds."""
        return num_entries(self._layer_specs, "vector", "whole")

    @property
    def norm(self) -> int:
        """Entries of a norm."""
        return num_entries(norm.parameters("norm", self))

    @property
    def mtp_vectors_and_projection(self) -> int:
        """Entries of a layer of multi-token prediction besides those of a layer, whole on every tensor parallel rank."""
        return num_entries(multi_token_prediction.own_parameters(self))

    @property
    def num_norms(self) -> int:
        """Number of norms in a layer."""
        return len(norm.OF_BLOCK[self.block])

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

    @functools.cached_property
    def mtp(self) -> Dimensions:
        """The model as if all layers were as those of multi-token prediction."""
        return self.kinds[1] if self.expert_layers else self

    @property
    def stream_width(self) -> int:
        """Features of a token between layers."""
        return self.hidden_size * (self.products.num_streams if self.products else 1)

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
        return tokens * (trained * matrices + part * (6 * attention * (self.num_layers + self.mtp_layers) + indexer))


def of_decoder(config: ModelConfig, seq_len: int | None = None, has_drops: bool = True) -> Dimensions:
    """Dimensions of a family's model, trained on sequences of `seq_len`; without it, of its maximum context
    length. `has_drops`: experts take no more than their capacity and indexers have their loss, as in training on plain
    text."""
    if config.trains_indexer and not has_drops:
        config = dataclasses.replace(
            config, indexer=config.indexer and dataclasses.replace(config.indexer, loss_coefficient=0.0)
        )
    return Dimensions(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        vocab_size=config.vocab_size,
        seq_len=seq_len or config.seq_len,
        longest_seq_len=config.seq_len,
        num_kv_heads=config.kv_heads,
        cache_width=sum(config.cache_widths) if config.latent else 0,
        attention_matrices=num_entries(attention_specs(config)) if config.latent else 0,
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
        norm_bias=config.has_norm_bias,
        dropout=config.dropout_rate > 0,
        further_entries=_further_entries(config),
        mtp_entries=num_entries(mtp_specs(config)),
        mtp_layers=config.num_mtp_layers,
        products=products_of(config, seq_len or config.seq_len),
        float32_softmax=True,
        operator_norm=config.norm == "rms",
    )


def _further_entries(config: ModelConfig) -> int:
    """Entries of residual streams and sparse attention, outside of multi-token prediction."""
    layers = range(config.num_layers)
    of_layers = (spec for layer in layers for part in (indexer, streams) for spec in part.parameters(config, layer))
    return num_entries(of_layers) + num_entries(streams.output_parameters(config))


def _of_experts(config: ModelConfig, has_drops: bool) -> dict[str, Any]:
    mixture = config.experts
    if mixture is None:
        return {}
    room_for_all = mixture.num_experts / mixture.experts_per_token
    factor = mixture.capacity_factor if has_drops else None
    dropless = factor is None or factor >= room_for_all
    return {
        "num_experts": mixture.num_experts,
        "experts_per_token": mixture.experts_per_token,
        "expert_ffn_size": config.expert_size,
        "shared_ffn_size": mixture.shared_ffn_hidden_size,
        "hash_router": mixture.router == "hash",
        "grouped_router": mixture.router == "grouped",
        "router_scale": mixture.router_scale,
        "router_bias": mixture.has_bias,
        "router_sums": mixture.num_sums,
        "router_losses": mixture.num_losses,
        "expert_layers": sum(map(config.has_experts, range(config.num_layers))),
        "expert_rows": 1.0 if dropless else factor,
        "dropless": dropless,
    }


def read_dimensions(path: Path) -> Dimensions:
    """Read the dimensions from a YAML file with the fields of `Dimensions`.

    Raises:
        ConfigError: unreadable, an unknown or missing field, a wrong type.
    """
    return fields_from(Dimensions, read_yaml(path))
