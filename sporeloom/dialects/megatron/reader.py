# SPDX-License-Identifier: Apache-2.0
"""Read Megatron-LM's flags as a strategy and a training run's fields."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import file_lines
from sporeloom.dialects.context import context_method
from sporeloom.dialects.megatron.keys import (
    BACKENDS,
    DEFAULTS,
    DEGREES,
    DTYPES,
    ENDS,
    MANY_VALUES,
    METHODS,
    NOT_EXPRESSIBLE,
    OF_ANY_OPTIMIZER,
    ONLY,
    TRAIN,
    VIRTUAL,
    WARMUPS,
    WITHOUT_EFFECT,
)
from sporeloom.dialects.rows import fill_defaults, read_rows
from sporeloom.dialects.settings import Fate, GivenValue, InputKeys, Note, Settings
from sporeloom.strategy.config import Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy
from sporeloom.strategy.mesh import Mesh


def read(path: Path, known: Settings, devices: int | None) -> tuple[Settings, list[Note]]:
    """Read the flags in a file.

    Raises:
        ConfigError: no flags there; invalid numbers; the number of devices is not known.
    """
    book = InputKeys(_flags(path))
    mesh, train = _mesh(book, path, devices), dict(known.train)
    read_rows(book, TRAIN, train, flags=True)
    if "--lr" in book:
        _defaults(book, train)
    _precision(book, train)
    if "--loss-scale" in book:  # a fixed one
        train |= {"loss_scale": _number(book, "--loss-scale", None, float), "loss_scale_window": 0}
        book.note("--loss-scale", "renamed", "--loss-scale with --loss-scale-window 0: it is lowered, but never raised")
    num_layers = _number(book, "--num-layers", known.num_layers)
    book.note("--num-layers", "same", "num_layers")
    strategy = Strategy(
        mesh=mesh,
        pipeline=_pipeline(book, mesh, train, num_layers, path),
        recompute=_recompute(book, mesh),
        optimizer_parallel=OptimizerParallel() if "--use-distributed-optimizer" in book else None,
        offload=Offload(optimizer=True) if "--optimizer-cpu-offload" in book else None,
        sequence_parallel="--sequence-parallel" in book,
        context_parallel=context_method(book, "--cp-comm-type", mesh, METHODS),
        source=str(path),
    )
    book.note(
        "--use-distributed-optimizer", "approximated", "optimizer_parallel shards the weights as well as the moments"
    )
    book.note("--sequence-parallel", "same", "sequence_parallel")
    book.note("--optimizer-cpu-offload", "renamed", "offload.optimizer")
    book.only(ONLY)
    book.without_effect(WITHOUT_EFFECT)
    for flag, why in NOT_EXPRESSIBLE.items():
        book.note(flag, "not expressible", why)
    return Settings(strategy, train, num_layers), book.finish(
        [*(row.key for row in TRAIN), *WITHOUT_EFFECT, *NOT_EXPRESSIBLE]
    )


def _defaults(book: InputKeys, train: dict[str, Any]) -> None:
    """Defaults of the flags that a training script leaves out."""
    place, whose = book.given["--lr"].place, "Megatron-LM's"
    if (kind := book.peek("--optimizer", "adam")) == "adam":
        book.note("--optimizer", "renamed", "--optimizer adamw")
    defaults = {field: value for field, value in DEFAULTS.items() if kind == "adam" or field in OF_ANY_OPTIMIZER}
    warmup = {} if any(flag in book for flag in WARMUPS) else {"warmup_steps": 0}
    fill_defaults(book, train, "--lr", place, {**defaults, **warmup}, whose)
    if "--lr-decay-style" not in book:
        book.add("--lr-decay-style", place, "approximated", f"linear, {whose} default: the rate follows a cosine")


def _mesh(book: InputKeys, path: Path, devices: int | None) -> Mesh:
    degrees = {}
    for flag, axis in DEGREES.items():
        degrees[axis] = _number(book, flag, 1)
        book.note(flag, "renamed", f"mesh.{axis}")
    tp, pp, cp, ep = degrees.values()
    devices = devices or _devices(book)
    if not devices or devices % (tp * pp * cp):
        why = f"{devices} devices are not a multiple of it" if devices else "give --devices"
        raise ConfigError(
            f"{path}: tensor {tp} x pipeline {pp} x context {cp} leave the data parallel degree open: {why}"
        )
    return Mesh(pp=pp, dp=devices // (tp * pp * cp), cp=cp, tp=tp, ep=ep)


def _precision(book: InputKeys, train: dict[str, Any]) -> None:
    for flag, dtype in DTYPES.items():
        if flag in book:
            train["compute_dtype"] = dtype
            book.note(flag, "renamed", f"--compute-dtype {dtype}")
    if "--use-flash-attn" in book:
        train["attention"] = "flash"
        book.note("--use-flash-attn", "renamed", "--attention flash")
    elif (backend := book.peek("--attention-backend")) is not None:
        train["attention"] = BACKENDS.get(backend, "auto")
        fate: Fate = "renamed" if backend in BACKENDS else "approximated"
        book.note("--attention-backend", fate, f"--attention {train['attention']}")


def _flags(path: Path) -> dict[str, GivenValue]:
    """Parse every `--flag value ...` of a script; continuation lines and comments are understood, variables are
    not."""
    try:
        lines = file_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    given: dict[str, GivenValue] = {}
    flag = None
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            words = re.split(r"[\s\"']+", line.rstrip("\\ "))
        for word in words:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                given[flag] = GivenValue(value or True, f"{path}:{number}")
            elif flag and (given[flag].value is True or flag in MANY_VALUES):
                before = given[flag].value
                given[flag] = GivenValue(word if before is True else f"{before} {word}", given[flag].place)
        flag = flag if line.rstrip().endswith("\\") else None
    if not given:
        raise ConfigError(f"{path}: contains no flags")
    return given


def _number(book: InputKeys, flag: str, default: Any, kind: type = int) -> Any:
    value = book.peek(flag, default)
    if value is default:
        return default
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{book.given[flag].place}: {flag} must be a number, got {value!r}") from None


def _devices(book: InputKeys) -> int | None:
    for name in ("--nproc_per_node", "--nproc-per-node"):
        if name in book:
            return int(_number(book, name, 1)) * int(_number(book, "--nnodes", 1))
    return None


def _pipeline(book: InputKeys, mesh: Mesh, train: dict[str, Any], num_layers: int | None, path: Path) -> Pipeline:
    size, batch = _number(book, "--micro-batch-size", 1), train.get("batch_size")
    microbatches = 1
    if batch:
        if batch % (size * mesh.dp):
            raise ConfigError(
                f"{path}: a global batch of {batch} is not a multiple of micro batch {size} x dp {mesh.dp}"
            )
        microbatches = batch // (size * mesh.dp)
    elif mesh.pp > 1:
        raise ConfigError(f"{path}: the number of microbatches needs --global-batch-size")
    if mesh.pp == 1:
        if microbatches > 1:
            train["accumulate"] = microbatches
        book.note("--micro-batch-size", "renamed", f"--accumulate {microbatches}")
        return Pipeline()
    book.note("--micro-batch-size", "renamed", f"pipeline.num_microbatches {microbatches}")
    virtual = _virtual_stages(book, mesh, num_layers, path)
    ends = dict(zip((0, mesh.pp - 1), ENDS, strict=True))
    given = {stage: _number(book, flag, None) for stage, flag in ends.items() if flag in book}
    if not given:
        _note_virtual_stages(book, virtual)
        return Pipeline(num_microbatches=microbatches, virtual_stages=virtual)
    middle = mesh.pp - len(given)
    rest = (num_layers or 0) - sum(given.values())
    if num_layers is None or rest < 0 or (rest % middle if middle else rest):
        raise ConfigError(f"{path}: {num_layers} layers cannot be distributed to {mesh.pp} stages as these flags say")
    for flag in ends.values():
        book.note(flag, "renamed", "pipeline.stages.num_layers")
    counts = [given.get(stage, rest // max(1, middle)) for stage in range(mesh.pp)]
    virtual = virtual if all(count % virtual == 0 for count in counts) else 0
    _note_virtual_stages(book, virtual)
    virtual = max(1, virtual)
    parts = Stages(num_layers=[count // virtual for count in counts] * virtual)
    return Pipeline(num_microbatches=microbatches, stages=parts, virtual_stages=virtual)


def _note_virtual_stages(book: InputKeys, virtual: int) -> None:
    """`virtual`: 0 where the stages' layers cannot be split evenly."""
    for flag in VIRTUAL:
        if virtual:
            book.note(flag, "renamed", f"pipeline.virtual_stages {virtual}")
        else:
            book.note(flag, "not expressible", "the layers of a stage are not a multiple of it")


