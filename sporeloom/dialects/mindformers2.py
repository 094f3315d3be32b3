# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.x YAML: `parallelism`, `recompute`, `training` and the sections beside them.

Names: mindformers 1.9.0 pynative/config/config.py, which is what 2.x starts from, and the 2.0 documentation, in which
`data_parallel_shard` takes the place of `hsdp_shard_size`. Its data parallel degree is what is left of the devices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sporeloom.dialects.context import context_method, written_context
from sporeloom.dialects.levels import gathers_again
from sporeloom.dialects.rows import Row, betas, read_rows, written_rows
from sporeloom.dialects.settings import Book, Lost, Note, Settings
from sporeloom.dialects.stages import rows_of_parts, stage_layers, virtual_stages
from sporeloom.dialects.yaml_file import flat_text, read_flat
from sporeloom.errors import ConfigError
from sporeloom.strategy.config import ContextMethod, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh

PARALLELISM = "parallelism."
STRICT = {
    "parallelism": (
        *("tensor_parallel", "context_parallel", "context_parallel_method", "pipeline_parallel", "expert_parallel"),
        *("pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
        *("pipeline_parallel_interleave_num", "hsdp_shard_size", "hsdp_optimizer_level", "hsdp_threshold"),
        *("sequence_parallel", "data_parallel_shard", "data_parallel"),
    ),
    "recompute": ("full_recompute", "select_recompute"),
    "training": ("steps", "local_batch_size", "global_batch_size", "max_norm", "seed", "deterministic"),
}
METHODS: dict[str, ContextMethod] = {"colossalai": "gather", "ulysses": "ulysses"}
ONLY = (("optimizer.type", "AdamW", "AdamW as the original models were trained, or SGD"),)
WITHOUT_EFFECT = {
    "parallelism.hsdp_optimizer_level": "weights, gradients and moments are all sharded where optimizer parallel is on",
    "training.deterministic": "a run on one mesh repeats itself",
    "checkpoint.save_path": "checkpoints go to --output-dir",
    "checkpoint.prefix": "folders are named by their step",
    "checkpoint.remove_redundancy": "no two ranks write the same",
    "checkpoint.load_balanced": "no rank reads more than it holds",
    "checkpoint.load_worker_number": "each rank reads its own part",
    "checkpoint.no_*": "the whole state is saved and loaded",
    "checkpoint.enable_save": "save_interleaved_steps says it",
    "context.*": "device and memory are the environment's",
    "profiler.*": "of MindSpore's profiler",
    "monitor.*": "metrics.jsonl and tensorboard/ have every step",
    "callbacks*": "of MindFormers' callbacks",
    "lr_scheduler.type": "a cosine with warm-up",
    "train_dataset.*": "the loader is our own (--data)",
    "model.*": "the model's own configuration says it (--size, --config)",
}
TRAIN = (
    Row("training.steps", "steps"),
    Row("training.global_batch_size", "batch_size"),
    Row("training.max_norm", "max_grad_norm"),
    Row("training.seed", "seed"),
    betas("optimizer.betas"),
    Row("optimizer.eps", "adam_epsilon"),
    Row("optimizer.weight_decay", "weight_decay"),
    Row("lr_scheduler.learning_rate", "learning_rate"),
    Row("lr_scheduler.lr_end", "min_learning_rate"),
    Row("lr_scheduler.warmup_steps", "warmup_steps"),
    Row("checkpoint.save_interleaved_steps", "save_every"),
    Row("checkpoint.save_max", "keep_last"),
    Row("checkpoint.async_save", "async_save"),
)


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """A MindFormers 2.x file. `devices`: of the job, from which its data parallel degree follows.

    Raises:
        ConfigError: keys MindFormers refuses; the data parallel degree is not known.
    """
    book = Book(read_flat(path))
    problems = book.refused(STRICT, "MindFormers 2.x")
    if problems:
        raise ConfigError(problems)
    tp = book.take("parallelism.tensor_parallel", "mesh.tp", 1)
    pp, cp = (
        book.take("parallelism.pipeline_parallel", "mesh.pp", 1),
        book.take("parallelism.context_parallel", "mesh.cp", 1),
    )
    if "parallelism.data_parallel" in book:
        dp = book.take("parallelism.data_parallel", "mesh.dp")
    elif devices is None or devices % (tp * pp * cp):
        why = (
            "needs the number of devices: give --devices"
            if devices is None
            else f"{devices} devices are no multiple of {tp * pp * cp}"
        )
        raise ConfigError(f"{path}: the data parallel degree {why}")
    else:
        dp = devices // (tp * pp * cp)
    train = dict(known.train)
    read_rows(book, TRAIN, train)
    if book.peek("training.local_batch_size") and "training.global_batch_size" in book:
        parts = train["batch_size"] // (book.peek("training.local_batch_size") * dp)
        if pp == 1 and parts > 1:
            train["accumulate"] = parts
    mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=book.take("parallelism.expert_parallel", "mesh.ep", 1))
    recompute = _recompute(book)
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, train),
        recompute=recompute,
        optimizer_parallel=_optimizer_parallel(book, recompute, mesh),
        sequence_parallel=bool(book.take("parallelism.sequence_parallel", "sequence_parallel", False)),
        context_parallel=context_method(book, "parallelism.context_parallel_method", mesh, METHODS),
        source=str(path),
    )
    book.note("training.local_batch_size", "renamed", "batch_size over replicas and parts")
    book.note("checkpoint.load_path", "not expressible", "read a checkpoint of ours with --resume")
    book.only(ONLY)
    book.without_effect(WITHOUT_EFFECT)
    known_keys = [*(row.key for row in TRAIN), *WITHOUT_EFFECT, *(key for key, *_ in ONLY)]
    return Settings(strategy, train, known.num_layers), book.finish(known_keys)


