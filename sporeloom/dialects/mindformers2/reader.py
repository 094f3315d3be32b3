# SPDX-License-Identifier: Apache-2.0
"""Read a MindFormers 2.x file as a strategy and a training run's fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.dialects.context import context_method
from sporeloom.dialects.experts import expert_degree, shard_size
from sporeloom.dialects.levels import gathers_again
from sporeloom.dialects.mindformers2.keys import (
    ABOUT_LORA,
    ADAM_DEFAULTS,
    METHODS,
    ONLY,
    ONLY_2_1,
    PARALLELISM,
    SCHEDULES,
    SHARDS,
    STAGES,
    STRICT,
    TRAIN,
    WITHOUT_EFFECT,
)
from sporeloom.dialects.rates import read_schedule
from sporeloom.dialects.rows import fill_defaults, read_rows
from sporeloom.dialects.settings import GivenValue, InputKeys, Note, Settings
from sporeloom.dialects.stages import virtual_stages
from sporeloom.dialects.yaml_file import read_flat
from sporeloom.strategy.checks import RESHARD
from sporeloom.strategy.config import Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """Read a MindFormers 2.x file. `devices`: of the job, from which its data parallel degree follows.

    Raises:
        ConfigError: keys MindFormers refuses; the data parallel degree is not known.
    """
    book = InputKeys(read_flat(path))
    problems = book.refused(STRICT, "MindFormers 2.x")
    if problems:
        raise ConfigError(problems)
    mesh = _mesh(book, path, devices)
    layers = book.peek("model.num_hidden_layers", known.num_layers)
    train = dict(known.train)
    has_adam = _optimizer(book, train)
    saves = book.peek("checkpoint.enable_save", True) is not False
    read_rows(book, TRAIN, train)
    if has_adam:
        place = next(given.place for key, given in book.given.items() if key.startswith("optimizer."))
        fill_defaults(book, train, "optimizer.*", place, ADAM_DEFAULTS, "MindFormers'")
    if not saves:
        train["save_every"] = 0
        book.note("checkpoint.enable_save", "renamed", "save_every 0")
        book.renote("checkpoint.save_interleaved_steps", "no effect", "nothing is saved")
    read_schedule(book, "lr_scheduler", train)
    if book.peek("training.local_batch_size") and "training.global_batch_size" in book:
        parts = train["batch_size"] // (book.peek("training.local_batch_size") * mesh.dp)
        if mesh.pp == 1 and parts > 1:
            train["accumulate"] = parts
    recompute = _recompute(book, layers)
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, train),
        recompute=recompute,
        optimizer_parallel=_optimizer_parallel(book, recompute, mesh),
        offload=_swap(book),
        sequence_parallel=bool(book.take("parallelism.sequence_parallel", "sequence_parallel", False)),
        context_parallel=context_method(book, "parallelism.context_parallel_method", mesh, METHODS),
        source=str(path),
    )
    _ulysses(book, mesh, strategy.context_parallel)
    book.note("training.local_batch_size", "renamed", "batch_size over replicas and parts")
    for key in ("checkpoint.load_path", "checkpoint.base_load_path"):
        book.note(key, "not expressible" if book.peek(key) else "same", "read a checkpoint with --resume")
    for key in [key for key in book.given if key.startswith("lora_config")]:
        is_off = book.peek(key) is None
        book.note(key, "no effect" if is_off else "not expressible", "" if is_off else ABOUT_LORA)
    book.only(ONLY)
    book.without_effect(WITHOUT_EFFECT)
    known_keys = [*(row.key for row in TRAIN), *WITHOUT_EFFECT, *(key for key, *_ in ONLY)]
    return Settings(strategy, train, known.num_layers), book.finish(known_keys)


def _mesh(book: InputKeys, path: Path, devices: int | None) -> Mesh:
    tp = book.take("parallelism.tensor_parallel", "mesh.tp", 1)
    pp = book.take("parallelism.pipeline_parallel", "mesh.pp", 1)
    cp = book.take("parallelism.context_parallel", "mesh.cp", 1)
    if "parallelism.data_parallel" in book:
        dp = book.take("parallelism.data_parallel", "mesh.dp")
    elif devices is None or devices % (tp * pp * cp):
        why = (
            "needs the number of devices: give --devices"
            if devices is None
            else f"{devices} devices are not a multiple of {tp * pp * cp}"
        )
        raise ConfigError(f"{path}: the data parallel degree {why}")
    else:
        dp = devices // (tp * pp * cp)
    return Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=expert_degree(book, "parallelism.expert_parallel", dp, tp * cp))


def _optimizer(book: InputKeys, train: dict[str, Any]) -> bool:
    """Whether it is AdamW, which corrects the bias of its moments in MindFormers. Keys of another optimizer have
    no effect."""
    kind = book.peek("optimizer.type", "AdamW" if any(key.startswith("optimizer.") for key in book.given) else None)
    if kind == "AdamW":
        train["optimizer"] = "adamw"
        book.note("optimizer.type", "renamed", "--optimizer adamw")
    elif kind is not None:
        book.note("optimizer.type", "not expressible", f"{kind!r}: --optimizer says which there are")
        kept = {"optimizer.weight_decay", "optimizer.weight_decay_include", "optimizer.weight_decay_exclude"}
        for key in [k for k in book.given if k.startswith("optimizer.") and k not in kept and book.is_open(k)]:
            book.note(key, "not expressible", f"of {kind}")
    return kind == "AdamW"


def _ulysses(book: InputKeys, mesh: Mesh, method: str) -> None:
    key = PARALLELISM + "ulysses_degree_in_cp"
    degree = book.peek(key)
    if degree is None or mesh.cp == 1 or (method == "ulysses" and degree == mesh.cp):
        book.note(key, "no effect", "given by context_parallel")
    else:
        book.note(key, "not expressible", f"{degree} of cp {mesh.cp}: all ranks of it use one method")


def _swap(book: InputKeys) -> Offload | None:
    """Layers whose activations are moved to the host."""
    entries = book.peek("swap.layer_swap") if book.peek("swap.enable", False) else None
    book.note("swap.enable", "renamed" if entries else "same", "offload.layers" if entries else "nothing is moved")
    if not entries:
        for key in ("layer_swap", "op_swap"):
            book.note(f"swap.{key}", "no effect", "nothing is moved")
        return None
    found: set[int] = set()
    for entry in entries if isinstance(entries, list) else [entries]:
        try:
            layers = entry["layers"]
            found |= set(layer_numbers(layers if isinstance(layers, list) else [layers]))
        except (KeyError, TypeError, ValueError):
            book.note("swap.layer_swap", "not expressible", f"{entry!r}: a list of layers is expected")
            return None
    book.note("swap.layer_swap", "renamed", f"offload.layers {sorted(found)}")
    return Offload(layers=sorted(found)) if found else None


def layer_numbers(texts: list[Any]) -> list[int]:
    """Layers of `0-2` or `7`, including both ends.

    Raises:
        ValueError: something else.
    """
    found: list[int] = []
    for text in texts:
        first, _, last = str(text).strip().partition("-")
        low, high = int(first), int(last or first)
        if low < 0 or high < low:
            raise ValueError(text)
        found += range(low, high + 1)
    return found


def _pipeline(book: InputKeys, mesh: Mesh, train: dict[str, Any]) -> Pipeline:
    size, batch = book.peek("parallelism.pipeline_parallel_microbatch_size", 1), train.get("batch_size")
    key = "parallelism.pipeline_parallel_microbatch_size"
    if mesh.pp == 1:
        names = ("microbatch_size", "schedule", "interleave_num", "layers_per_stage")
        book.without_effect({f"{PARALLELISM}pipeline_parallel_{name}": "there is no pipeline" for name in names})
        return Pipeline()
    if not batch or batch % (size * mesh.dp):
        raise ConfigError(
            f"{book.given[key].place if key in book else book.given['parallelism.pipeline_parallel'].place}: the number of "
            f"microbatches needs a training.global_batch_size that is a multiple of {size} x dp {mesh.dp}"
        )
    microbatches = batch // (size * mesh.dp)
    book.note(key, "renamed", f"pipeline.num_microbatches {microbatches}")
    order = book.peek("parallelism.pipeline_parallel_schedule")
    if order in SCHEDULES:
        place = book.given["parallelism.pipeline_parallel_schedule"].place
        book.fill("parallelism.pipeline_parallel_schedule", GivenValue(SCHEDULES[order], place))
    pipeline = virtual_stages(
        *(book, Pipeline(num_microbatches=microbatches), mesh, "parallelism.pipeline_parallel_interleave_num"),
        *(None, "parallelism.pipeline_parallel_schedule"),
    )
    return _stages(book, pipeline, mesh)


def _stages(book: InputKeys, pipeline: Pipeline, mesh: Mesh) -> Pipeline:
    """`pipeline` with its layers: a row for each virtual stage, or a text of ranges for each stage, as `0-3,
    8-11`."""
    layers = book.peek(STAGES)
    if layers in (None, "auto", []):
        book.note(STAGES, "same", "evenly")
        return pipeline
    try:
        counts = _counts(layers, mesh.pp, pipeline.virtual_stages)
    except (TypeError, ValueError, AttributeError) as error:
        why = (
            str(error)
            if str(error).startswith("it ")
            else "it needs a row for each virtual stage and an entry for each stage"
        )
        book.note(STAGES, "not expressible", why)
        return pipeline
    book.note(STAGES, "renamed", "pipeline.stages.num_layers")
    return dataclasses.replace(pipeline, stages=Stages(num_layers=counts))


def _counts(layers: list[Any], pp: int, virtual: int) -> list[int]:
    """Number of layers of each virtual stage, in the order of the layers.

    Raises:
        ValueError, TypeError, AttributeError: they are not so many, or not in order.
    """
    if not isinstance(layers[0], str):
        rows = layers if isinstance(layers[0], list) else [layers]
        if [len(row) for row in rows] != [pp] * virtual:
            raise ValueError("shape")
        return [count for row in rows for count in row]
    chunks = [[layer_numbers([text]) for text in stage.split(",")] for stage in layers]
    if [len(stage) for stage in chunks] != [virtual] * pp:
        raise ValueError("shape")
    in_order = [chunks[stage][turn] for turn in range(virtual) for stage in range(pp)]
    if [layer for chunk in in_order for layer in chunk] != list(range(sum(map(len, in_order)))):
        raise ValueError("it assigns the layers in another order than consecutively from the first stage on")
    return list(map(len, in_order))


def _recompute(book: InputKeys, num_layers: Any) -> Recompute | None:
    if "recompute.mode" in book:
        return _recompute_mode(book, num_layers)
    full, selective = (book.peek(f"recompute.{key}", False) for key in ("full_recompute", "select_recompute"))
    book.note("recompute.full_recompute", "renamed", "recompute.layers all" if full else "none")
    for key in ("full_recompute_layer", "select_module", "exclude_op"):
        book.note(f"recompute.{key}", "no effect", "recompute.mode is None without it")
    if not full and selective:
        why = "recompute.kind selective; the rules name the operators"
        book.note("recompute.select_recompute", "approximated", why)
        return Recompute(kind="selective")
    book.note(
        "recompute.select_recompute",
        "no effect" if full else "same",
        "full recomputation takes precedence" if full else "none",
    )
    return Recompute() if full else None


def _recompute_mode(book: InputKeys, num_layers: Any) -> Recompute | None:
    """Recomputation as in 2.1: a mode, and ranges of layers.

    Raises:
        ConfigError: a mode that is none, or `full` without layers, which MindFormers refuses.
    """
    mode, place = book.peek("recompute.mode"), book.given["recompute.mode"].place
    if mode not in (None, "None", "full", "select"):
        raise ConfigError(f"{place}: recompute.mode must be None, full or select, got {mode!r}")
    ranges = book.peek("recompute.full_recompute_layer")
    if mode == "full":
        try:
            layers = layer_numbers(ranges)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{place}: recompute.mode full needs full_recompute_layer, a list of layers as [0-2, 5], got {ranges!r}"
            ) from None
        is_all = layers == list(range(num_layers)) if isinstance(num_layers, int) else False
        book.note("recompute.mode", "renamed", "recompute.kind full")
        book.note("recompute.full_recompute_layer", "renamed", f"recompute.layers {'all' if is_all else layers}")
        book.note("recompute.select_module", "no effect", "recompute.mode is full")
        return Recompute(layers="all" if is_all else layers)
    for key in ("full_recompute_layer", "exclude_op", *(() if mode == "select" else ("select_module",))):
        book.note(f"recompute.{key}", "no effect", f"recompute.mode is {mode}")
    if mode == "select":
        book.note("recompute.mode", "approximated", "recompute.kind selective; the rules name the operators")
        book.note("recompute.select_module", "approximated", "recompute.kind selective; the rules name the operators")
        return Recompute(kind="selective")
    book.note("recompute.mode", "same", "none")
    return None


def _optimizer_parallel(book: InputKeys, recompute: Recompute | None, mesh: Mesh) -> OptimizerParallel | None:
    key = next((key for key in SHARDS if key in book), None)
    is_2_1 = any(f"{section}.{name}" in book for section, names in ONLY_2_1.items() for name in names)
    if key is None and not is_2_1:
        book.note("parallelism.hsdp_threshold", "no effect", "nothing is sharded over the replicas")
        return None
    size = book.take(key, "optimizer_parallel.shard_size") if key else -1  # 2.1 shards over all replicas by default
    threshold = book.take("parallelism.hsdp_threshold", "optimizer_parallel.threshold_kb", 64 if not is_2_1 else 0)
    dense = book.peek(PARALLELISM + "dense_fsdp_shard_size")
    book.note(PARALLELISM + "dense_fsdp_shard_size", "renamed" if dense else "same", "optimizer_parallel.shard_size")
    again = _reshards(book, recompute, mesh)
    if size == 1:
        return None
    key = PARALLELISM + "dense_fsdp_shard_size" if dense else key
    replicas = mesh.replicas
    size = dense or (replicas if size == -1 else size)
    return OptimizerParallel(
        threshold_kb=threshold,
        shard_size=None if size in (mesh.dp, replicas) else shard_size(book, key or "", size, replicas),
        reshard_after_forward=again,
    )


def _reshards(book: InputKeys, recompute: Recompute | None, mesh: Mesh) -> bool:
    """Whether weights are resharded after the forward pass."""
    again = gathers_again(book, PARALLELISM + "hsdp_optimizer_level", recompute, mesh)
    kind, policy = PARALLELISM + "data_parallel_shard_strategy", PARALLELISM + "reshard_after_forward_policy"
    if book.peek(policy, "default") == "never":
        book.note(policy, "renamed", f"{RESHARD} false")
        book.note(kind, "renamed", "optimizer_parallel")
        return again
    asks = book.peek(kind, "optim_grads_params") == "optim_grads_params" and (kind in book or policy in book)
    for key in (kind, policy):
        book.note(key, "renamed", RESHARD if asks else "optimizer_parallel")
    return again or asks