def _virtual_stages(book: InputKeys, mesh: Mesh, num_layers: int | None, path: Path) -> int:
    """Number of model parts on each stage."""
    of_stage, of_part = VIRTUAL
    count, layers = _number(book, of_stage, 1), _number(book, of_part, None)
    if layers is not None:
        if not num_layers or layers < 1 or num_layers % (mesh.pp * layers):
            raise ConfigError(
                f"{path}: {of_part} {layers} does not split {num_layers} layers over {mesh.pp} stages evenly"
            )
        count = num_layers // (mesh.pp * layers)
    return int(count)


def _recompute(book: InputKeys, mesh: Mesh) -> Recompute | None:
    granularity, method = book.peek("--recompute-granularity"), book.peek("--recompute-method", "uniform")
    if "--recompute-activations" in book or granularity == "selective":
        why = "recompute.kind selective: the rules' operators, attention between its products"
        for flag in ("--recompute-activations", "--recompute-granularity"):
            book.note(flag, "renamed", why)
        return Recompute(kind="selective")
    if granularity != "full":
        return None
    book.note("--recompute-granularity", "renamed", "recompute")
    if method == "block":
        count = _number(book, "--recompute-num-layers", 1)
        book.note("--recompute-method", "renamed", f"recompute.per_stage {count} each")
        book.note("--recompute-num-layers", "renamed", f"recompute.per_stage {count} each")
        return Recompute(per_stage=[count] * mesh.pp)
    why = "each layer is recomputed on its own"
    book.note("--recompute-method", "renamed", "recompute.layers all")
    book.note(
        "--recompute-num-layers", "same" if _number(book, "--recompute-num-layers", 1) == 1 else "approximated", why
    )
    return Recompute()
