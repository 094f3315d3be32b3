# SPDX-License-Identifier: Apache-2.0
"""Memory of published runs: the planner's formulas, and what the engines of these runs hold otherwise than our own graphs.

Every entry of `ENGINES` is a fact about an engine's code, with its source. One number is fitted on measured memory: what
PyTorch's allocator holds for each byte in use (benchmarks/fit_memory.py).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from sporeloom.planner.activations import KeptActivations, held_activations
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.errors import memory_errors
from sporeloom.planner.memory import StageMemory, stage_memory
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import expert_parameters, expert_shards, layer_parameters
from sporeloom.planner.published import PublishedRun
from sporeloom.planner.recipe_memory import recipe_activations
from sporeloom.planner.recipes import recipes
from sporeloom.strategy.schedule import microbatches_held

Figure = Literal["device", "reserved", "allocated"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Memory of an engine where it differs from that of our own graphs."""

    sources: str
    """Regular expression of the runs: source, blank, id."""
    figure: Figure = "device"
    """Memory that the publisher prints: of the whole device (nvidia-smi), taken by the allocator, or in use."""
    is_pytorch: bool = False
    """The allocator keeps freed blocks, and its pool is larger than what is in use."""
    dims: tuple[tuple[str, Any], ...] = ()
    """Properties of its model that rows do not have."""
    job: tuple[tuple[str, Any], ...] = ()
    """Properties of its strategy that rows do not have."""
    is_deepspeed: bool = False
    """Gradients in 2 bytes and 4 in the update, of shards with ZeRO; without it both at once. A buffer for reductions. Stages
    of a pipeline keep their results."""
    is_fsdp: bool = False
    """Weights in float32 are the master weights. In a pipeline they stay gathered, with whole gradients in float32."""
    adds_up_whole: bool = False
    """Gradients of microbatches are added up before they are sharded, in float32, those of experts in bf16."""
    logit_bytes: int = 8
    """Bytes of a logit at the peak of the loss."""
    selective_features: bool = False
    """Selective recomputation keeps the results of every second product of a layer and of attention."""
    parallel_logit_bytes: int = 0
    """The same where the loss is tensor parallel, if it differs."""
    balances_embeddings: bool = False
    """Both tables of words count as a layer where stages are made, if that makes them even."""
    norms_embedding: bool = False
    """The embedding has a norm, whose input is kept, and is not sharded behind its sum over tp."""
    ring: bool = False
    """Stages but the last one hold activations of twice as many microbatches as there are stages."""
    splits_batch_by_stages: bool = False
    """A pipeline has as many microbatches as stages."""
    is_fp8_linear: bool = False
    """In fp8 products keep their inputs in fp8."""
    recompute: str = "none"
    """Its default, of runs that do not say it."""


ENGINES = {
    # nvidia-smi, first and last nodes, and a norm of the embedding: the chronicle and launch script themselves.
    # type:transformer|embedding: its section "Rebalancing layers".
    "Megatron-DeepSpeed": Engine(
        sources=r"^bigscience",
        is_pytorch=True,
        is_deepspeed=True,
        balances_embeddings=True,
        norms_embedding=True,
    ),
    "AscendSpeed": Engine(sources=r"AscendSpeed", is_pytorch=True, is_deepspeed=True),
    "DeepSpeed": Engine(sources=r"zero3", is_pytorch=True, is_deepspeed=True),
    # oneflow/core/job_rewriter: pipeline_buffer_pass.cpp has buffers between forward and backward passes for 2 x stages;
    # auto_mixed_precision_lists.cpp computes the loss in fp16, which keeps probabilities and their gradient.
    "OneFlow": Engine(sources=r" dlperf_of_", ring=True, logit_bytes=4),
    # benchmark_one_case_gpt_bert.py: tie_word_embeddings=False, deterministic=True; memory: peak of XLA's allocator.
    "Alpa": Engine(
        sources=r"^alpa-projects",
        figure="allocated",
        dims=(("tied_embedding", False), ("dropout", False)),
        job=(("gradient_bytes", 2), ("optimizer_bytes", 12)),
    ),
    # train.py, parallelize_llama.py, pipelining: loss in float32 that is not compiled, batch / stages, selective op.
    "torchtitan of 2024": Engine(
        sources=r"^pytorch/torchtitan.*202412",
        figure="reserved",
        is_pytorch=True,
        is_fsdp=True,
        logit_bytes=12,
        parallel_logit_bytes=16,
        selective_features=True,
        recompute="selective",
        splits_batch_by_stages=True,
    ),
    "torchtitan": Engine(
        sources=r"^pytorch/torchtitan",
        figure="reserved",
        is_pytorch=True,
        is_fsdp=True,
        logit_bytes=4,
        selective_features=True,
        recompute="selective",
        splits_batch_by_stages=True,
    ),
    # mpt: no dropout; fused cross entropy of logits in bf16 and their gradient.
    "llm-foundry": Engine(
        sources=r"^mosaicml", is_pytorch=True, is_fsdp=True, logit_bytes=4, dims=(("dropout", False),)
    ),
    # Recipes: distributed optimizer, gradients reduced in bf16; Transformer Engine keeps inputs of products in fp8, and its
    # loss (cross_entropy_fusion_impl: te) writes gradients of logits in their place, in bf16.
    "Megatron-Bridge": Engine(
        sources=r"Megatron-Bridge",
        is_pytorch=True,
        job=(("gradient_bytes", 2),),
        logit_bytes=2,
        is_fp8_linear=True,
    ),
    "NeMo launcher": Engine(
        sources=r"NeMo-Framework-Launcher",
        is_pytorch=True,
        job=(("gradient_bytes", 2),),
        is_fp8_linear=True,
    ),
    # moe/parallelizer.py, loss/masked_ce.py at bd25c2c: FSDP2 with reductions in float32, torch's loss in bf16
    "NeMo Automodel": Engine(sources=r"Automodel", is_pytorch=True, adds_up_whole=True, logit_bytes=6),
    "other": Engine(sources=r""),
}
BUCKET = 500_000_000
"""Entries of DeepSpeed's buffer for the reduction of gradients (reduce_bucket_size)."""
WITH_SUMS = 6
"""Bytes of a gradient in bf16 and its sum in float32, of rows that name the latter."""
LIVE = 1_000_000_000
"""Entries that DeepSpeed's ZeRO 3 keeps gathered (stage3_max_live_parameters)."""


