# SPDX-License-Identifier: Apache-2.0
"""Give a run the state of a checkpoint, whatever mesh wrote it, or the weights of another model's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn

from sporeloom.checkpoint.contents import AVERAGES, check_contents, logical_name
from sporeloom.checkpoint.manifest import LATEST, MANIFEST, Manifest, checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import check_shapes, open_weights
from sporeloom.checkpoint.sharded import CheckpointReader, damage
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import remove, write_text_atomically
from sporeloom.core.lines import split_lines
from sporeloom.core.log import milestone
from sporeloom.models.adapters import is_adapter
from sporeloom.parallel.report import Report
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import SOURCES, Source, storage
from sporeloom.strategy.tensor_slice import TensorSlice
from sporeloom.train.saving import WEIGHTS, state_parameters, whole_on_every_rank, whole_shape

TEXT_BYTES = 1024


def newest_complete(
    root: Path,
    engine: Engine,
    check: Callable[[Manifest, Path], None] = check_contents,
    memory: Path | None = None,
) -> tuple[Path, Manifest]:
    """Find the newest checkpoint under `root`, or `memory`, that passes its hashes and that `check` accepts.

    All ranks take part, each reads its share of the files.

    Damaged ones that are newer are named and renamed, so that nobody takes them for the newest again.

    Raises:
        ConfigError: there is none.
    """
    damaged: list[Path] = []
    newest_problem = "none"
    found = [*checkpoints(root), *(checkpoints(memory) if memory else ())]
    for folder in sorted(found, key=lambda path: path.name, reverse=True):
        manifest, problem = None, None
        try:
            manifest = read_manifest(folder)
            check(manifest, folder)
            problem = damage(folder, manifest, slice(engine.rank, None, engine.strategy.mesh.size))
        except ConfigError as error:
            problem = error.problems[0]
        finder = engine.max_over_ranks(engine.rank + 1 if problem else 0)
        if not finder:
            assert manifest is not None
            if engine.rank == 0:
                _set_aside(damaged, folder)
            return folder, manifest
        told = _told_by(finder - 1, problem or "", engine)
        if engine.is_log_rank:
            milestone(f"skipped: {told}")
        newest_problem = newest_problem if damaged else told
        damaged.append(folder)
    raise ConfigError(f"{root}: holds no complete checkpoint; the newest: {newest_problem}")


def _told_by(rank: int, text: str, engine: Engine) -> str:
    """Broadcast the text of one rank to all."""
    encoded = np.zeros(TEXT_BYTES, np.int32)
    content = np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)
    encoded[: len(content)] = content
    return bytes(engine.broadcast(encoded, rank).astype(np.uint8)).rstrip(b"\0").decode(errors="ignore")


def _set_aside(damaged: Sequence[Path], newest: Path) -> None:
    for folder in damaged:
        aside = folder.with_name(f"damaged-{folder.name}")
        remove(aside)
        folder.rename(aside)
    for root in {newest.parent, *(folder.parent for folder in damaged)}:
        if sound := checkpoints(root):  # those that are older than the newest are looked at when they are needed
            write_text_atomically(root / LATEST, sound[0].name + "\n")


def load_state(cell: nn.Cell, engine: Engine, report: Report, folder: Path, manifest: Manifest) -> None:
    """Give the weights and moments of a compiled step the values of a checkpoint, whatever mesh wrote it. All ranks take
    part.

    Raises:
        ConfigError: a tensor is missing or has another shape, a file is damaged.
    """
    reader, problems = CheckpointReader(folder, manifest), []
    parts: list[Part] = []
    parameters = state_parameters(cell)
    on_every_rank = whole_on_every_rank(parameters)
    for name, parameter in parameters.items():
        logical, whole = logical_name(name), whole_shape(name, report)
        entry = manifest.tensors.get(logical)
        if entry is None or entry.shape != whole:
            found = "is missing" if entry is None else f"is {entry.shape}"
            problems.append(f"{folder / MANIFEST}: {logical} {found}; the run's is {whole}")
            continue
        is_whole = name in on_every_rank
        held = TensorSlice.full(whole) if is_whole else engine.held_slice(name, whole)
        parts.append((parameter, held, partial(reader.read, logical)))
    known = {logical_name(name) for name in parameters}
    problems += [
        f"{folder / MANIFEST}: {name} does not belong to the run" for name in manifest.tensors if name not in known
    ]
    if problems:
        raise ConfigError(problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else []))
    _hold_all(parts, engine)


def leave_undrawn(parameters: Iterable[Parameter]) -> None:
    """Let parameters begin as zeros, of which a CPU process has its part alone: moments, and weights that `start_from` or
    `load_state` will give values."""
    for parameter in parameters:
        SOURCES.set(parameter, Source.of_zeros(parameter.shape))


def start_from(
    cell: nn.Cell,
    engine: Engine,
    report: Report,
    folder: Path,
    new: Sequence[str] = (),
    prefix: str = WEIGHTS,
    only_frozen: bool = False,
    without: str | None = None,
) -> None:
    """Give the weights of a compiled network, those whose names begin with `prefix`, the values of a checkpoint folder. A
    rank reads what it holds, and looks at its share of a training checkpoint's hashes. All ranks take part.

    `new`: weights that stay as they are unless the folder has such. `only_frozen`: those that are trained stay, too.
    `without`: beginning of the names of weights that the network does not have, whatever the folder has.

    Raises:
        ConfigError: they are missing, damaged, or another model's.
    """
    weights = open_weights(folder)
    problem = weights.damage(slice(engine.rank, None, engine.strategy.mesh.size))
    if finder := engine.max_over_ranks(engine.rank + 1 if problem else 0):
        raise ConfigError(_told_by(finder - 1, problem or "", engine))
    found = {n: shape for n, shape in weights.shapes.items() if without is None or not n.startswith(without)}
    named = {p.name.removeprefix(prefix): p for p in cell.get_parameters() if p.name.startswith(prefix)}
    parameters = {name: parameter for name, parameter in named.items() if not is_adapter(name)}
    shapes = {name: tuple(report.of(parameter.name).global_shape) for name, parameter in parameters.items()}
    for name in new:
        if found.get(name) != shapes[name]:
            found.pop(name, None)
            del shapes[name]
    check_shapes(found, shapes, str(folder))
    wanted = [name for name in shapes if not (only_frozen and parameters[name].requires_grad)]
    held = {name: engine.held_slice(parameters[name].name, shapes[name]) for name in wanted}
    _hold_all([(parameters[name], held[name], partial(weights.read, name)) for name in wanted], engine)


def begin_averages(cell: nn.Cell, engine: Engine, report: Report) -> None:
    """Set the averages of weights to the weights, each rank the shards that it holds."""
    parameters = {parameter.name: parameter for parameter in cell.get_parameters()}
    parts: list[Part] = []
    for name, average in parameters.items():
        if name.startswith(AVERAGES):
            weight = parameters[name.removeprefix(AVERAGES)]
            held = engine.held_slice(name, tuple(report.of(name).global_shape))
            parts.append((average, held, lambda _, weight=weight: weight.asnumpy().copy()))  # type: ignore[misc]
    _hold_all(parts, engine)


@contextlib.contextmanager
def averaged_weights(cell: nn.Cell, engine: Engine, report: Report) -> Iterator[None]:
    """Let the weights be their averages, and afterwards what they were: those that this rank computes with. Takes a copy in
    host memory."""
    parameters = {parameter.name: parameter for parameter in cell.get_parameters()}
    averages = {
        name.removeprefix(AVERAGES): parameter
        for name, parameter in parameters.items()
        if name.startswith(AVERAGES) and engine.held_slice(name, tuple(report.of(name).global_shape)) is not None
    }
    before = {name: parameters[name].asnumpy().copy() for name in averages}

    def give(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            weight = parameters[name]
            weight.set_data(Tensor(value, dtype=weight.dtype), slice_shape=weight.sliced)

    give({name: average.asnumpy().copy() for name, average in averages.items()})
    try:
        yield
    finally:
        give(before)


Part = tuple[Parameter, TensorSlice | None, Callable[[TensorSlice], Any]]
"""Yield a parameter, its shard on this rank, and the function that reads it."""


def _hold_all(parts: Iterable[Part], engine: Engine) -> None:
    """Set many parameters with `_hold`.

    Raises:
        ConfigError: what any rank could not read; on all of them.
    """
    problems: list[str] = []
    try:
        for part in parts:
            _hold(*part)
    except ConfigError as error:
        problems = error.problems
    if finder := engine.max_over_ranks(engine.rank + 1 if problems else 0):
        told = _told_by(finder - 1, "\n".join(problems), engine)
        raise ConfigError(problems or split_lines(told))


def _hold(parameter: Parameter, part: TensorSlice | None, read: Callable[[TensorSlice], Any]) -> None:
    """Set a parameter to the shard that this rank computes with, if it has one."""
    if part is not None and tuple(parameter.shape) == part.shape:
        array, holder = np.ascontiguousarray(read(part)), storage(parameter)
        array = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        holder.set_data(
            Tensor(array, dtype=holder.dtype), slice_shape=parameter.sliced
        )  # otherwise MindSpore would slice it again for the next graph
