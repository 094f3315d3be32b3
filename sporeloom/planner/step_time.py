# SPDX-License-Identifier: Apache-2.0
"""Seconds of one training step, term by term, in closed form. Derivations and sources: docs/explanation/planner.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sporeloom.planner.activations import layer_activations
from sporeloom.planner.cluster import Cluster, Overlap
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.layer_time import attention_core, unneeded_entries, unneeded_result
from sporeloom.planner.members import pairs
from sporeloom.planner.memory import moments_on_host, second_moments_saved
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import cut_parameters, expert_parameters, expert_shards, stage_parameters
from sporeloom.planner.parts_time import head_passes, layer_passes, times
from sporeloom.planner.rates import Rates, all_reduce, axes_bandwidth, groups_along, ring_latency, slowest_ring
from sporeloom.strategy.listed_schedule import ListedSchedule, Pass
from sporeloom.strategy.schedule import idle_microbatches, splits_backward
from sporeloom.strategy.schedule import times as schedule_times

GRADIENT_BYTES = 4  # on the wire, of words that two stages have: added up in float32
TABLE_BYTES = 4  # of an entry of the words that our graphs look up
OWN_OVERLAP = 0.25  # of the passes, hides what our graphs scatter in them (ZeRO-2), or gather (ZeRO-3); as simulated


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, on the slowest stage."""

    matmul: float
    attention: float
    memory: float
    overhead: float
    tensor_parallel: float
    expert_parallel: float
    """All-to-alls of experts that are not hidden."""
    recompute: float
    pipeline: float
    """Sending activations and gradients between stages."""
    bubble: float
    gradients: float
    """Collectives of gradients that are not hidden."""
    weights: float
    """Gathering sharded weights that is not hidden."""
    optimizer: float
    accumulation: float
    """Casting weights and gradients and adding up gradients of microbatches, in kernels of their own."""
    offload: float
    """Moving optimizer state and activations to the host and back, as far as it is not hidden."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Exposed communication."""
        return self.tensor_parallel + self.expert_parallel + self.pipeline + self.gradients + self.weights


def step_time(
    dims: Dimensions, job: Parallelism, cluster: Cluster, overlap: Overlap | None = None, adapters: int = 0
) -> StepTime:
    """Time of one step of `job`. `adapters`: parameters that a device trains in place of its own, of which there are then no
    gradients: a product is mirrored once backward, not twice.

    The slowest stage sets the pace of all microbatches, and the schedule adds its bubble, see `_bubble`.
    """
    overlap, cluster = overlap or Overlap.fitted(), cluster.with_running(job.devices)
    rates, m = Rates(dims, job, cluster), job.num_microbatches
    products = 2 if adapters else 3
    layer, layer_backward = layer_passes(dims, job, rates, products)
    head, head_backward = head_passes(dims, job, rates, products)
    of_layers, of_heads = layer.plus(layer_backward), head.plus(head_backward)
    full = layer.total - unneeded_result(dims, job, rates)
    again = {"none": 0.0, "selective": attention_core(dims, job, rates), "full": full}[job.recompute]
    stages = job.stages(dims.num_layers)
    counts = job.recomputed(dims.num_layers)
    sums, casts = _accumulation(dims, job, rates, adapters)
    busy = [
        layers * of_layers.total + counts[i] * again + (of_heads.total if i == job.last_stage else 0.0) + sums[i]
        for i, layers in enumerate(stages)
    ]
    slowest = max(range(job.pp), key=busy.__getitem__)
    layers, has_head = stages[slowest], slowest == job.last_stage
    compute = m * busy[slowest]
    of_layer = PassTimes(layer.total, layer_backward.total, (products - 2) * layer.matmul)
    of_head = PassTimes(head.total, head_backward.total, (products - 2) * head.matmul)
    gradients, weights = _data_parallel(dims, job, cluster, compute, overlap, adapters)
    gradients += _tied_words(dims, job, cluster)
    return StepTime(
        **{
            name: m * seconds
            for name, seconds in vars(times(of_layers, layers).plus(times(of_heads, has_head))).items()
        },
        recompute=m * counts[slowest] * again,
        pipeline=_sends(dims, job, cluster),
        bubble=_bubble(dims, job, busy, (of_layer, of_head, again), sums),
        gradients=gradients,
        weights=weights,
        optimizer=_update(dims, job, rates, adapters),
        accumulation=m * sums[slowest] + casts,
        offload=_offload(dims, job, cluster, compute, adapters),
    )


