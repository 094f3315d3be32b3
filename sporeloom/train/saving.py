# SPDX-License-Identifier: Apache-2.0
"""Save the state of a run, and restore it in a resumed run."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from sporeloom.checkpoint.contents import AVERAGES, BESIDE_WEIGHTS, FACTORED, MOMENTS, check_contents, state_shape
from sporeloom.checkpoint.manifest import LATEST, MANIFEST, Manifest, checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import check_shapes, open_weights
from sporeloom.checkpoint.sharded import (
    CheckpointReader,
    LocalTensor,
    damage,
    finish,
    remove_leftovers,
    remove_old,
    write_parts,
)
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import remove, write_text_atomically
from sporeloom.core.lines import split_lines
from sporeloom.core.log import milestone
from sporeloom.models.adapters import is_adapter
from sporeloom.parallel.report import Report
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import Source
from sporeloom.strategy.tensor_slice import TensorSlice

WEIGHTS = "model."
STATES = (WEIGHTS, "value_head.", *BESIDE_WEIGHTS)
"""Prefixes of the parameter names that make up the training state."""
ACCUMULATED = "accu_grads."
"""Prefix of accumulated gradients, which are 0 between steps."""
BEGIN_AS_ZEROS = (*BESIDE_WEIGHTS, ACCUMULATED)
TEXT_BYTES = 1024


def logical_name(name: str) -> str:
    """A parameter's name in a checkpoint: the model's own, with `adam_m.` or `adam_v.` before it for its moments."""
    return name.replace("model.", "", 1)


def state_parameters(cell: nn.Cell) -> dict[str, Parameter]:
    """The values of a training step that a run changes, by name: weights and moments; with adapters not the frozen
    weights."""
    found = {p.name: p for p in cell.get_parameters() if p.name.startswith(STATES)}
    if any(name.startswith(FACTORED) for name in found):  # an optimizer has dummy values for what it has no state of
        shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
        found = {name: found[name] for name in found if _state_shape(name, shapes) is not None}
    if not any(map(is_adapter, found)):
        return found
    return {
        name: parameter for name, parameter in found.items() if parameter.requires_grad or not name.startswith("model.")
    }


def _state_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of a parameter, or of its state for an optimizer that factors its second moments; by the shapes of
    parameters."""
    prefix = next((moment for moment in BESIDE_WEIGHTS if name.startswith(moment)), "")
    shape = shapes[name.removeprefix(prefix)]
    return state_shape(prefix, shape, True) if prefix else shape


def _whole_on_every_rank(parameters: Mapping[str, Parameter]) -> set[str]:
    """Names of optimizer state without the shape of a parameter, so that the compiler has no layout of it: factored
    second moments, which only runs with unsharded matrices on every rank have."""
    factored = any(name.startswith(FACTORED) for name in parameters)
    return {name for name in parameters if factored and name.startswith(MOMENTS[1:])}


def _whole_shape(name: str, report: Report) -> tuple[int, ...]:
    """Shape of a parameter or its state, over all ranks."""
    shape = tuple(report.of(name).global_shape)
    prefix = next((factor for factor in FACTORED if name.startswith(factor)), "")
    return (state_shape(prefix, shape, True) or shape) if prefix else shape


