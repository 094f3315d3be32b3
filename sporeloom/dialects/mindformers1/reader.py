# SPDX-License-Identifier: Apache-2.0
"""Read a MindFormers 1.x file as a strategy and a training run's fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.dialects.context import context_method
from sporeloom.dialects.experts import expert_degree, shard_size
from sporeloom.dialects.levels import gathers_again
from sporeloom.dialects.mindformers1.keys import (
    CONTEXT_METHOD,
    DEFAULT_THRESHOLD_KB,
    DEGREES,
    EXPERTS,
    FAMILIES,
    FULL,
    GRADIENTS,
    INTERLEAVE,
    LEVEL,
    METHODS,
    MISSPELLED,
    MODEL,
    MODEL_FIELDS,
    MODELS,
    NOT_EXPRESSIBLE,
    ONLY,
    SCHEDULER,
    SELECTIVE,
    SHARD_SIZE,
    STRICT,
    TRAIN,
    VIRTUAL,
    WITHOUT_EFFECT,
    ZERO,
    ZERO_CONFIG,
)
from sporeloom.dialects.mindformers1.model import read_changes, read_model
from sporeloom.dialects.mindformers1.swap import read_swap
from sporeloom.dialects.rates import read_schedule
from sporeloom.dialects.rows import read_rows
from sporeloom.dialects.settings import GivenValue, InputKeys, Note, Settings
from sporeloom.dialects.stages import virtual_stages
from sporeloom.dialects.yaml_file import read_flat
from sporeloom.models.family import family_module
from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh


def read(path: Path, known: Settings) -> tuple[Settings, list[Note]]:
    """Read a MindFormers 1.x file. Other settings than the strategy are those of `known`, where the file does not
    give them.

    Raises:
        ConfigError: not such a file, keys MindFormers refuses, degrees that cannot be.
    """
    book = InputKeys(_corrected(read_flat(path, "base_config")))
    problems = book.refused(STRICT, "MindFormers 1.x")
    if "parallel_config.data_parallel" not in book and "parallel_config.model_parallel" not in book:
        problems.append(f"{path}: no parallel_config with data_parallel or model_parallel")
    if problems:
        raise ConfigError(problems)
    train, num_layers = dict(known.train), known.num_layers
    found = read_model(book, str(path))
    if found:
        train = {**train, "model": found.family, **({"size": found.size} if found.size else {})}
        num_layers = found.model.num_layers
    if MODEL + "num_layers" in book:
        num_layers = book.take(MODEL + "num_layers", "num_layers")
    degrees = {axis: book.take(key, f"mesh.{axis}", 1) for key, axis in DEGREES.items()}
    beyond = degrees["tp"] * degrees["cp"] if all(type(degree) is int for degree in degrees.values()) else 1
    mesh = Mesh(**degrees, ep=expert_degree(book, EXPERTS, degrees["dp"], beyond))
    recompute = _recompute(book)
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, num_layers),
        recompute=recompute,
        optimizer_parallel=_optimizer_parallel(book, recompute, mesh),
        offload=read_swap(book),
        sequence_parallel=bool(book.take("parallel_config.use_seq_parallel", "sequence_parallel", False)),
        context_parallel=context_method(book, CONTEXT_METHOD, mesh, METHODS),
        micro_batch_interleave=book.take("micro_batch_interleave_num", "micro_batch_interleave", 1),
        source=str(path),
    )
    _forced(book, mesh)
    if found:
        book.note("trainer.model_name", "no effect", "given by model.model_config")
    _train(book, strategy, train)
    model = found.model if found and not found.size else None
    if not found and "model" in train and (model := read_changes(book, train["model"], train.get("size"))):
        del train["size"]
    book.only(ONLY)
    for key, why in NOT_EXPRESSIBLE.items():
        book.note(key, "not expressible", why)
    book.without_effect(WITHOUT_EFFECT)
    for name in MODEL_FIELDS:
        book.note(MODEL + name, "no effect", "the model's own configuration says it (--size, --config)")
    if "trainer.model_name" in book and "model" not in train:
        for key in [key for key in book.given if key.startswith(MODEL) and book.is_open(key)]:
            book.note(key, "not expressible", "the model is of no family here")
    known_keys = [*(row.key for row in TRAIN), *WITHOUT_EFFECT, *NOT_EXPRESSIBLE, *(key for key, *_ in ONLY)]
    return Settings(strategy, train, num_layers, model), book.finish(known_keys)


def _corrected(given: dict[str, GivenValue]) -> dict[str, GivenValue]:
    """Translate older spellings of names."""
    for wrong, right in MISSPELLED.items():
        given = {key.replace(f"[{wrong}]", f"[{right}]"): value for key, value in given.items()}
    return given


def _pipeline(book: InputKeys, mesh: Mesh, num_layers: int | None) -> Pipeline:
    microbatches = book.peek("parallel_config.micro_batch_num", 1)
    if mesh.pp == 1:
        book.note("parallel_config.micro_batch_num", "no effect", "there is no pipeline; MindFormers ignores it, too")
        microbatches = 1
    else:
        book.take("parallel_config.micro_batch_num", "pipeline.num_microbatches")
    pipeline = virtual_stages(
        *(book, Pipeline(num_microbatches=microbatches), mesh, VIRTUAL),
        INTERLEAVE if book.peek(INTERLEAVE) is not None else None,
        SCHEDULER,
    )
    offset = book.peek(MODEL + "offset")
    if offset is None or offset == 0 or mesh.pp == 1:
        book.note(MODEL + "offset", "same", "stages of equal size")
        return pipeline
    rows = offset if isinstance(offset[0], list) else [offset]
    parts = mesh.pp * pipeline.virtual_stages
    if num_layers is None or [len(row) for row in rows] != [mesh.pp] * pipeline.virtual_stages:
        book.note(MODEL + "offset", "not expressible", "it needs num_layers and an entry for each stage")
        return pipeline
    layers = [num_layers // parts + extra for row in rows for extra in row]
    book.note(MODEL + "offset", "renamed", f"pipeline.stages.num_layers {layers}")
    return dataclasses.replace(pipeline, stages=Stages(num_layers=layers))


def _recompute(book: InputKeys) -> Recompute | None:
    """Full recomputation takes precedence over selective, as in MindFormers."""
    full = _chosen(book, FULL, "full", "")
    if full:
        book.note(SELECTIVE, "no effect", "full recomputation takes precedence")
        return full
    return _chosen(book, SELECTIVE, "selective", "the rules name the operators; MindFormers' own choice differs")


def _chosen(book: InputKeys, key: str, kind: Any, difference: str) -> Recompute | None:
    value = book.peek(key, False)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    counts = isinstance(value, list) and all(type(entry) is int for entry in value)
    if value in (False, None) or (counts and not any(value)):
        book.note(key, "same", "none")
        return None
    if value is True or counts:
        found = Recompute(kind=kind) if value is True else Recompute(kind=kind, per_stage=value)
        name = "recompute.layers all" if value is True else "recompute.per_stage"
        book.note(key, "approximated" if difference else "renamed", f"{name}{'; ' * bool(difference)}{difference}")
        return found
    book.note(key, "not expressible", f"{value!r}: operators are named by the rules (`selective`)")
    return None


def _optimizer_parallel(book: InputKeys, recompute: Recompute | None, mesh: Mesh) -> OptimizerParallel | None:
    if not book.peek(ZERO, False):
        book.note(ZERO, "same", "off")
        book.without_effect({ZERO_CONFIG + "*": "enable_parallel_optimizer is off"})
        return None
    book.take(ZERO, "optimizer_parallel")
    threshold = book.take(
        ZERO_CONFIG + "parallel_optimizer_threshold", "optimizer_parallel.threshold_kb", DEFAULT_THRESHOLD_KB
    )
    size = book.take(SHARD_SIZE, "optimizer_parallel.shard_size", -1)
    again, gradients = gathers_again(book, LEVEL, recompute, mesh), book.peek(LEVEL) == "level2"
    book.note(LEVEL, "renamed", "optimizer_parallel" + ".shard_accumulated_gradients" * gradients)
    sharded = book.take(GRADIENTS, "optimizer_parallel.shard_accumulated_gradients", False)
    return OptimizerParallel(
        threshold_kb=threshold,
        shard_size=None if size in (-1, None) else shard_size(book, SHARD_SIZE, size, mesh.replicas),
        shard_accumulated_gradients=bool(sharded or gradients),
        reshard_after_forward=again,
    )


def _forced(book: InputKeys, mesh: Mesh) -> None:
    """Report settings that MindFormers itself silently changes."""
    if book.peek("parallel_config.vocab_emb_dp") and mesh.pp > 1:
        why = "MindFormers sets it to False in a pipeline; here the vocabulary is sharded over tp as well"
        book.note("parallel_config.vocab_emb_dp", "no effect", why)
    elif book.peek("parallel_config.vocab_emb_dp") and mesh.tp > 1:
        why = "the vocabulary is sharded over tp, which takes less memory and gives the same numbers"
        book.note("parallel_config.vocab_emb_dp", "approximated", why)
    book.note("parallel_config.vocab_emb_dp", "same", "the vocabulary is sharded over tp")
    if mesh.pp > 1 and book.peek("runner_config.gradient_accumulation_steps", 1) != 1:
        why = "MindFormers ignores it in a pipeline, which accumulates over its microbatches"
        book.note("runner_config.gradient_accumulation_steps", "no effect", why)


def _train(book: InputKeys, strategy: Strategy, train: dict[str, Any]) -> None:
    """Translate to flags of tools/train.py."""
    if book.is_open("trainer.model_name"):
        name = str(book.peek("trainer.model_name"))
        theirs, _, size = name.partition("_")
        family, size = MODELS.get(name, (FAMILIES.get(theirs), size))
        if family and size not in (sizes := family_module(family, "config").SIZES) and size.replace("_", ".") in sizes:
            size = size.replace("_", ".")  # 2_6b, as MindFormers has it
        if family:
            train["model"] = family
            train |= {"size": size} if size else {}
            book.note("trainer.model_name", "renamed", f"--model {family}{' --size ' * bool(size)}{size}")
        else:
            book.note(
                "trainer.model_name",
                "not expressible",
                f"{name}: not a model of a family here; see docs/reference/models.md",
            )
    if not book.peek("runner_config.stop_step"):
        book.note("runner_config.stop_step", "no effect", "0 means no limit; give --steps")
    read_rows(book, TRAIN, train)
    read_schedule(book, "lr_schedule", train)
    if book.peek("runner_wrapper.use_clip_grad") is False:
        train["max_grad_norm"] = 0.0
    if "runner_config.batch_size" in book:
        parts = Settings(strategy, train).microbatches * strategy.mesh.dp
        train["batch_size"] = book.peek("runner_config.batch_size") * parts
        book.note(
            "runner_config.batch_size",
            "renamed",
            f"batch_size {train['batch_size']}: here it counts all devices and microbatches",
        )