COUNTED_GROUPS = (8, 12)
"""Groups of as many microbatches as stages whose passes are counted out, where there are more than twice as many."""


class PassTimes(NamedTuple):
    """Seconds of a microbatch's passes."""

    forward: float
    backward: float
    weights: float
    """Seconds of the backward pass for the gradients of weights."""


def _bubble(
    dims: Dimensions,
    job: Parallelism,
    busy: Sequence[float],
    parts: tuple[PassTimes, PassTimes, float],
    sums: Sequence[float],
) -> float:
    """Seconds that the slowest stage waits, with each stage's `busy` seconds for a microbatch. `parts`: of a layer, of the
    head, and what a recomputed layer adds; `sums`: seconds of each stage to add up gradients.

    Filling and draining takes the other stages' time once, a v-th of it with v virtual stages. Zero-bubble schedules are
    counted out, pass by pass.
    """
    if job.pp == 1:
        return 0.0
    order = job.pp, job.num_microbatches, job.virtual_stages, job.schedule
    if not splits_backward(job.schedule):
        slowest = busy.index(max(busy))
        others = sum(each for stage, each in enumerate(busy) if stage != slowest)
        others -= sum(sums) - sums[slowest]  # no stage waits for what another adds up
        return others / (job.pp - 1) * idle_microbatches(*order)
    (layer, head, again), stages = parts, job.parts(dims.num_layers)

    def seconds(stage: int, one: Pass) -> float:
        of, has_head = stages[stage][one.part], stage == job.last_stage and one.part == job.virtual_stages - 1
        repeated = of.recomputed * again if one.kind == "backward" else 0.0
        repeated += sums[stage] / job.virtual_stages if one.kind != "forward" else 0.0  # in either half of a split one
        return of.layers * getattr(layer, one.kind) + repeated + (getattr(head, one.kind) if has_head else 0.0)

    def waiting(count: int) -> float:
        drawn = schedule_times(job.pp, count, job.virtual_stages, job.schedule, seconds)
        return max(stage[-1][2] for stage in drawn) - count * max(busy)

    few, more = (groups * job.pp for groups in COUNTED_GROUPS)
    if job.num_microbatches <= 2 * more or isinstance(job.schedule, ListedSchedule):
        return waiting(job.num_microbatches)
    first = waiting(few)  # from then on each microbatch takes as long as the one before
    return first + (waiting(more) - first) * (job.num_microbatches - few) / (more - few)


def _sends(dims: Dimensions, job: Parallelism, cluster: Cluster) -> float:
    """Seconds of sending activations forward and gradients back, for each microbatch and virtual stage."""
    if job.pp == 1:
        return 0.0
    num_bytes = job.activation_bytes * job.microbatch * dims.seq_len / job.cp * dims.stream_width
    num_bytes /= job.tp if job.sequence_parallel or job.scatter_gather or job.virtual_stages > 1 else 1
    apart = job.tp * job.replicas
    # All wait for the slowest pair. But where a server has several stages, published runs were fitted with those inside it:
    # the one pair that leaves it has the links of all of them.
    count = apart if 2 * apart <= cluster.devices_per_node else job.devices - apart
    bandwidth = slowest_ring(cluster, pairs(cluster.units, apart, count))
    rounds = job.num_microbatches * job.virtual_stages + job.pp - 1
    if job.overlaps_sends and job.virtual_stages > 1:
        rounds = job.pp - 1
    return (
        (1 if job.own_graphs else 2) * rounds * num_bytes / bandwidth
    )  # a stage that only receives waits half as much


