# SPDX-License-Identifier: Apache-2.0
"""Write a strategy and a training run's fields as a MindFormers 1.x file."""

from __future__ import annotations

from typing import Any

from sporeloom.dialects.context import written_context
from sporeloom.dialects.mindformers1.keys import (
    CONTEXT_METHOD,
    FULL,
    GRADIENTS,
    INTERLEAVE,
    LEVEL,
    METHODS,
    MODEL,
    ONLY,
    SCHEDULER,
    SELECTIVE,
    TRAIN,
    TYPES,
    VIRTUAL,
    ZERO,
    ZERO_CONFIG,
)
from sporeloom.dialects.mindformers1.model import written_activation, written_model
from sporeloom.dialects.mindformers1.swap import written_swap
from sporeloom.dialects.rows import written_rows
from sporeloom.dialects.settings import LossNotes, Note, Settings
from sporeloom.dialects.stages import rows_of_parts, stage_layers, written_schedule
from sporeloom.dialects.yaml_file import flat_text
from sporeloom.strategy.config import Recompute, Strategy
from sporeloom.strategy.stages import layers_of_stages, layers_per_part


def write(settings: Settings) -> tuple[str, list[Note]]:
    """Format a MindFormers 1.x file: the parallel sections, and the known settings of the others."""
    strategy, lost = settings.strategy, LossNotes("mindformers1")
    written = {
        "use_parallel": True,
        "micro_batch_interleave_num": strategy.micro_batch_interleave,
        **_train(settings, lost),
        **_mesh(strategy),
        **_optimizer_parallel(strategy, lost),
    }
    schedule = written_schedule(strategy, lost)
    if strategy.pipeline.virtual_stages > 1:
        written |= {INTERLEAVE: True, SCHEDULER: schedule}
    written |= _recompute(settings, lost) | written_swap(strategy, lost) | _stages(settings, lost)
    return flat_text(written), lost.notes


def _train(settings: Settings, lost: LossNotes) -> dict[str, Any]:
    """Sections of the training run's settings."""
    train, written = dict(settings.train), dict[str, Any]()
    if (size := settings.micro_batch_size) and train.pop("batch_size"):
        written["runner_config.batch_size"] = size
    accumulate = train.pop("accumulate", None) if settings.strategy.mesh.pp > 1 else None
    written |= written_rows(TRAIN, train)
    section = written_model(*settings.network) if settings.network else {}
    written |= section
    if family := train.pop("model", None):
        size = train.pop("size", None)
        if not section:
            written |= written_activation(settings.network[1]) if settings.network else {}
            if settings.model:
                lost("config", "a network of no built-in size: write its numbers into model.model_config")
            written["trainer.model_name"] = {"pangu": "pangualpha"}.get(family, family) + (f"_{size}" if size else "")
    lost.rest({**train, "accumulate": accumulate})
    types = {
        f"{section}.type": name for section, name in TYPES.items() if any(k.startswith(f"{section}.") for k in written)
    }
    return types | written


def _mesh(strategy: Strategy) -> dict[str, Any]:
    mesh = strategy.mesh
    return {
        "parallel_config.data_parallel": mesh.dp,
        "parallel_config.model_parallel": mesh.tp,
        **written_context(strategy, METHODS, "parallel_config.context_parallel", CONTEXT_METHOD),
        **({"parallel_config.expert_parallel": mesh.ep} if mesh.ep > 1 else {}),
        "parallel_config.pipeline_stage": mesh.pp,
        "parallel_config.micro_batch_num": strategy.pipeline.num_microbatches,
        "parallel_config.use_seq_parallel": strategy.sequence_parallel,
        "parallel_config.vocab_emb_dp": False,
    }


def _optimizer_parallel(strategy: Strategy, lost: LossNotes) -> dict[str, Any]:
    zero = strategy.optimizer_parallel
    written: dict[str, Any] = {key: value for key, value, _ in ONLY if key.startswith("parallel.")}
    written[ZERO] = zero is not None
    if zero:
        if zero.reshard_after_forward and strategy.recompute == Recompute() and strategy.mesh.pp == 1:
            written[LEVEL] = "level3"  # MindSpore accepts no setting of gradients with it
        else:
            written[GRADIENTS] = zero.shard_accumulated_gradients
            if zero.reshard_after_forward:
                why = "MindSpore gathers weights twice with full recomputation and without a pipeline alone"
                lost("optimizer_parallel.reshard_after_forward", why)
        written[ZERO_CONFIG + "parallel_optimizer_threshold"] = zero.threshold_kb
        written[ZERO_CONFIG + "optimizer_weight_shard_size"] = zero.shard_size or -1
    return written


def _recompute(settings: Settings, lost: LossNotes) -> dict[str, Any]:
    recompute = settings.strategy.recompute
    if recompute is None:
        return {FULL: False, SELECTIVE: False}
    value: Any = True if recompute.per_stage is None else recompute.per_stage
    if value is not True and not any(value):
        lost("recompute.per_stage", f"{value} is the same as none", "approximated")
    if isinstance(recompute.layers, list) and recompute.per_stage is None:
        value = _as_first_layers(settings, recompute.layers)
        if value is None:
            lost("recompute.layers", f"{recompute.layers}: only the first layers of each stage can be named")
            value = True
        else:
            lost("recompute.layers", f"written as how many of each stage, {value}", "renamed")
    if recompute.kind == "selective":
        lost("recompute.kind", "MindFormers chooses the operators by itself", "approximated")
        return {FULL: False, SELECTIVE: value}
    return {FULL: value, SELECTIVE: False}


def _as_first_layers(settings: Settings, layers: list[int]) -> list[int] | None:
    """Number of recomputed layers of each stage, if they are each stage's first ones."""
    if settings.num_layers is None:
        return None
    counts = []
    for stage in layers_of_stages(settings.num_layers, settings.strategy):
        mine = [layer for layer in stage if layer in layers]
        if mine != stage[: len(mine)]:
            return None
        counts.append(len(mine))
    return counts if sum(counts) == len(layers) else None


def _stages(settings: Settings, lost: LossNotes) -> dict[str, Any]:
    """Settings of parallelism in the model's section."""
    written, counts, parts = dict[str, Any](), stage_layers(settings, lost), settings.strategy.num_virtual_stages
    total = settings.num_layers or (sum(counts) if counts else None)
    if total is not None:
        written[MODEL + "num_layers"] = total
    if settings.strategy.pipeline.virtual_stages > 1:
        written[VIRTUAL] = settings.strategy.pipeline.virtual_stages
    if counts is None and total and total % parts:
        counts = layers_per_part(total, settings.strategy)
        lost("pipeline.stages", f"written as offset: {counts} layers", "renamed")
    if counts and total:
        rows = rows_of_parts([count - total // parts for count in counts], settings.strategy)
        written[MODEL + "offset"] = rows if len(rows) > 1 else rows[0]
    return written
