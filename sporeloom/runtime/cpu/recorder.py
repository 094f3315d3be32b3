# SPDX-License-Identifier: Apache-2.0
"""The flight recorder of a CPU process: keeps what its last steps need to run again alone."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from sporeloom.runtime.cpu.recording import (
    ARRAYS,
    Array,
    RecordedCall,
    RecordedMessage,
    RecordedTransfer,
    StepRecord,
    sha256_of,
    store,
    write_programs,
    write_shards,
    write_step,
)
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.layout import Shape


class FlightRecorder:
    """Writes the last steps of a rank to its part of `folder`, where older recordings are removed.

    Args:
        keep: number of steps that are kept.
        size: number of ranks.
    """

    def __init__(self, folder: Path, keep: int, rank: int, size: int):
        self.root, self.keep, self.rank = folder / f"rank-{rank}", keep, rank
        self._files: dict[str, str] = {}
        self._record: StepRecord | None = None
        self._due: int | None = None
        self._parameters: dict[str, Parameter] = {}
        self._lock = threading.Lock()  # MindSpore runs collectives in threads of its own
        if rank == 0:  # ranks of an older run on more processes
            for old in folder.glob("rank-*"):
                if int(old.name.partition("-")[2]) >= size:
                    shutil.rmtree(old)
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        write_programs(self.root, self._files)

    def add_program(self, name: str, graph: RankGraph, parameters: Mapping[str, Shape]) -> None:
        """Keep a graph of this rank, before its collectives are replaced.

        Args:
            parameters: shapes of the whole parameters.
        """
        file = self._files[name] = f"{len(self._files)}.mindir"
        (self.root / file).write_bytes(graph.model.SerializeToString())
        layouts = graph.held_layouts.items()
        starts = {name: layout.operator_slice(parameters[name], self.rank).start for name, layout in layouts}
        write_shards(self.root, file, graph.values, {name: (parameters[name], start) for name, start in starts.items()})
        write_programs(self.root, self._files)

    def begin_step(self, step: int) -> None:
        """Record the next run of a Cell as this step."""
        self._due = step

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what graphs do in this block, if a step is due."""
        if self._due is None:
            yield
            return
        arrays = self.root / f".{ARRAYS}.partial"
        with arrays.open("wb") as self._file:
            self._record, self._due = StepRecord(self.rank, self._due), None
            try:
                yield
                record = self._record
            finally:
                self._record = None
        record.after = {name: sha256_of(owner.asnumpy()) for name, owner in self._parameters.items()}
        self._parameters = {}
        write_step(self.root, record, arrays, self.keep)

    def call(
        self,
        program: str,
        parameters: Sequence[tuple[str, Parameter]],
        inputs: Sequence[Tensor],
        run: Callable[[], Any],
    ) -> Any:
        """Run a graph, and record the run. Its parameters are recorded before its first run in a step."""
        if self._record is None:
            return run()
        for name, owner in parameters:
            if name not in self._parameters:
                self._parameters[name] = owner
                self._record.state[name] = store(owner.asnumpy(), self._file)
        call = RecordedCall(program, [store(each.asnumpy(), self._file) for each in inputs])
        self._record.calls.append(call)
        result = run()
        call.outputs = [sha256_of(array) for array in arrays_of(result)]
        return result

    def watched(self, node: str, tag: str, place: str, run: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """Wrap the function of a collective, so that what it gets is recorded."""

        def call(x: Array) -> Array:
            result = run(x)
            if self._record is not None:
                with self._lock:
                    received = store(np.asarray(result), self._file)
                    self._record.calls[-1].messages[node] = RecordedMessage(tag, place, sha256_of(x), received)
            return result

        return call

    def transfer(self, is_received: bool, tag: str, place: str, array: Array) -> None:
        """Record a value that this rank sends to another stage, or has received from one."""
        if self._record is not None:
            found = RecordedTransfer(len(self._record.calls), is_received, tag, place, sha256_of(array))
            self._record.transfers.append(found)


def arrays_of(result: Any) -> list[Array]:
    """The results of a graph as arrays."""
    outputs = result if isinstance(result, (tuple, list)) else [result]
    return [each.asnumpy() if isinstance(each, Tensor) else np.asarray(each) for each in outputs]