@dataclass(frozen=True)
class RunMemory:
    """Bytes of a run's fullest device."""

    needed: float
    """In use at the peak. A device that has so many runs it: PyTorch's allocator gives back freed blocks before it fails."""
    least: float
    """The same if all layers are recomputed, where it is not published which ones are."""
    outside: float
    """Outside of the allocator, in the figure that the publisher prints."""
    has_pool: bool
    """Whether that figure is of the pool of PyTorch's allocator."""

    def shown(self, pool: float | None = None) -> float:
        """The publisher's figure. `pool`: bytes of PyTorch's pool for each byte in use; None: as fitted."""
        factor = (pool or memory_errors()["pytorch_pool"]) if self.has_pool else 1.0
        return self.needed * factor + self.outside


def engine_of(run: PublishedRun) -> Engine:
    """The engine that ran it."""
    return next(engine for engine in ENGINES.values() if re.search(engine.sources, f"{run.source} {run.id}"))


def run_memory(run: PublishedRun) -> RunMemory:
    """Estimate a run's memory."""
    engine = engine_of(run)
    needed = least = max(stage.total for stage in engine_stages(run))
    outside = run.cluster.reserved_gb * 2**30 if engine.figure == "device" else 0.0
    if "recompute" in run.assumed:
        job = dataclasses.replace(run.job, recompute="full")
        rest = tuple(name for name in run.assumed if name != "recompute")
        least = max(stage.total for stage in engine_stages(dataclasses.replace(run, job=job, assumed=rest)))
    return RunMemory(needed, min(least, needed), outside, engine.is_pytorch and engine.figure != "allocated")


def engine_stages(run: PublishedRun) -> list[StageMemory]:
    """Memory in use on each stage's devices."""
    engine = engine_of(run)
    dims = dataclasses.replace(run.dims, **dict(engine.dims))
    job = _job(run, engine)
    stages = [_stage(engine, dims, job, number, stage) for number, stage in enumerate(stage_memory(dims, job))]
    if job.expert_tp != 1 or run.id not in recipes():  # MindFormers has graphs, as we do
        return stages
    return [_by_recipe(run, engine, job, number, stage) for number, stage in enumerate(stages)]


def _by_recipe(run: PublishedRun, engine: Engine, job: Parallelism, number: int, stage: StageMemory) -> StageMemory:
    """A stage with the activations of its recipe, and with what FSDP has whole."""
    dims, recipe = run.dims, recipes()[run.id]
    ours, theirs, parts = (
        KeptActivations.of(dims, job),
        recipe_activations(dims, job, recipe),
        job.parts(dims.num_layers),
    )
    held, before = (held_activations(job, kept, number, parts[number]) for kept in (theirs, ours))
    working = theirs.full - theirs.recomputed
    if number == job.last_stage:
        working = max(working, job.logit_bytes / 4 * ours.logits)
    changed: dict[str, Any] = {"activations": stage.activations + held - before, "working": working}
    if engine.adds_up_whole:
        experts = expert_parameters(dims, job)[number]
        others, shards, of_experts = stage.parameters - experts, job.shards, expert_shards(job)
        changed["gradients"] = 4.0 * others + 2.0 * experts
        if not recipe.reshards:  # and the shards
            changed["weights"] = 2.0 * (
                stage.parameters + others / shards * (shards > 1) + experts / of_experts * (of_experts > 1)
            )
    return dataclasses.replace(stage, **changed)