class Saver:
    """Saves the state of a run as its configuration says, and when the run is stopped. All ranks take part.

    Args:
        about: the fields of the manifest besides step, tensors and files, as they are when it is called.
        add_files: puts what else belongs to a checkpoint, the tokenizer, into its folder.
        last_step: the step whose state is saved already.
    """

    def __init__(
        self,
        cell: nn.Cell,
        engine: Engine,
        report: Report,
        root: Path,
        about: Callable[[], Mapping[str, Any]],
        add_files: Callable[[Path], object],
        *,
        every: int = 0,
        minutes: float = 0.0,
        keep_last: int = 0,
        in_background: bool = False,
        last_step: int | None = None,
    ):
        self.cell, self.engine, self.report, self.root = cell, engine, report, root
        self.about, self.add_files = about, add_files
        self.every, self.minutes, self.keep_last, self.in_background = every, minutes, keep_last, in_background
        self.last_step = last_step
        self.stop_requested = False
        self._last_time = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        token = np.array([secrets.randbelow(1 << 30)], np.int32)
        self.token = int(engine.broadcast(token, engine.strategy.mesh.first_rank_of_last_stage)[0])
        if engine.rank == 0:
            remove_leftovers(root)
        signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, *_: object) -> None:
        self.stop_requested = True

    def after_step(self, step: int) -> bool:
        """Save if it is time to. Returns whether the run must stop, on which all ranks agree."""
        is_time = self.minutes > 0 and time.monotonic() - self._last_time >= 60 * self.minutes
        wish = self.engine.max_over_ranks(2 if self.stop_requested else int(is_time))
        if wish or (self.every and step % self.every == 0):
            self.save(step)
        return wish == 2

    def save(self, step: int) -> None:
        """Save the state after `step` steps.

        Raises:
            ConfigError: a file cannot be written; the checkpoints there stay as they are.
        """
        if step == self.last_step:
            return
        self.wait()
        slices, self.last_step, self._last_time = self._snapshot(), step, time.monotonic()
        about = self.about()
        if self.in_background:
            self._thread = threading.Thread(target=self._write_and_remember, args=(step, slices, about))
            self._thread.start()
        else:
            self._write(step, slices, about)

    @contextlib.contextmanager
    def saving_after_an_error(self, step: int) -> Iterator[None]:
        """Save the state of `step` before an error inside ends the run. On one device: other ranks do not know of it."""
        try:
            yield
        except Exception:
            if self.engine.strategy.mesh.size == 1:
                self.save(step)
                self.wait()
            raise

    def wait(self) -> None:
        """Wait until a save in the background is done.

        Raises:
            ConfigError: it could not write.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def _snapshot(self) -> dict[str, LocalTensor]:
        """This rank's part of the state: what no other rank writes."""
        result = {}
        parameters = state_parameters(self.cell)
        whole = _whole_on_every_rank(parameters)
        for name, parameter in parameters.items():
            shape = _whole_shape(name, self.report)
            if name in whole:
                part = TensorSlice.full(shape) if self.engine.rank == 0 else None
            else:
                part = self.engine.slice_to_write(name, self.report.of(name))
            if part is not None:
                array = parameter.asnumpy().copy()  # the graph continues to write into its own buffers
                result[logical_name(name)] = LocalTensor(array, part.start, shape)
        return result

    def _write_and_remember(self, step: int, slices: Mapping[str, LocalTensor], about: Mapping[str, Any]) -> None:
        try:
            self._write(step, slices, about)
        except Exception as error:
            self._error = error

    def _write(self, step: int, slices: Mapping[str, LocalTensor], about: Mapping[str, Any]) -> None:
        partial = self.root / f".step-{step:08d}.{self.token}.partial"
        try:
            write_parts(partial, self.engine.rank, slices)
            if self.engine.rank == 0:
                self.add_files(partial)
                folder = finish(partial, self.root, self.engine.strategy.mesh.size, step, about)
                milestone(f"state of step {step} in {folder}")
                if self.keep_last:
                    remove_old(self.root, self.keep_last)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(
                f"{error.filename or partial}: the state of step {step} cannot be saved: {error.strerror or error}; "
                "older checkpoints are untouched"
            ) from None


def newest_complete(
    root: Path, engine: Engine, check: Callable[[Manifest, Path], None] = check_contents
) -> tuple[Path, Manifest]:
    """Find the newest checkpoint that passes its hashes and that `check` accepts.

    All ranks take part, each reads its share of the files.

    Damaged ones that are newer are named and renamed, so that nobody takes them for the newest again.

    Raises:
        ConfigError: there is none.
    """
    damaged: list[Path] = []
    newest_problem = "none"
    for folder in checkpoints(root):
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
                _set_aside(damaged, root, folder)
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


def _set_aside(damaged: Sequence[Path], root: Path, newest: Path) -> None:
    for folder in damaged:
        remove(root / f"damaged-{folder.name}")
        folder.rename(root / f"damaged-{folder.name}")
    write_text_atomically(root / LATEST, newest.name + "\n")


def load_state(cell: nn.Cell, engine: Engine, report: Report, folder: Path, manifest: Manifest) -> None:
    """Give the weights and moments of a compiled step the values of a checkpoint, whatever mesh wrote it. All ranks take
    part.

    Raises:
        ConfigError: a tensor is missing or has another shape, a file is damaged.
    """
    reader, problems = CheckpointReader(folder, manifest), []
    parts: list[Part] = []
    parameters = state_parameters(cell)
    on_every_rank = _whole_on_every_rank(parameters)
    for name, parameter in parameters.items():
        logical, whole = logical_name(name), _whole_shape(name, report)
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
        parameter.source = Source.of_zeros(parameter.shape)


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
        data = Tensor(np.ascontiguousarray(read(part)), dtype=parameter.dtype)
        parameter.set_data(
            data, slice_shape=parameter.sliced
        )  # otherwise MindSpore would slice it again for the next graph


def versions() -> dict[str, str]:
    """Versions and settings that the numbers depend on."""
    return {"mindspore": ms.__version__, "numpy": np.__version__}
