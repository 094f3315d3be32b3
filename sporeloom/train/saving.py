# SPDX-License-Identifier: Apache-2.0
"""Save the state of a run: names and shapes of what is saved, and when. `sporeloom.train.loading` restores it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
from mindspore import Parameter, nn
from mindspore import dtype as mstype

from sporeloom.checkpoint.contents import BESIDE_WEIGHTS, FACTORED, MOMENTS, logical_name, state_shape
from sporeloom.checkpoint.manifest import FOLDER
from sporeloom.checkpoint.sharded import (
    WAIT_S,
    LocalTensor,
    finish,
    remove_leftovers,
    remove_old,
    write_parts,
)
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone
from sporeloom.models.adapters import is_adapter
from sporeloom.parallel.report import Report
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage
from sporeloom.strategy.tensor_slice import TensorSlice

WEIGHTS = "model."
STATES = (WEIGHTS, "value_head.", *BESIDE_WEIGHTS)
"""Prefixes of the parameter names that make up the training state."""
ACCUMULATED = "accu_grads."
"""Prefix of accumulated gradients, which are 0 between steps."""
ERROR_WAIT_S = 300.0
"""Maximum time to wait for the parts of other ranks after an error, which they may not have."""
BEGIN_AS_ZEROS = (*BESIDE_WEIGHTS, ACCUMULATED)


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


def whole_on_every_rank(parameters: Mapping[str, Parameter]) -> set[str]:
    """Names of optimizer state without the shape of a parameter, so that the compiler has no layout of it: factored
    second moments, which only runs with unsharded matrices on every rank have."""
    factored = any(name.startswith(FACTORED) for name in parameters)
    return {name for name in parameters if factored and name.startswith(MOMENTS[1:])}


def whole_shape(name: str, report: Report) -> tuple[int, ...]:
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
        memory: folder in memory for the newest state of an elastic run, and the interval in steps at which it is written.
        before_saving: called with a step and this rank's slices of its state before they are written; after an error, which
            other ranks may not have, with None in place of slices.
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
        memory: tuple[Path, int] | None = None,
        before_saving: Callable[[int, Mapping[str, LocalTensor] | None], None] = lambda step, slices: None,
    ):
        self.cell, self.engine, self.report, self.root = cell, engine, report, root
        self.about, self.add_files = about, add_files
        self.every, self.minutes, self.keep_last, self.in_background = every, minutes, keep_last, in_background
        self.last_step, self.memory, self.before_saving = last_step, memory, before_saving
        self.stop_requested = self._has_failed = False
        self._wait_s = WAIT_S
        self._last_time = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        token = np.array([secrets.randbelow(1 << 30)], np.int32)
        self.token = int(engine.broadcast(token, engine.strategy.mesh.first_rank_of_last_stage)[0])
        if engine.rank == 0:
            remove_leftovers(root)
            if memory:
                remove_leftovers(memory[0])
        signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, *_: object) -> None:
        self.stop_requested = True

    def after_step(self, step: int) -> bool:
        """Save if it is time to. Returns whether the run must stop, on which all ranks agree."""
        is_time = self.minutes > 0 and time.monotonic() - self._last_time >= 60 * self.minutes
        wish = self.engine.max_over_ranks(2 if self.stop_requested else int(is_time))
        if wish or (self.every and step % self.every == 0):
            self.save(step)
        elif self.memory and step % self.memory[1] == 0:
            self._begin(step, self.memory[0])
        return wish == 2

    def save(self, step: int) -> None:
        """Save the state after `step` steps.

        Raises:
            ConfigError: a file cannot be written; the checkpoints there stay as they are.
        """
        if step == self.last_step:
            return
        self._begin(step, self.root)
        self.last_step, self._last_time = step, time.monotonic()

    def _begin(self, step: int, root: Path) -> None:
        """Write the state to a folder of states, in the background if the run does so."""
        self.wait()
        slices = self.snapshot()
        self.before_saving(step, None if self._has_failed else slices)
        arguments = (root, step, slices, self.about())
        if self.in_background:
            self._thread = threading.Thread(target=self._write_and_remember, args=arguments)
            self._thread.start()
        else:
            self._write(*arguments)

    @contextlib.contextmanager
    def saving_after_an_error(self, step: int) -> Iterator[None]:
        """Save the state of `step` before an error inside ends the run. Every rank that has the error saves its part; where
        others do not have it, the state stays incomplete, for which none waits longer than `ERROR_WAIT_S`."""
        try:
            yield
        except Exception:
            self._wait_s, self._has_failed = ERROR_WAIT_S, True
            try:
                self.save(step)
                self.wait()
            except ConfigError as problem:  # the first error is the one to report
                milestone(problem.problems[0])
            folder, deadline = self.root / FOLDER.format(step), time.monotonic() + self._wait_s
            while not folder.exists() and time.monotonic() < deadline and self.engine.rank:
                time.sleep(0.05)  # the first process that ends ends the others, though rank 0 still writes
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

    def snapshot(self) -> dict[str, LocalTensor]:
        """This rank's part of the state: what no other rank writes."""
        result = {}
        parameters = state_parameters(self.cell)
        whole = whole_on_every_rank(parameters)
        for name, parameter in parameters.items():
            shape = whole_shape(name, self.report)
            if name in whole:
                part = TensorSlice.full(shape) if self.engine.rank == 0 else None
            else:
                part = self.engine.slice_to_write(name, self.report.of(name))
            if part is not None:
                array = storage(parameter).asnumpy().copy()  # the graph continues to write into its own buffers
                if parameter.dtype == mstype.bfloat16:
                    array = array.astype(ml_dtypes.bfloat16)
                result[logical_name(name)] = LocalTensor(array, part.start, shape)
        return result

    def _write_and_remember(
        self, root: Path, step: int, slices: Mapping[str, LocalTensor], about: Mapping[str, Any]
    ) -> None:
        try:
            self._write(root, step, slices, about)
        except Exception as error:
            self._error = error

    def _write(self, root: Path, step: int, slices: Mapping[str, LocalTensor], about: Mapping[str, Any]) -> None:
        partial = root / f".step-{step:08d}.{self.token}.partial"
        try:
            write_parts(partial, self.engine.rank, slices)
            if self.engine.rank == 0:
                self.add_files(partial)
                folder = finish(partial, root, self.engine.strategy.mesh.size, step, about, self._wait_s)
                if root == self.root:
                    milestone(f"state of step {step} in {folder}")
                if keep := self.keep_last if root == self.root else 1:
                    remove_old(root, keep)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(
                f"{error.filename or partial}: the state of step {step} cannot be saved: {error.strerror or error}; "
                "older checkpoints are untouched"
            ) from None


def versions() -> dict[str, str]:
    """Versions and settings that the numbers depend on."""
    return {"mindspore": ms.__version__, "numpy": np.__version__}
