# SPDX-License-Identifier: Apache-2.0
"""Backend of CPU processes."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from sporeloom.partition.broadcasts import tile_broadcasts
from sporeloom.partition.graph import Graph
from sporeloom.runtime.cpu.exchange import TransportExchange
from sporeloom.runtime.cpu.find_nan import NanFinder
from sporeloom.runtime.cpu.program import Program
from sporeloom.runtime.cpu.recorder import FlightRecorder
from sporeloom.runtime.cpu.transport import Collectives, Transport
from sporeloom.runtime.environment import end_with_msrun, job_name, launched_rank
from sporeloom.runtime.recorded_environment import FOLDER
from sporeloom.runtime.spmd.backend import SpmdBackend
from sporeloom.runtime.spmd.rank_graph import RankGraph
from sporeloom.strategy.config import Strategy

_joined = defaultdict[str, Iterator[int]](itertools.count)
"""Number of times that this process has joined a job, by its name: processes that join it once more do so together."""


class CpuProcesses(SpmdBackend):
    """One of the CPU processes of a job, which may be the only one."""

    finds_nan = True

    def __init__(self, strategy: Strategy, rank: int, transport: Transport):
        super().__init__(strategy, rank)
        self.transport = transport
        self._nan_finder: NanFinder | None = None
        self._recorder: FlightRecorder | None = None

    @classmethod
    def join(cls, strategy: Strategy) -> CpuProcesses:
        """Join the other processes of the job. msrun's scheduler, which is not used here, exits here."""
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            sys.exit(0)
        end_with_msrun()
        size = strategy.mesh.size
        job = job_name() if size > 1 else f"alone-{os.getpid()}"
        rank = launched_rank() if size > 1 else 0
        transport = Transport(rank, size, f"{job}-{next(_joined[job])}")
        atexit.register(transport.close_at_exit)
        return cls(strategy, rank, transport)

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        if self._nan_finder:
            self._nan_finder.first = None
        with self._recorder.recording() if self._recorder else contextlib.nullcontext():
            return super().run(cell, inputs)

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        group = Collectives(self.transport, range(self.strategy.mesh.size), "broadcast")
        return group.broadcast(array, source)

    def broadcast_value(self, value: Any, source: int) -> Any:
        return self.transport.share_value(value, source, "share")

    def max_over_ranks(self, value: int) -> int:
        return max(self.transport.gather_values(value, "largest"))

    def sum_over_ranks(self, value: float) -> float:
        return sum(self.transport.gather_values(value, "total"))

    def look_for_nan(self) -> None:
        self._nan_finder = NanFinder()

    def first_not_finite(self) -> list[str] | None:
        if self._nan_finder is None:
            return None
        found = self.transport.gather_values(self._nan_finder.first, "not finite")
        ranks = {what: [str(rank) for rank, each in enumerate(found) if each == what] for what in found if what}
        return [f"{what} (rank {', '.join(of)})" for what, of in ranks.items()]

    def record(self, folder: Path, keep: int) -> None:
        self._recorder = FlightRecorder(folder / FOLDER, keep, self.rank, self.strategy.mesh.size)
        self.tells_values = True

    def begin_step(self, step: int) -> None:
        if self._recorder:
            self._recorder.begin_step(step)

    def on_lost_rank(self, tell: Callable[[str], None]) -> None:
        self.transport.on_lost = tell

    def watch_for(self, seconds: float) -> None:
        self.transport.watchdog_s = seconds

    def announce_step(self, step: int) -> None:
        self.transport.announce_step(step)

    def close(self) -> None:
        self.transport.close()

    def seconds_of_communication(self) -> float | None:
        return self.transport.communication_s

    def suited(self, graph: Graph) -> Graph:
        return tile_broadcasts(graph)

    def make_program(self, graph: RankGraph, cell: nn.Cell, name: str, among: Sequence[int]) -> Program:
        if self._recorder:
            owners = cell.get_parameters()
            self._recorder.add_program(
                name, graph, {p.name: self._shapes[id(p)] for p in owners if id(p) in self._shapes}
            )
        program = Program(graph, cell, self.transport, name, self._nan_finder, among, self._recorder)
        self.rounded = max(self.rounded, program.widened.rounded, key=Counter.total)
        return program

    def exchange(self) -> TransportExchange:
        return TransportExchange(self.transport, self._nan_finder, self._recorder)

    def bytes_of_first(self, content: bytes) -> bytes:
        group = Collectives(self.transport, range(self.strategy.mesh.size), "graph of one device")
        return group.broadcast(np.frombuffer(content, np.uint8), 0).tobytes()