def _job(run: PublishedRun, engine: Engine) -> Parallelism:
    """The strategy with what the engine does by default."""
    job, layers = run.job, run.dims.num_layers
    logits = engine.parallel_logit_bytes if engine.parallel_logit_bytes and job.tp > 1 else engine.logit_bytes
    given: dict[str, Any] = {"logit_bytes": logits, **dict(engine.job)}
    if "recompute" in run.assumed:
        given["recompute"] = engine.recompute
    if engine.is_fp8_linear and "zero" in run.assumed:
        given["zero"] = 1
    if engine.balances_embeddings and job.pp > 1 and (layers + 2) % job.pp == 0:
        of_each = (layers + 2) // job.pp
        given["layers_of_stages"] = (of_each - 1, *[of_each] * (job.pp - 2), of_each - 1)
    batch = job.microbatch * job.num_microbatches
    if engine.splits_batch_by_stages and job.pp > 1 and "microbatch" in run.assumed and batch % job.pp == 0:
        given |= {"microbatch": batch // job.pp, "num_microbatches": job.pp}
    if engine.is_fsdp:  # float32 weights are the master weights
        given |= {"weight_bytes": 0, "gradient_bytes": 4, "optimizer_bytes": 12}
    if run.id in recipes():
        given |= recipes()[run.id].state_bytes
    if engine.is_deepspeed and job.gradient_bytes != WITH_SUMS:
        given |= {"gradient_bytes": 2, "optimizer_bytes": 16 if job.zero else 20}
    return dataclasses.replace(job, **given)


def _stage(engine: Engine, dims: Dimensions, job: Parallelism, number: int, stage: StageMemory) -> StageMemory:
    """A stage as the engine has it."""
    is_last, tokens = number == job.last_stage, job.tokens(dims.seq_len)
    spread, layers = job.tp if job.sequence_parallel else 1, job.stages(dims.num_layers)[number]
    held = microbatches_held(number, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)
    stream = tokens * job.activation_bytes * dims.hidden_size / spread
    activations, beside = stage.activations, 0.0
    if engine.ring and job.pp > 1 and not is_last:
        activations *= 2 * job.pp / held
    if engine.norms_embedding and number == 0:  # and its mask is whole on every tensor parallel rank
        activations += held * (stream + tokens * dims.hidden_size * (1 - 1 / job.tp))
    if engine.is_deepspeed and job.pp > 1 and not is_last:  # results of a stage stay until their gradients come
        activations += held * stream
    if engine.is_deepspeed and job.zero:
        beside += job.activation_bytes * BUCKET
    activations += held * layers * tokens * _further_features(engine, dims, job, spread)
    changed: dict[str, Any] = {"activations": activations, "beside": beside}
    if engine.is_fsdp and job.pp > 1:  # gathered for all microbatches, whose gradients are added up whole, in float32
        changed |= {"weights": 2.0 * stage.parameters, "gradients": 4.0 * stage.parameters}
        passed = job.num_microbatches * job.virtual_stages * stream
        changed["activations"] += 2 * passed * (not is_last) + passed * (number > 0)
    if engine.parallel_logit_bytes and job.tp > 1 and is_last:  # the head's input is gathered
        changed["working"] = stage.working + (spread - 1) * stream
    if engine.is_deepspeed and job.zero == 3:
        layer, largest = layer_parameters(dims, job.tp), dims.hidden_size * max(dims.ffn_size, 3 * dims.hidden_size)
        others = stage.parameters - layers * layer
        changed["weights"] = stage.weights + 2.0 * (LIVE + largest - 2 * layer - others)
        changed["working"] = stage.working + 2.0 * (largest - layer)
    return dataclasses.replace(stage, **changed)


def _further_features(engine: Engine, dims: Dimensions, job: Parallelism, spread: int) -> float:
    """Bytes of a token that a layer keeps beyond those of our graphs."""
    h, f, q, kv, width = dims.hidden_size, dims.ffn_size, dims.query_size, dims.kv_size, job.activation_bytes
    if engine.selective_features and job.recompute == "selective" and job.flash_attention:
        # selective in our graphs: both norms' inputs, attention's four, all of the MLP but the activation
        of_mlp = 2 * f if dims.gated_mlp else f
        of_graph = dims.num_norms * width * h / spread + width * (2 * q + 2 * kv + of_mlp) / job.tp
        kept = width * h / spread + width * (q + kv + f + q) / job.tp + width * h / spread + 4 * dims.num_heads / job.tp
        return kept - of_graph
    if engine.is_fp8_linear and job.precision == "fp8" and job.recompute == "none":
        return -(dims.num_norms * h / spread + (q + f) / job.tp)
    return 0.0
