# SPDX-License-Identifier: Apache-2.0
"""Search the ways to distribute one step over a cluster, ranked by the cost model."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from sporeloom.core.command_line import check_numbers
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Bounds, Count, Natural
from sporeloom.planner.activations import KeptActivations, held_activations
from sporeloom.planner.closed_forms import Precision, optimizer_sharding
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.memory import StageMemory
from sporeloom.planner.parallelism import Parallelism, Recomputation, even_parts
from sporeloom.planner.step_time import StepTime, flops_per_device, step_time
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask, adapter_parameters, task_memory
from sporeloom.strategy.axes import AXES
from sporeloom.strategy.checks import MAX_DEVICES, divisors
from sporeloom.strategy.mesh import Mesh

Devices = Annotated[int, Bounds(1, MAX_DEVICES)]
MICROBATCHES = (1, 2, 4, 8, 16)
MAX_VIRTUAL_STAGES = 4
REORDERED = 20
"""Number of meshes of which other orders of the axes are considered."""
MAX_REORDERED = 1 << 16
"""Largest job of which they are: its ranks are counted one by one."""
MIN_TOKENS = 1024
"""Minimum number of tokens of a sequence on a rank of cp: shorter slices save too little memory for gathering keys
and values."""


@dataclass(frozen=True)
class Option:
    """One strategy, with its cost."""

    dims: Dimensions
    job: Parallelism
    time: StepTime
    memory: tuple[StageMemory, ...]
    usable_bytes: float
    peak_flops: float
    is_frozen: bool = False
    """Whether only adapters are trained."""

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def peak_bytes(self) -> float:
        return max(stage.total for stage in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    @property
    def tokens_per_s(self) -> float:
        return self.job.global_batch_size * self.dims.seq_len / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: fraction of peak by the model's own FLOPs."""
        return flops_per_device(self.dims, self.job, self.is_frozen)[0] / self.seconds / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: the same with recomputed FLOPs."""
        return flops_per_device(self.dims, self.job, self.is_frozen)[1] / self.seconds / self.peak_flops


def evaluate(dims: Dimensions, job: Parallelism, cluster: Cluster, task: TrainedTask = PLAIN_TEXT) -> Option:
    """Estimate the cost of one strategy. For tasks that sample, the time is that of an update."""
    job = dataclasses.replace(job, sorts_rows=job.sorts_rows and cluster.has_grouped_products)
    memory, adapters = tuple(task_memory(dims, job, task)), max(adapter_parameters(task, dims, job))
    peak = cluster.peak_tflops * 1e12 * (2 if job.precision == "fp8" else 1)
    return Option(
        dims, job, step_time(dims, job, cluster, adapters=adapters), memory, cluster.usable_bytes, peak, adapters > 0
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Input of a search."""

    dims: Dimensions
    cluster: Cluster
    devices: Devices
    global_batch_size: Count
    interleave: bool = False
    """Also consider pipelines with virtual stages."""
    reshard_after_forward: bool = False
    """Also consider ZeRO-3 where memory is short. How much of its collectives hides behind computation is known from
    other libraries' runs only: none of MindSpore's with it is published."""
    flash_attention: bool = False
    mask_bytes: Natural = 0
    """Bytes of an entry of the attention mask; 0: the kernel makes it."""
    recomputations: tuple[Recomputation, ...] = ("selective", "full")
    """Kinds of recomputation to consider where memory is short."""
    precision: Precision = "bf16"
    """Number type of matrix products; master weights are float32 in any case."""
    task: TrainedTask = PLAIN_TEXT
    own_graphs: bool = True
    """Whether this package's graphs train; else an engine of published runs (`Parallelism.own_graphs`)."""
    muon: bool = False
    """Whether Muon updates the matrices of layers. The time of its matrix products is not counted."""

    def __post_init__(self) -> None:
        check_numbers(self)


def search(request: PlanRequest) -> list[Option]:
    """List all options: those that fit by time, then the others by memory.

    Raises:
        ConfigError: no mesh divides devices, model and batch.
    """
    options = [evaluate(request.dims, job, request.cluster, request.task) for job in _jobs(request)]
    if not options:
        raise ConfigError(
            f"no dp x tp x pp = {request.devices} divides the model ({request.dims.num_heads} heads, hidden_size "
            f"{request.dims.hidden_size}, vocab_size {request.dims.vocab_size}, {request.dims.num_layers} layers) and a "
            f"global batch of {request.global_batch_size}; change the number of devices or the batch"
        )
    return _ranked([*options, *_other_orders(request, _ranked(options))])


def _ranked(options: Sequence[Option]) -> list[Option]:
    return sorted(options, key=lambda option: (not option.fits, option.seconds if option.fits else option.peak_bytes))


