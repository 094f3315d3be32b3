# SPDX-License-Identifier: Apache-2.0
"""Write a strategy and a training run's fields as a MindFormers 2.x file, with the keys of 2.1, which refuses
older ones."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.context import written_context
from sporeloom.dialects.mindformers2.keys import METHODS, PARALLELISM, TRAIN
from sporeloom.dialects.rows import written_rows
from sporeloom.dialects.settings import LossNotes, Note, Settings
from sporeloom.dialects.stages import as_ranges, rows_of_parts, stage_layers, written_schedule
from sporeloom.dialects.yaml_file import flat_text
from sporeloom.strategy.config import Recompute, Strategy


def write(settings: Settings) -> tuple[str, list[Note]]:
    """Format a MindFormers 2.x file: parallelism and recompute, and the known settings of the other sections."""
    strategy, lost = settings.strategy, LossNotes("mindformers2")
    mesh = strategy.mesh
    if strategy.offload:
        lost("offload", "MindFormers has swap_config in its 1.x files only")
    if strategy.micro_batch_interleave > 1:
        lost("micro_batch_interleave", "MindFormers has interleaved microbatches in its 1.x files only")
    if strategy.engine == "mindspore":
        lost("engine", "MindFormers 2.x does not let MindSpore partition")
    written = {
        PARALLELISM + "tensor_parallel": mesh.tp,
        PARALLELISM + "pipeline_parallel": mesh.pp,
        PARALLELISM + "context_parallel": mesh.cp,
        **written_context(strategy, METHODS, PARALLELISM + "context_parallel", PARALLELISM + "context_parallel_method"),
        **({PARALLELISM + "expert_parallel": mesh.ep} if mesh.ep > 1 else {}),
        **_written_optimizer_parallel(strategy, lost),
        PARALLELISM + "sequence_parallel": strategy.sequence_parallel,
        **_written_pipeline(settings, lost),
        **_written_recompute(strategy.recompute, settings.num_layers, lost),
        **_written_train(settings, lost),
    }
    head = f"# {mesh.size} devices: its data parallel degree, {mesh.dp}, is what the others leave\n"
    return head + flat_text(written), lost.notes


def _written_optimizer_parallel(strategy: Strategy, lost: LossNotes) -> dict[str, Any]:
    zero = strategy.optimizer_parallel
    if zero is None:
        return {PARALLELISM + "data_parallel_shard": 1}
    if zero.shard_accumulated_gradients:
        lost("optimizer_parallel.shard_accumulated_gradients", "data_parallel_shard_strategy decides by other rules")
    if zero.threshold_kb:
        lost("optimizer_parallel.threshold_kb", "2.1 shards parameters of every size", "approximated")
    return {
        PARALLELISM + "data_parallel_shard": zero.shard_size or strategy.mesh.dp,
        PARALLELISM + "reshard_after_forward_policy": "always" if zero.reshard_after_forward else "never",
    }


def _written_pipeline(settings: Settings, lost: LossNotes) -> dict[str, Any]:
    strategy = settings.strategy
    if strategy.mesh.pp == 1:
        return {}
    if settings.micro_batch_size is None:
        lost("pipeline.num_microbatches", "2.x counts the sequences of a microbatch: give --batch-size")
    written: dict[str, Any] = {PARALLELISM + "pipeline_parallel_microbatch_size": settings.micro_batch_size or 1}
    schedule = written_schedule(strategy, lost)
    if strategy.pipeline.virtual_stages > 1:
        written[PARALLELISM + "pipeline_parallel_interleave_num"] = strategy.pipeline.virtual_stages
        written[PARALLELISM + "pipeline_parallel_schedule"] = schedule
    if counts := stage_layers(settings, lost):
        written[PARALLELISM + "pipeline_parallel_layers_per_stage"] = rows_of_parts(counts, strategy)
    return written


def _written_recompute(recompute: Recompute | None, num_layers: int | None, lost: LossNotes) -> dict[str, Any]:
    if recompute is None:
        return {"recompute.mode": "None"}
    is_selective, layers = recompute.kind == "selective", recompute.layers
    if recompute.per_stage is not None or (is_selective and layers != "all"):
        layers = "all"
        lost("recompute", "all layers are recomputed", "approximated")
    if is_selective:
        lost("recompute.kind", "MindFormers chooses the operators by itself", "approximated")
        return {"recompute.mode": "select"}
    if layers == "all" and num_layers is None:
        lost("recompute", "2.1 lists the layers, and their number is not known: give --num-layers")
        return {"recompute.mode": "None"}
    numbers = range(num_layers or 0) if layers == "all" else layers
    return {"recompute.mode": "full", "recompute.full_recompute_layer": as_ranges(list(numbers))}


def _written_train(settings: Settings, lost: LossNotes) -> dict[str, Any]:
    train, written = dict(settings.train), dict[str, Any]()
    if settings.micro_batch_size:
        written["training.local_batch_size"] = settings.micro_batch_size
    written |= written_rows(TRAIN, train)
    lost.rest({name: value for name, value in train.items() if name != "accumulate"})
    return written