def _data_parallel(
    dims: Dimensions, job: Parallelism, cluster: Cluster, compute: float, overlap: Overlap, adapters: int
) -> tuple[float, float]:
    """Exposed seconds of the gradients' collectives and of gathering sharded weights."""
    if job.replicas == 1:
        return 0.0, 0.0
    parameters: float = max(stage_parameters(dims, job))
    bandwidth = axes_bandwidth(cluster, job, ("dp", "cp"), job.replicas, job.tp)
    ring = (job.replicas - 1) / job.replicas / bandwidth
    same = max(
        1, job.replicas * job.tp // (job.ep * job.parts_of_expert)
    )  # ranks that hold the same experts, far apart
    apart = job.devices // job.pp // same
    axes = (*job.mesh.expert_parts[0], "cp")
    experts = (same - 1) / same / axes_bandwidth(cluster, job, axes, same, apart)
    parameters += max(expert_parameters(dims, job)) * experts / ring  # as if they went the others' way
    hops = 0.0
    if not job.own_graphs:  # of a ring; our graphs have rounds, of which there are few
        rings = max(job.stages(dims.num_layers)) * job.collectives_of_layer
        hops = rings * ring_latency(groups_along(cluster, job, ("dp", "cp"), job.replicas, job.tp))
    trained = adapters or parameters
    backward = compute * 2 / 3
    if job.zero == 3:
        per_microbatch = job.gathers == "microbatch"
        share, times = (overlap.weights, job.num_microbatches) if per_microbatch else (overlap.gradients, 1)
        gathers = 2 if per_microbatch else 1  # again for the backward pass
        width = job.reduced_bytes if job.own_graphs and job.num_microbatches > 1 else 2
        moved, gathered = (
            (ring * trained * width + hops) * times,
            gathers * (ring * parameters * 2 + hops) * times,
        )
        if job.own_graphs:
            return moved, max(gathered - OWN_OVERLAP * compute, 0.0)
        seen = overlap.contention if per_microbatch else 0.0
        hidden = share * compute * (1 + gathers) / 3
        return max(moved - share * backward, seen * moved), max(gathered - hidden, seen * gathered)
    moved, gathered = ring * trained * job.reduced_bytes + hops, ring * parameters * job.weight_bytes + hops
    if job.own_graphs and job.precision != "fp32":  # words are looked up in float32
        gathered += ring * (TABLE_BYTES - job.weight_bytes) * dims.vocab_size * dims.hidden_size / job.tp
    last = backward / job.num_microbatches  # gradients are complete in the last microbatch
    if not job.hides_gradients or (job.own_graphs and (job.pp > 1 or job.num_microbatches > 1)):
        last = 0.0  # in this package the update's graph reduces them
    if job.overlaps_new_weights:
        gathered = max(0.0, gathered - overlap.gradients * compute / 3 / job.num_microbatches)
    if job.shards_accumulated_gradients:
        return max(job.num_microbatches * moved - OWN_OVERLAP * backward, 0.0), gathered
    if job.zero == 2:  # implementations that shard gradients move each virtual stage's while the next is computed
        moved, gathered = moved / job.virtual_stages, gathered / job.virtual_stages
    if job.zero == 0:  # an all-reduce; with sharded optimizer state a reduce-scatter, and the new weights are gathered
        return max(2 * moved - overlap.gradients * last, 0.0), 0.0
    return max(moved - overlap.gradients * last, 0.0), gathered


def _tied_words(dims: Dimensions, job: Parallelism, cluster: Cluster) -> float:
    """Seconds in which the first and the last stage add up the gradients of the words that both have."""
    if not (job.own_graphs and job.last_stage and dims.tied_embedding) or dims.value_head:
        return 0.0
    of_stage = job.tp * job.replicas
    bandwidth = slowest_ring(cluster, pairs(cluster.units, of_stage * job.last_stage, of_stage))
    return all_reduce(GRADIENT_BYTES * dims.vocab_size * dims.hidden_size / job.tp, 2, bandwidth)


