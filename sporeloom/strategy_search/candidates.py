# SPDX-License-Identifier: Apache-2.0
"""Enumerate strategies: the planner's meshes, and on each all settings of a strategy file that change time or memory."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from sporeloom.core.shipped import DECODER, EXPERTS
from sporeloom.models.config import ModelConfig
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.search import MAX_VIRTUAL_STAGES, search
from sporeloom.strategy.checks import batch_problems, divisors, group_problems, model_problems, strategy_problems
from sporeloom.strategy.config import Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.text import strategy_text
from sporeloom.strategy_search.request import TuneRequest

SPLIT_PIPELINES = (("1f1b", 1), ("gpipe", 1), ("zero_bubble_h1", 1), ("zero_bubble_v", 2), ("dualpipe_v", 2))
"""Schedules and their virtual stages, besides interleaved ones."""

BY_TOKENS = "[[dp, cp, sp], ~]"
ALTERNATIVES = {
    "unsharded-table": {"word.gather": "[[~, ~], [[dp, cp]]]"},
    "head-by-tokens": {
        "head.matmul": f"[{BY_TOKENS}, [~, ~]]",
        "loss.sum|pick_sum?": f"[{BY_TOKENS}]",
    },
    "mlp-by-tokens": {
        "mlp.up|gate.matmul?": f"[{BY_TOKENS}, [~, ~]]",
        "mlp.up|gate.bias_add|rescale?": f"[{BY_TOKENS}, [~]]",
        "mlp.down.matmul?": f"[{BY_TOKENS}, [~, ~]]",
    },
}
"""Rules of operators besides those of the family, by name: ranks of tp look up words in the full table; or compute the head,
or MLPs, for their tokens alone, with unsharded weights, which saves collectives of activations and costs one of gradients."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its gradient accumulation steps, and alternative rules of some operators."""

    strategy: Strategy
    accumulate: int = 1
    rules: tuple[str, ...] = ()
    """Names of `ALTERNATIVES`."""

    @property
    def name(self) -> str:
        """Short name; candidates of one search have different names."""
        strategy, pipeline = self.strategy, self.strategy.pipeline
        degrees = {axis: degree for axis, degree in strategy.mesh.degrees.items() if degree > 1}
        parts = [f"{axis}{degree}" for axis, degree in degrees.items()] or ["one"]
        parts += ["ulysses"] if strategy.context_parallel == "ulysses" else []
        parts += [f"m{strategy.num_microbatches(self.accumulate)}"]
        parts += [pipeline.schedule] if pipeline.schedule != "1f1b" else []
        parts += [f"v{pipeline.virtual_stages}"] if pipeline.virtual_stages > 1 and pipeline.schedule == "1f1b" else []
        if isinstance(pipeline.stages, Stages):
            parts.append("layers-" + _runs(pipeline.stages.num_layers or []))
        if zero := strategy.optimizer_parallel:
            level = 3 if zero.reshard_after_forward else 2 if zero.shard_accumulated_gradients else 1
            parts.append(f"zero{level}" + (f"of{zero.shard_size}" if zero.shard_size else ""))
        parts += ["sp"] if strategy.sequence_parallel else []
        if recompute := strategy.recompute:
            layers = f"-{_runs(recompute.per_stage)}" if recompute.per_stage is not None else ""
            parts.append(f"{'re' if recompute.kind == 'full' else 'selective'}compute{layers}")
        parts += ["offload"] if strategy.optimizer_on_host else []
        parts += self.rules
        return "_".join(parts)

    def text(self, config: ModelConfig, head: Sequence[str] = ()) -> str:
        """The strategy file."""
        rules = EXPERTS if config.experts else DECODER
        if self.rules:
            changed = (f"{path}: {layouts}" for name in self.rules for path, layouts in ALTERNATIVES[name].items())
            rules = f"{{base: {rules}, operators: {{{', '.join(changed)}}}}}"
        return strategy_text(self.strategy, rules, head)


def _runs(counts: Sequence[int]) -> str:
    """Counts with repetitions: `12x3-11`."""
    found = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return "-".join(f"{count}x{times}" if times > 1 else str(count) for count, times in found)


