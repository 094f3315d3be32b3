# SPDX-License-Identifier: Apache-2.0
"""Distribution of a step over devices for the cost model: a strategy as numbers."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sporeloom.models.parts.experts import choices_of_part
from sporeloom.planner.dimensions import Dimensions
from sporeloom.strategy.axes import AXES, BY_NAME, ROWS
from sporeloom.strategy.config import Order, stage_of_part
from sporeloom.strategy.mesh import Mesh

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
    order: tuple[str, ...] = AXES
    """The mesh axes, outer to inner: ranks that differ in the last one are neighbours."""
    ep: int = 1
    """Number of ranks along dp (and cp) that the experts are sharded over."""
    expert_tp: int = 0
    """Number of parts into which tp shards each expert; 0: as many as tp."""
    sorts_rows: bool = True
    """Experts without a capacity limit compute their own rows alone (`Strategy.sorts_expert_rows`), as in training on devices
    that have products of groups. Else each has capacity for all tokens."""
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
    repeated_entries: int = 0
    """Entries of a layer's matrices whose products selective recomputation repeats besides the attention core."""
    repeated_features: int | None = None
    """Features of a token that passes of selective recomputation read or write, with a fused attention kernel; None: those of
    two norms and the activation."""
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
    attention_share: float = 0.0
    """Fraction of the peak that this kernel reaches; 0: the fitted one, of the kernels in published runs of dense models."""
    overlaps_tensor_parallel: bool = False
    """Products are computed in slices while tensor parallel collectives of other slices run (AsyncTP, user buffers)."""
    gathers_fp8: bool = False
    """All-gathers of sequences that tensor parallel ranks share, and of their gradients, carry fp8; reductions do not."""
    overlaps_sends: bool = False
    """With virtual stages, activations and gradients are sent while the next microbatch is computed."""
    overlaps_experts: bool = False
    """All-to-alls of experts run while a pass of another microbatch is computed."""
    hides_gradients: bool = True
    """Gradients are reduced while the last backward pass is computed, except in this package's graphs, up to ZeRO 2."""
    overlaps_new_weights: bool = False
    """With sharded optimizer state, new weights are gathered while the first microbatch's forward pass is computed."""
    captured: Literal["none", "attention", "all"] = "none"
    """Launches that a CUDA graph has in one: none, those of attention and the router, all of a layer."""
    reduced_bytes: int = 4
    """Bytes of a gradient on the wire between replicas."""
    collectives_of_layer: float = 1.0
    """Number of collectives into which gradients of a layer, or its sharded weights, are divided (see `ring_latency`)."""
    mask_bytes: int = 0
    """Bytes of an entry of the attention mask, which is unsharded for each microbatch; 0: the kernel makes it."""
    precision: Literal["fp16", "bf16", "fp32", "fp8"] = "bf16"
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    """Bytes of a parameter. Mixed precision has 2, 4 and 12 (master weights, two moments); float32 weights 4, 4
    and 8; moments in bfloat16 save 4."""
    moment_bytes: int = 8
    """Bytes of the two moments of a parameter, a part of `optimizer_bytes`."""
    muon: bool = False
    """Whether Muon updates the matrices of layers, which then have no second moment."""
    logit_bytes: int = 8
    """Bytes of a logit at the peak of the loss: in float32, and its gradient."""
    own_graphs: bool = False
    """Passes are graphs of this package: gradients are cast to float32 and added up in kernels of their own, those of
    replicas are reduced after the last pass, and a stage sends without waiting. Else as in the engines of published
    runs, which add up in the products' kernels and reduce while the last backward pass runs."""

    def computes_own_rows(self, dims: Dimensions) -> bool:
        """Whether experts have no capacity limit and compute their own rows alone (see `Strategy.sorts_expert_rows`)."""
        return dims.dropless and self.own_graphs and self.sorts_rows and (self.ep == 1 or self.cp == 1)

    def expert_rows(self, dims: Dimensions) -> float:
        """Computed rows per row that experts get: E / k without a capacity limit, if ranks do not sort rows, as each expert
        then has capacity for all tokens."""
        has_all = dims.dropless and self.own_graphs and not self.computes_own_rows(dims)
        return dims.num_experts / dims.experts_per_token if has_all else dims.expert_rows

    @property
    def gathers_tokens_of(self) -> int:
        """Number of ranks whose tokens each gathers, where experts are sharded and compute their own rows alone."""
        return min(self.ep, self.dp)

    def sorted_rows(self, dims: Dimensions) -> int:
        """Rows that a rank has for each of its tokens where experts compute their own rows alone: for each token of its
        expert-parallel group as many as may be of its experts, of which it multiplies k / ep."""
        return self.gathers_tokens_of * choices_of_part(
            dims.num_experts, dims.experts_per_token, self.ep, dims.grouped_router
        )

    @property
    def mesh(self) -> Mesh:
        return Mesh(order=self.order, **{axis: getattr(self, axis) for axis in BY_NAME})

    @property
    def devices(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

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

    @functools.cached_property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights."""
        return math.prod(getattr(self, axis.name) for axis in ROWS if axis.is_replica)

    def tokens(self, seq_len: int) -> float:
        """Number of tokens of a microbatch on a rank."""
        return self.microbatch * seq_len / self.cp

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
    def gradient_copies(self) -> int:
        """Number of gradients of each parameter that are there at once: our own graphs hold those of the last microbatch
        besides the sum."""
        return 2 if self.own_graphs and self.num_microbatches > 1 else 1

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