def _pipeline(book: Book, mesh: Mesh, train: dict[str, Any]) -> Pipeline:
    size, batch = book.peek("parallelism.pipeline_parallel_microbatch_size", 1), train.get("batch_size")
    key = "parallelism.pipeline_parallel_microbatch_size"
    if mesh.pp == 1:
        book.note(key, "no effect", "there is no pipeline")
        return Pipeline()
    if not batch or batch % (size * mesh.dp):
        raise ConfigError(
            f"{book.given[key].place if key in book else book.given['parallelism.pipeline_parallel'].place}: the number of "
            f"microbatches needs a training.global_batch_size that is a multiple of {size} x dp {mesh.dp}"
        )
    microbatches = batch // (size * mesh.dp)
    book.note(key, "renamed", f"pipeline.num_microbatches {microbatches}")
    pipeline = virtual_stages(
        *(book, Pipeline(num_microbatches=microbatches), mesh, "parallelism.pipeline_parallel_interleave_num"),
        *(None, "parallelism.pipeline_parallel_schedule"),
    )
    layers = book.peek("parallelism.pipeline_parallel_layers_per_stage")
    if not layers:
        return pipeline
    rows = layers if isinstance(layers[0], list) else [layers]
    if [len(row) for row in rows] != [mesh.pp] * pipeline.virtual_stages:
        why = "it needs a row for each virtual stage and an entry for each stage"
        book.note("parallelism.pipeline_parallel_layers_per_stage", "not expressible", why)
        return pipeline
    book.note("parallelism.pipeline_parallel_layers_per_stage", "renamed", "pipeline.stages.num_layers")
    return dataclasses.replace(pipeline, stages=Stages(num_layers=[count for row in rows for count in row]))


def _recompute(book: Book) -> Recompute | None:
    full, selective = (book.peek(f"recompute.{key}", False) for key in ("full_recompute", "select_recompute"))
    book.note("recompute.full_recompute", "renamed", "recompute.layers all" if full else "none")
    if not full and selective:
        why = "recompute.kind selective; the rules say which operators"
        book.note("recompute.select_recompute", "approximated", why)
        return Recompute(kind="selective")
    book.note(
        "recompute.select_recompute",
        "no effect" if full else "same",
        "full recomputation comes first" if full else "none",
    )
    return Recompute() if full else None