def _accumulation(dims: Dimensions, job: Parallelism, rates: Rates, adapters: int) -> tuple[list[float], float]:
    """Seconds of each stage for a microbatch, and of the largest one for a step: weights are cast once (read 4 bytes,
    write 2), gradients cast back (2, 4) and added to their sum (8, 4), which begins with those of the first microbatch."""
    if not job.own_graphs:
        return [0.0] * job.pp, 0.0
    half, adds = job.precision != "fp32", 1 - 1 / job.num_microbatches
    of_experts, shards = expert_parameters(dims, job), expert_shards(job)
    held = list(zip(stage_parameters(dims, job), of_experts, strict=True))
    sums = [
        (
            6 * half * (adapters or sum(each))
            + 12 * adds * (adapters or cut_parameters(*each, job.shards, shards, job.zero >= 2))
        )
        / rates.bytes
        for each in held
    ]
    return sums, max(6 * half * cut_parameters(*each, job.shards, shards, job.zero == 3) for each in held) / rates.bytes


def _update(dims: Dimensions, job: Parallelism, rates: Rates, adapters: int) -> float:
    """Seconds in which the optimizer reads and writes its state and weights, and reads gradients."""
    whole = max(stage_parameters(dims, job)) / job.shards + max(expert_parameters(dims, job)) / expert_shards(job)
    parameters, saved = adapters or whole, max(second_moments_saved(dims, job))
    passes = 12 if job.own_graphs else 0  # gradients are read for their norm, then clipped
    moved = parameters * (2 * job.optimizer_bytes + job.gradient_bytes + 2 * job.weight_bytes + passes) - 2 * saved
    return moved / rates.bytes


def _offload(dims: Dimensions, job: Parallelism, cluster: Cluster, compute: float, adapters: int) -> float:
    """Exposed seconds of the link to the host: moments there and back while the optimizer waits; activations one way behind
    the forward passes, the other way behind the backward ones."""
    link = cluster.host_gb_per_s * 1e9
    away = max(job.offloaded_layers, default=0) * layer_activations(dims, job, "none") * job.num_microbatches / link
    exposed = max(0.0, away - compute / 3) + max(0.0, away - compute * 2 / 3)
    moments = job.moment_bytes * adapters if adapters and job.optimizer_on_host else max(moments_on_host(dims, job))
    return exposed + 2 * moments / link


def flops_per_device(dims: Dimensions, job: Parallelism, frozen: bool = False) -> tuple[float, float]:
    """FLOPs a step needs of a device on average: the model's own, `frozen` or trained, and what it really computes with
    recomputation, and in a kernel with values as wide as keys.

    Source: arXiv:2205.05198 appendix A.
    """
    tokens = job.global_batch_size * dims.seq_len
    model = dims.model_flops(tokens, frozen=frozen)
    layers = sum(job.stages(dims.num_layers))
    share = 1.0 if job.recomputed_layers is None else sum(job.recomputed_layers) / layers
    attention, further, padding = 4.0 * dims.seq_len * dims.query_size * dims.num_layers * tokens, 0.0, 0.0
    if more := dims.products:
        attention = 2 * tokens * dims.num_layers * more.attention(dims.seq_len)
        if work := more.work(job.flash_attention):
            wide = work.keys(dims.seq_len) * (work.kernel_features + work.score_features - more.features)
            padding = 2 * tokens * dims.num_layers * wide
        further = 2 * tokens * (more.streams - more.vectors * dims.num_layers) + tokens * more.chosen(dims.seq_len)
    again = {
        "none": 0.0,
        "selective": 0.0 if more and more.layer else attention,  # of latent attention the softmax alone
        "full": attention
        + padding
        + further
        + 2 * tokens * dims.num_layers * (dims.layer_matrices - unneeded_entries(dims, job))
        + 2 * tokens * dims.expert_layers * dims.experts_per_token * dims.expert_parameters,
    }
    return model / job.devices, (model + 3 * padding + share * again[job.recompute]) / job.devices
