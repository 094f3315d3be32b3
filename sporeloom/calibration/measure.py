# SPDX-License-Identifier: Apache-2.0
"""Measures this process and the others of its job, all running at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.calibration import graphs
from sporeloom.calibration.cases import ITEM, WIDTH, Case, collective_cell, compute_cases
from sporeloom.calibration.samples import COLLECTIVE, PADDING, REFERENCE, Sample, whole_rows
from sporeloom.partition.graph import TensorType
from sporeloom.runtime.cpu.exchange import TransportExchange
from sporeloom.runtime.cpu.transport import Collectives, Transport
from sporeloom.runtime.environment import job_name, launched_processes, launched_rank

KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll")
SIZES = {False: (1 << 12, 1 << 16, 1 << 18, 1 << 20), True: (1 << 12, 1 << 18)}
"""Whether it is quick -> elements of the unsharded tensor of a collective."""
IN_GRAPH = 2
WARM_UP = 2
REPEATS, MIN_REPEATS = 25, 3
BUDGET_S = {False: 1.0, True: 0.4}
"""Seconds after which a graph is repeated no more, if it was often enough."""


def measure(quick: bool) -> list[Sample]:
    """All samples, with the seconds of every process. Those that all others are compared with are taken at the beginning and
    at the end: other work of the machine only adds time, so the shorter ones count."""
    graphs.start()
    rank, size = launched_rank(), launched_processes()
    transport = Transport(rank, size, f"{job_name()}-calibrate") if size > 1 else None
    found, references = list[Sample](), dict[int, Case]()
    for place, case in enumerate(compute_cases(quick)):
        found.append(_sample(case, quick, transport))
        if case.kind == REFERENCE:
            references[place] = case
    for place, case in references.items():
        found[place] = min(found[place], _sample(case, quick, transport), key=lambda sample: sample.median)
    if transport:
        found += _Communication(transport, quick).samples()
        transport.close()
    return found


def _sample(case: Case, quick: bool, transport: Transport | None) -> Sample:
    padding = 0 if quick else PADDING
    call = graphs.load(case.cell, case.inputs, case.replaced_by, padding)
    seconds = repeated(call, _count(call, quick, transport), transport)
    return Sample(
        group=case.group,
        kind=case.kind,
        times=case.times,
        num_bytes=case.num_bytes,
        seconds=seconds,
        flops=case.flops,
        also=case.also,
        padding=padding,
    )


def _count(call: Callable[[], None], quick: bool, transport: Transport | None) -> int:
    """Choose how often to repeat a call, the same on all processes; warms up."""
    call()
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        call()
    one = (time.perf_counter() - begin) / WARM_UP
    slowest = max(transport.gather_values(one, "count")) if transport else one
    return max(MIN_REPEATS, min(REPEATS, int(BUDGET_S[quick] / slowest)))


def repeated(call: Callable[[], None], count: int, transport: Transport | None) -> list[float]:
    """Seconds of each call, on all processes, which begin together."""
    if transport:
        transport.gather_values(0, "begin")
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    if transport is None:
        return seconds
    return [each for of_rank in transport.gather_values(seconds, "seconds") for each in of_rank]


@dataclasses.dataclass
class _Communication:
    transport: Transport
    quick: bool

    def samples(self) -> Iterator[Sample]:
        """Collectives over every group size that divides the number of processes, in all groups at once."""
        for ranks in range(2, self.transport.size + 1):
            if self.transport.size % ranks:
                continue
            for elements in SIZES[self.quick]:
                for kind in KINDS:
                    yield self._collective(kind, ranks, elements)
        for elements in SIZES[self.quick] if self.transport.size % 2 == 0 else ():
            yield self._message(elements)

    def _collective(self, kind: str, ranks: int, elements: int) -> Sample:
        first = self.transport.rank // ranks * ranks
        group = Collectives(self.transport, range(first, first + ranks), f"{kind} {ranks} {elements}")
        run: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
            "AllReduce": group.all_reduce,
            "AllGather": group.all_gather,
            "ReduceScatter": group.reduce_scatter,
            "AlltoAll": lambda x: group.all_to_all(x, 0, 0),
        }
        parts = ranks if kind == "AllGather" else 1
        x = np.ones((whole_rows(elements // WIDTH, ranks) // parts, WIDTH), np.float32)
        cell = graphs.Repeated(collective_cell(kind, ranks), IN_GRAPH, 1)
        call = graphs.load(cell, [x] * IN_GRAPH, run[kind])
        seconds = repeated(call, _count(call, self.quick, self.transport), self.transport)
        return Sample(
            group=COLLECTIVE, kind=kind, times=IN_GRAPH, num_bytes=x.nbytes * parts, seconds=seconds, ranks=ranks
        )

    def _message(self, elements: int) -> Sample:
        """Half of the time in which a tensor goes to the next process and comes back, as between pipeline stages."""
        rank, exchange = self.transport.rank, TransportExchange(self.transport)
        peer, begins = rank ^ 1, rank % 2 == 0
        x = Tensor(np.ones((elements // WIDTH, WIDTH), np.float32))
        type = TensorType((elements // WIDTH, WIDTH), "float32")
        tag = ("calibrate", f"message {elements}", 0)

        def there_and_back() -> None:
            if begins:
                exchange.send(peer, tag, x, type)
                exchange.receive(peer, tag, type)
            else:
                exchange.send(peer, tag, exchange.receive(peer, tag, type), type)

        seconds = repeated(there_and_back, _count(there_and_back, self.quick, self.transport), self.transport)
        halves = [each / 2 for each in seconds]
        return Sample(
            group=COLLECTIVE,
            kind="Message",
            times=1,
            num_bytes=elements * ITEM,
            seconds=halves,
            ranks=2,
            in_graph=False,
        )