def _optimizer_parallel(book: Book, recompute: Recompute | None, mesh: Mesh) -> OptimizerParallel | None:
    for key in ("parallelism.data_parallel_shard", "parallelism.hsdp_shard_size"):
        if key not in book:
            continue
        size = book.take(key, "optimizer_parallel.shard_size")
        threshold = book.take("parallelism.hsdp_threshold", "optimizer_parallel.threshold_kb", 64)
        if size == 1:
            return None
        return OptimizerParallel(
            threshold_kb=threshold,
            shard_size=None if size in (-1, mesh.dp) else size,
            reshard_after_forward=gathers_again(book, PARALLELISM + "hsdp_optimizer_level", recompute, mesh),
        )
    book.note("parallelism.hsdp_threshold", "no effect", "nothing is sharded over the replicas")
    return None


def write(settings: Settings) -> tuple[str, list[Note]]:
    """A MindFormers 2.x file: parallelism and recompute, and what of the rest is known."""
    strategy, lost = settings.strategy, Lost("mindformers2")
    mesh = strategy.mesh
    if strategy.offload:
        lost("offload", "MindFormers has swap_config in its 1.x files only")
    if strategy.micro_batch_interleave > 1:
        lost("micro_batch_interleave", "MindFormers has copies of microbatches in its 1.x files only")
    written = {
        PARALLELISM + "tensor_parallel": mesh.tp,
        PARALLELISM + "pipeline_parallel": mesh.pp,
        PARALLELISM + "context_parallel": mesh.cp,
        **written_context(strategy, METHODS, PARALLELISM + "context_parallel", PARALLELISM + "context_parallel_method"),
        **({PARALLELISM + "expert_parallel": mesh.ep} if mesh.ep > 1 else {}),
        **_written_optimizer_parallel(strategy, lost),
        PARALLELISM + "sequence_parallel": strategy.sequence_parallel,
        **_written_pipeline(settings, lost),
        **_written_recompute(strategy.recompute, lost),
        **_written_train(settings, lost),
    }
    head = f"# {mesh.size} devices: its data parallel degree, {mesh.dp}, is what the others leave\n"
    return head + flat_text(written), lost.notes


def _written_optimizer_parallel(strategy: Strategy, lost: Lost) -> dict[str, Any]:
    zero = strategy.optimizer_parallel
    if zero is None:
        return {PARALLELISM + "hsdp_shard_size": 1}
    if zero.shard_accumulated_gradients:
        lost("optimizer_parallel.shard_accumulated_gradients", "hsdp_optimizer_level decides by other rules")
    return {
        PARALLELISM + "hsdp_shard_size": zero.shard_size or strategy.mesh.dp,
        PARALLELISM + "hsdp_threshold": zero.threshold_kb,
        **({PARALLELISM + "hsdp_optimizer_level": "level3"} if zero.reshard_after_forward else {}),
    }


def _written_pipeline(settings: Settings, lost: Lost) -> dict[str, Any]:
    strategy = settings.strategy
    if strategy.mesh.pp == 1:
        return {}
    if settings.micro_batch_size is None:
        lost("pipeline.num_microbatches", "2.x counts the sequences of a microbatch: give --batch-size")
    written: dict[str, Any] = {PARALLELISM + "pipeline_parallel_microbatch_size": settings.micro_batch_size or 1}
    if strategy.pipeline.virtual_stages > 1:
        written[PARALLELISM + "pipeline_parallel_interleave_num"] = strategy.pipeline.virtual_stages
        written[PARALLELISM + "pipeline_parallel_schedule"] = strategy.pipeline.schedule
    if counts := stage_layers(settings, lost):
        written[PARALLELISM + "pipeline_parallel_layers_per_stage"] = rows_of_parts(counts, strategy)
    return written


def _written_recompute(recompute: Recompute | None, lost: Lost) -> dict[str, Any]:
    if recompute and (recompute.per_stage is not None or recompute.layers != "all"):
        lost("recompute", "2.x recomputes all layers or none", "approximated")
    if recompute and recompute.kind == "selective":
        lost("recompute.kind", "MindFormers chooses the operators by itself", "approximated")
    full = recompute is not None and recompute.kind == "full"
    return {"recompute.full_recompute": full, "recompute.select_recompute": recompute is not None and not full}


def _written_train(settings: Settings, lost: Lost) -> dict[str, Any]:
    train, written = dict(settings.train), dict[str, Any]()
    if settings.micro_batch_size:
        written["training.local_batch_size"] = settings.micro_batch_size
    written |= written_rows(TRAIN, train)
    lost.rest({name: value for name, value in train.items() if name != "accumulate"})
    return written