def meshes(request: TuneRequest, max_meshes: int) -> list[Parallelism]:
    """The planner's meshes and microbatch sizes: a half the fastest ones, then the fastest of each number of stages and of
    tensor parallel ranks, so that few leave out none; those that do not fit by memory last. With experts also meshes whose
    experts are sharded over a part of tp."""
    found: dict[tuple[Hashable, ...], Parallelism] = {}
    for option in search(request.plan):
        job = option.job
        found.setdefault((job.order, job.dp, job.tp, job.pp, job.cp, job.ep, job.microbatch), job)
    ranked, experts, of_shape = list(found.values()), request.plan.dims.num_experts, dict[Hashable, Parallelism]()
    for job in ranked:
        of_shape.setdefault((job.pp, job.tp), job)
    fastest = ranked[: -(-max_meshes // 2)]
    chosen = list(dict.fromkeys([*fastest, *of_shape.values(), *ranked]))[:max_meshes]
    for job in [job for job in chosen if experts and job.pp == 1 and job.ep == job.dp]:
        wider = (job.dp * parts for parts in divisors(job.tp) if parts > 1)
        chosen += [replace(job, ep=ep) for ep in wider if experts % ep == 0]
    return chosen


def candidates(request: TuneRequest, job: Parallelism) -> Iterator[Candidate]:
    """All legal strategies on the mesh and with the microbatch of `job`, without recomputation (`recomputations` adds it)."""
    mesh, config = job.mesh, request.model.values
    accumulate = job.num_microbatches if mesh.pp == 1 else 1
    choices = itertools.product(
        _pipelines(mesh, job.num_microbatches, config.num_layers),
        shardings(request, mesh, job.num_microbatches),
        (False, True) if mesh.tp > 1 else (False,),
        ("gather", "ulysses") if mesh.cp > 1 else ("gather",),
        (None, Offload(optimizer=True)),
    )
    for pipeline, zero, sequence_parallel, context_parallel, offload in choices:
        strategy = Strategy(
            mesh=mesh,
            pipeline=pipeline,
            optimizer_parallel=zero,
            sequence_parallel=sequence_parallel,
            context_parallel=context_parallel,  # type: ignore[arg-type]
            offload=offload,
        )
        if not problems(request, Candidate(strategy, accumulate)):
            yield Candidate(strategy, accumulate)


def problems(request: TuneRequest, candidate: Candidate) -> list[str]:
    """Reasons why the model or the batch cannot run under a strategy."""
    strategy, config = candidate.strategy, request.model.values
    batch = request.batch_size, request.seq_len, candidate.accumulate
    return (
        strategy_problems(strategy)
        or model_problems(strategy, config)
        or [*batch_problems(strategy, *batch), *group_problems(strategy, config, *batch)]
    )


def recomputations(request: TuneRequest, candidate: Candidate) -> list[Candidate]:
    """The candidate with the kinds of recomputation of all layers."""
    config = request.model.values
    kinds = ("full",) if config.attention_on_ascend == "flash" else ("selective", "full")
    return [with_recompute(candidate, Recompute(kind=kind)) for kind in kinds]  # type: ignore[arg-type]


def with_recompute(candidate: Candidate, recompute: Recompute) -> Candidate:
    """The candidate with another recomputation."""
    return replace(candidate, strategy=replace(candidate.strategy, recompute=recompute))


def variations(request: TuneRequest, candidate: Candidate) -> list[Candidate]:
    """The candidate with one change that closed forms do not see: another order of the axes, so that other ranks are
    neighbours; or other rules of some operators."""
    strategy, config = candidate.strategy, request.model.values
    mesh, found = strategy.mesh, list[Candidate]()
    axes = [axis for axis in mesh.order if axis != "pp" and mesh.degree(axis) > 1]
    degrees = {axis: degree for axis, degree in mesh.degrees.items() if degree > 1}
    several = request.plan.devices > request.plan.cluster.devices_per_node and mesh.ep == 1
    for order in itertools.permutations(axes) if several else ():
        placed = replace(strategy, mesh=Mesh(order=("pp", *order), **degrees))
        found.append(replace(candidate, strategy=placed))
    if mesh.tp > 1:
        names = [] if config.tied_embedding else ["unsharded-table"]
        by_tokens = [] if config.experts or config.tied_embedding else ["head-by-tokens"]
        by_tokens += [] if config.experts else ["mlp-by-tokens"]
        names += by_tokens if strategy.sequence_parallel else []
        found += [
            replace(candidate, rules=tuple(sorted((*candidate.rules, name))))
            for name in names
            if name not in candidate.rules
        ]
    refused = request.plan.cluster.refuses
    return [one for one in found if one != candidate and not refused(one.strategy.mesh) and not problems(request, one)]


def _pipelines(mesh: Mesh, num_microbatches: int, num_layers: int) -> list[Pipeline]:
    """Schedules and distributions of the layers."""
    if mesh.pp == 1:
        return [Pipeline()]
    interleaved = [("1f1b", parts) for parts in range(2, MAX_VIRTUAL_STAGES + 1)]
    found = []
    for schedule, virtual in (*SPLIT_PIPELINES, *interleaved):
        pipeline = Pipeline(num_microbatches=num_microbatches, schedule=schedule, virtual_stages=virtual)
        found.append(pipeline)
        if virtual == 1:
            uneven = uneven_stages(num_layers, mesh.pp)
            found += [replace(pipeline, stages=Stages(num_layers=counts)) for counts in uneven]
    return found


def uneven_stages(num_layers: int, pp: int) -> list[list[int]]:
    """Distributions that relieve the last stage, which has the head, by a layer or two, the first, which has the embedding,
    or both; and leftover layers on other stages than the first ones."""
    even = _even(num_layers, pp)
    found = []
    for fewer_first, fewer_last in itertools.product((0, 1), (0, 1, 2)):
        first, last = num_layers // pp - fewer_first, num_layers // pp - fewer_last
        if pp == 2:
            found.append([num_layers - last, last] if fewer_first == 0 else [first, num_layers - first])
        else:
            found.append([first, *_even(num_layers - first - last, pp - 2), last])
    distinct = {tuple(counts) for counts in found if min(counts) >= 1 and counts != even}
    return [list(counts) for counts in sorted(distinct)]


def _even(num_layers: int, parts: int) -> list[int]:
    least, more = divmod(num_layers, parts)
    return [least + (part < more) for part in range(parts)]


def shardings(request: TuneRequest, mesh: Mesh, num_microbatches: int) -> list[OptimizerParallel | None]:
    """Kinds of ZeRO: none, over all replicas, over those of a server, with sharded gradients, with resharded weights."""
    if mesh.replicas == 1:
        return [None]
    found: list[OptimizerParallel | None] = [None, OptimizerParallel()]
    inside = request.plan.cluster.devices_per_node // mesh.tp
    if 1 < inside < mesh.replicas and mesh.replicas % inside == 0:
        found.append(OptimizerParallel(shard_size=inside))
    if num_microbatches > 1:
        found.append(OptimizerParallel(shard_accumulated_gradients=True))
    return [*found, OptimizerParallel(reshard_after_forward=True)]