def _other_orders(request: PlanRequest, ranked: Sequence[Option]) -> Iterator[Option]:
    """The best meshes with their axes in another order, where that is faster: ranks that are neighbours have faster links."""
    fitting = [option for option in ranked if option.fits] if request.devices <= MAX_REORDERED else []
    for option in distinct(fitting)[:REORDERED]:
        axes = [axis for axis in AXES if axis != "pp" and getattr(option.job, axis) > 1]
        for order in itertools.permutations(axes):
            moved = dataclasses.replace(option.job, order=("pp", *order)).mesh.order
            job = dataclasses.replace(option.job, order=moved)
            if job.order == AXES or request.cluster.refuses(job.mesh):
                continue
            other = evaluate(request.dims, job, request.cluster, request.task)
            if other.seconds < option.seconds:
                yield other


def _jobs(request: PlanRequest) -> Iterator[Parallelism]:
    dims, devices, batch = request.dims, request.devices, request.global_batch_size
    for tp in divisors(devices):
        if any(size % tp for size in (dims.num_heads, dims.vocab_size, *_widths(dims))):
            continue
        if dims.kv_heads % tp and tp % dims.kv_heads:
            continue
        for pp, cp in itertools.product(divisors(devices // tp), _context_degrees(request)):
            dp, left = divmod(devices // tp, pp * cp)
            if left or pp > dims.num_layers or batch % dp:
                continue
            if request.cluster.even_groups and request.cluster.refuses(Mesh(pp=pp, dp=dp, cp=cp, tp=tp)):
                continue
            for microbatch in MICROBATCHES:
                if batch // dp % microbatch or (pp > 1 and batch // dp // microbatch < pp):
                    continue
                for ep in _expert_degrees(dims, dp):
                    base = Parallelism(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                        sorts_rows=request.cluster.has_grouped_products,
                        microbatch=microbatch,
                        num_microbatches=batch // dp // microbatch,
                        precision=request.precision,
                        own_graphs=request.own_graphs,
                        muon=request.muon,
                        **request.task.optimizer_bytes,
                    )
                    yield from _variants(request, base)


def _context_degrees(request: PlanRequest) -> list[int]:
    """Numbers of ranks that can shard a sequence, keys and values gathered: none for experts, which count their
    tokens in full sequences unless the model says otherwise, nor where texts are sampled a token at a time."""
    if request.dims.num_experts or request.task.samples:
        return [1]
    length = request.dims.seq_len
    return [cp for cp in divisors(length) if cp == 1 or (cp & (cp - 1) == 0 and length // cp >= MIN_TOKENS)]


def _widths(dims: Dimensions) -> list[int]:
    """Widths of MLPs and experts, which tp shards."""
    dense = [] if dims.expert_layers == dims.num_layers else [dims.ffn_size]
    return dense + ([dims.expert_ffn_size, dims.shared_ffn_size] if dims.num_experts else [])


def _expert_degrees(dims: Dimensions, dp: int) -> list[int]:
    """Numbers of ranks along dp that can shard the experts."""
    return [ep for ep in divisors(dp) if dims.num_experts % ep == 0] if dims.num_experts else [1]


def _variants(request: PlanRequest, base: Parallelism) -> Iterator[Parallelism]:
    """Vary optimizer parallel, sequence parallel, virtual stages and recomputation on one mesh."""
    dims = request.dims
    cuts = [0]  # number of replicas that the optimizer is sharded over
    if (most := base.replicas) > 1:
        cuts += sorted({most, *(size for size in (8, 16, 32, 64) if size < most and most % size == 0)})
    most = dims.num_layers // base.pp
    virtual = [1]
    if request.interleave and base.pp > 1 and dims.num_layers % base.pp == 0 and base.num_microbatches % base.pp == 0:
        virtual += [parts for parts in range(2, MAX_VIRTUAL_STAGES + 1) if most % parts == 0]
    parallels = [False]
    if base.tp > 1 and base.microbatch * dims.seq_len // base.cp % base.tp == 0:
        parallels.append(True)
    for shards in cuts:
        for sequence_parallel in parallels:
            for virtual_stages in virtual:
                job = dataclasses.replace(
                    base,
                    zero_shards=shards,
                    sequence_parallel=sequence_parallel,
                    virtual_stages=virtual_stages,
                    flash_attention=request.flash_attention,
                    mask_bytes=request.mask_bytes,
                    **optimizer_sharding(shards > 0, base.num_microbatches > 1, request.precision),
                )
                yield from _recomputations(request, job)


def _recomputations(request: PlanRequest, job: Parallelism) -> Iterator[Parallelism]:
    """No recomputation; if that does not fit, as few layers of each stage as make it fit, of either kind, or all; and
    the same with gradients of microbatches sharded, too, and with ZeRO-3."""
    dims, usable = request.dims, request.cluster.usable_bytes
    stages = task_memory(dims, job, request.task)
    if max(stage.total for stage in stages) <= usable:
        yield job
        return
    layers = job.stages(dims.num_layers)
    for kind in request.recomputations:
        whole = dataclasses.replace(job, recompute=kind)
        needed, kept = [], KeptActivations.of(dims, whole)
        for stage, (without, every) in enumerate(zip(stages, task_memory(dims, whole, request.task), strict=True)):
            over = without.total + (every.working - without.working) - usable
            needed.append(_fewest_layers(whole, kept, stage, layers[stage], over) if over > 0 else 0)
        if any(needed) and tuple(needed) != layers:
            yield dataclasses.replace(whole, recomputed_layers=tuple(needed))
        else:
            yield whole
    if job.zero == 1 and job.own_graphs:
        yield from _recomputations(request, dataclasses.replace(job, zero=2))
    elif request.reshard_after_forward and job.zero in (1, 2):
        again = optimizer_sharding(True, False, request.precision, again=True)
        yield from _recomputations(request, dataclasses.replace(job, **again))


def _fewest_layers(job: Parallelism, kept: KeptActivations, stage: int, layers: int, num_bytes: float) -> int:
    """Number of a stage's layers, its first ones, to recompute for `num_bytes` less; all of them if that is not
    enough."""

    def held(count: int) -> float:
        return held_activations(job, kept, stage, even_parts(layers, count, 0, job.virtual_stages))

    limit = held(0) - num_bytes
    return bisect.bisect_left(range(layers), True, key=lambda count: held(count) <= limit)


def describe(job: Parallelism) -> str:
    """Describe a job in one line."""
    parts = [f"tp {job.tp}", f"pp {job.pp}", f"dp {job.dp}", f"microbatch {job.microbatch} x {job.num_microbatches}"]
    if job.order != AXES:
        parts.append(f"axes in the order {', '.join(axis for axis in job.order if getattr(job, axis) > 1)}")
    if job.ep > 1:
        parts[2] += f" (ep {job.ep})"
    if job.cp > 1:
        parts.insert(3, f"cp {job.cp}")
    if job.virtual_stages > 1:
        parts.append(f"{job.virtual_stages} virtual stages")
    if job.zero:
        over = f" over {job.shards}" if job.shards < job.replicas else ""
        parts.append(f"optimizer parallel{over}")
        if job.zero == 3:
            parts.append("resharded after forward")
        elif job.shards_accumulated_gradients:
            parts.append("accumulated gradients sharded")
    if job.sequence_parallel:
        parts.append("sequence parallel")
    if job.recompute != "none":
        parts.append(f"recompute {job.recompute}{_which_layers(job.recomputed_layers)}")
    return ", ".join(parts)


def _which_layers(counts: tuple[int, ...] | None) -> str:
    if counts is None:
        return ""
    runs = [(count, len(list(stages))) for count, stages in itertools.groupby(counts)]
    if len(runs) == 1:
        return f" of {counts[0]} layers" + (" a stage" if len(counts) > 1 else "")
    return " of layers " + " ".join(f"{count}" if times == 1 else f"{count}(x{times})" for count, times in runs)


def distinct(options: Sequence[Option]) -> list[Option]:
    """Keep the first of the options that share mesh, microbatch and virtual stages."""
    found: dict[tuple[Hashable, ...], Option] = {}
    for option in options:
        job = option.job
        found.setdefault((job.order, job.tp, job.pp, job.cp, job.ep, job.microbatch, job.virtual_stages), option)
    return list(found.values())


def why_slower(option: Option, best: Option) -> str:
    """List the terms that make `option` slower than `best`, the largest first, and those that are faster."""
    differences = {
        name.replace("_", " "): value - getattr(best.time, name) for name, value in vars(option.time).items()
    }
    noted = [f"{name} {seconds:+.2f} s" for name, seconds in differences.items() if abs(seconds) > 0.005 * best.seconds]
    noted.sort(key=lambda text: -abs(float(text.split()[-2])))
    return ", ".join(noted[:3]) or "equal within half a percent"


def smallest_changes(request: PlanRequest, options: list[Option]) -> list[str]:
    """Report by how much the nearest option does not fit, and which more devices, memory or smaller batch would be enough."""
    nearest = min(options, key=lambda option: option.peak_bytes)
    lacking = nearest.peak_bytes - nearest.usable_bytes
    lines = [
        f"nothing fits: the nearest ({describe(nearest.job)}) needs {nearest.peak_bytes / 2**30:.1f} GB on a device that has "
        f"{nearest.usable_bytes / 2**30:.1f} GB to use, {lacking / 2**30:.1f} GB too few",
        f"devices with at least {nearest.peak_bytes / 2**30 + request.cluster.reserved_gb:.0f} GB would be enough",
    ]
    for factor in (2, 4, 8, 16, 32, 64):
        larger = dataclasses.replace(request, devices=request.devices * factor)
        try:
            found = search(larger)[0]
        except ConfigError:
            continue
        if found.fits:
            lines.append(f"{larger.devices} devices would be enough: {describe(found.job)}")
            break
    for batch in sorted(
        (d for d in divisors(request.global_batch_size) if d < request.global_batch_size), reverse=True
    ):
        try:
            found = search(dataclasses.replace(request, global_batch_size=batch))[0]
        except ConfigError:
            continue
        if found.fits:
            lines.append(f"a global batch of {batch} would be enough: {describe(found.job)}")
            break
    return lines
