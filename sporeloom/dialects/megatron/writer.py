# SPDX-License-Identifier: Apache-2.0
"""Write a strategy and a training run's fields as Megatron-LM's flags."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.context import written_context
from sporeloom.dialects.megatron.keys import BACKENDS, DTYPES, ENDS, METHODS, TRAIN
from sporeloom.dialects.rows import written_rows
from sporeloom.dialects.settings import LossNotes, Note, Settings
from sporeloom.dialects.stages import stage_layers
from sporeloom.strategy.config import OptimizerParallel, Recompute


def write(settings: Settings) -> tuple[str, list[Note]]:
    """Format the flags, one a line."""
    strategy, train, lost = settings.strategy, dict(settings.train), LossNotes("megatron")
    mesh, recompute, zero = strategy.mesh, strategy.recompute, strategy.optimizer_parallel
    flags: list[tuple[str, Any]] = [
        ("--tensor-model-parallel-size", mesh.tp),
        *([("--expert-model-parallel-size", mesh.ep)] if mesh.ep > 1 else []),
        *written_context(strategy, METHODS, "--context-parallel-size", "--cp-comm-type").items(),
        ("--pipeline-model-parallel-size", mesh.pp),
    ]
    if settings.num_layers is not None:
        flags.append(("--num-layers", settings.num_layers))
    if settings.micro_batch_size:
        flags.append(("--micro-batch-size", settings.micro_batch_size))
    elif mesh.pp > 1:
        lost("pipeline.num_microbatches", "Megatron counts the sequences of a microbatch: give --batch-size")
    if (virtual := strategy.pipeline.virtual_stages) > 1:
        flags.append(("--num-virtual-stages-per-pipeline-rank", virtual))
    if strategy.offload and strategy.offload.layers:
        lost("offload.layers", "Megatron moves activations by other rules")
    if strategy.pipeline.schedule != "1f1b":
        lost("pipeline.schedule", f"{strategy.pipeline.schedule}: Megatron has 1f1b alone")
    if zero and zero.reshard_after_forward:
        lost(
            "optimizer_parallel.reshard_after_forward",
            "Megatron has it with --use-megatron-fsdp, whose keys differ",
        )
    if strategy.micro_batch_interleave > 1:
        lost("micro_batch_interleave", "Megatron has no interleaved microbatches")
    if strategy.engine == "mindspore":
        lost("engine", "Megatron does not let MindSpore partition")
    train.pop("accumulate", None)
    flags += written_rows(TRAIN, train).items()
    switches = ["--sequence-parallel"] * strategy.sequence_parallel + ["--use-distributed-optimizer"] * (
        zero is not None
    )
    switches += ["--optimizer-cpu-offload"] * strategy.optimizer_on_host
    if written := [flag for flag, dtype in DTYPES.items() if dtype == train.get("compute_dtype")]:
        switches += written
        train.pop("compute_dtype")
    attention = train.pop("attention", None)
    flags += [("--attention-backend", theirs) for theirs, ours in BACKENDS.items() if ours == attention]
    if zero:
        more = "" if zero == OptimizerParallel() else "; threshold, shard size and sharded gradients have no flags"
        lost(
            "optimizer_parallel",
            f"Megatron's distributed optimizer shards the moments, not the weights{more}",
            "approximated",
        )
    flags += _stage_flags(settings, lost)
    if recompute:
        flags += _recompute_flags(recompute, lost)
    lost.rest(train)
    head = f"# {mesh.size} devices: the data parallel degree, {mesh.dp}, is what the others leave\n"
    return head + " \\\n".join([*(f"{flag} {value}" for flag, value in flags), *switches]) + "\n", lost.notes


def _stage_flags(settings: Settings, lost: LossNotes) -> list[tuple[str, Any]]:
    counts = stage_layers(settings, lost)
    if not counts:
        return []
    if settings.strategy.pipeline.virtual_stages > 1:
        lost("pipeline.stages", f"{counts}: virtual stages are even")
        return []
    if len(set(counts[1:-1])) > 1:
        lost("pipeline.stages", f"{counts}: only the first and the last stage can differ")
        return []
    return list(zip(ENDS, (counts[0], counts[-1]), strict=True))


def _recompute_flags(recompute: Recompute, lost: LossNotes) -> list[tuple[str, Any]]:
    if recompute.kind == "selective":
        if recompute.per_stage is not None or recompute.layers != "all":
            lost("recompute", "selective recomputation is for all layers", "approximated")
        return [("--recompute-granularity", "selective")]
    if recompute.per_stage is not None and len(set(recompute.per_stage)) == 1:
        number = recompute.per_stage[0]
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "block"),
            ("--recompute-num-layers", number),
        ]
    if recompute.per_stage is not None or recompute.layers != "all":
        lost("recompute", "the same number of layers in every stage, or all", "approximated")
    return [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
