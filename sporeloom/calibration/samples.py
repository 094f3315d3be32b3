# SPDX-License-Identifier: Apache-2.0
"""Measurements as data, and the rates that follow from them. Does not load MindSpore."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sporeloom.calibration.fit import line, spread, through_origin
from sporeloom.core.errors import ConfigError
from sporeloom.planner.cluster import Efficiency, MeasuredLine, ProcessRates

GROUPS = ("launch", "product", "attention", "operator", "at once", "collective")
LAUNCH, PRODUCT, ATTENTION, OPERATOR, AT_ONCE, COLLECTIVE = GROUPS
PADDING = 128
"""Tiny operators at the end of every graph but those of collectives, unless it is quick. MindSpore runs a graph of at most
100 operators in the thread that calls it, which then polls while the threads of its pool compute: on two cores a third
thread. The graphs of steps are larger; those its pool runs alone. (CheckSingleThreadRunningCondition in its
graph_scheduler.cc.)"""
WAIT_S = 0.05
"""Seconds that each operator of AT_ONCE waits."""
REFERENCE = "Add"
"""The operator whose rate is the bandwidth of memory."""
RING = "AllReduce"
OPERATORS_OF_LAYER = 40
"""Operators of a layer's forward pass that no compiler fuses, for the closed form, which counts launches by layer."""
MICROSECOND, GIGA = 1e-6, 1e9


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Repeated calls of one graph."""

    group: str
    kind: str
    times: int
    """Number of operators of this kind in the graph."""
    num_bytes: int
    """Bytes that one of them reads and writes; of a collective those of the unsharded tensor."""
    seconds: list[float]
    """Seconds of each call."""
    flops: int = 0
    """FLOPs of one of them."""
    ranks: int = 1
    in_graph: bool = True
    also: Mapping[str, int] = field(default_factory=dict)
    """Other operators that run with each of them: kind -> bytes."""
    padding: int = 0
    """Number of tiny operators after them."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Rate(NamedTuple):
    """Time by bytes; of an operator on top of its launch."""

    latency: float
    bytes_per_s: float

    def __call__(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bytes_per_s

    def as_line(self, kind: str, ranks: int = 1) -> MeasuredLine:
        """Convert to what the planner reads."""
        latency, rate = rounded(self.latency / MICROSECOND), rounded(self.bytes_per_s / GIGA)
        return MeasuredLine(kind=kind, ranks=ranks, latency_us=latency, gb_per_s=rate)


@dataclass(frozen=True)
class MachineRates:
    """Rates of a number of processes, in seconds, bytes and FLOPs."""

    processes: int
    launch: float
    graph: float
    flops: float
    """FLOP/s of products."""
    attention_flops: float
    bytes_per_s: float
    operators: Mapping[str, Rate]
    collectives: Mapping[tuple[str, int], Rate]
    """Kind and number of ranks -> rate."""
    at_once: int
    """Operators of a process that run at once."""

    def as_process_rates(self, alone: MachineRates) -> ProcessRates:
        """Convert to what the planner reads. Efficiencies are relative to a process that is `alone`, those of links to its
        memory."""
        links = self.ring_bytes_per_s / alone.bytes_per_s
        values = {
            "matmul": self.flops / alone.flops,
            "attention": self.attention_flops / alone.flops,
            "memory": self.bytes_per_s / alone.bytes_per_s,
            "intra_node": links,
            "inter_node": links,
            "layer_overhead_us": self.launch / MICROSECOND * OPERATORS_OF_LAYER,
            "float32": 1.0,  # CPUs compute bfloat16 in float32
            "launch_us": self.launch / MICROSECOND,
            "graph_us": self.graph / MICROSECOND,
        }
        return ProcessRates(
            processes=self.processes,
            efficiency=Efficiency(**{name: rounded(value) for name, value in values.items()}),
            operators=[rate.as_line(kind) for kind, rate in self.operators.items()],
            collectives=[rate.as_line(*key) for key, rate in self.collectives.items()],
            operators_at_once=self.at_once,
        )

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes/s of links over which a ring takes as long as the all-reduce of most ranks; those of memory for one process,
        which reduces nothing."""
        ranks = max((ranks for kind, ranks in self.collectives if kind == RING), default=1)
        return 2 * (ranks - 1) / ranks * self.collectives[RING, ranks].bytes_per_s if ranks > 1 else self.bytes_per_s


def whole_rows(rows: int, ranks: int) -> int:
    """The next larger number of rows of which all ranks of a collective can have as many."""
    return -(-rows // ranks) * ranks


def rounded(value: float) -> float:
    """Four digits, which is more than measurements agree in."""
    return float(f"{value:.4g}")


def read_samples(values: Iterable[Mapping[str, Any]]) -> list[Sample]:
    return [Sample(**value) for value in values]


def fitted_rates(samples: Sequence[Sample], processes: int) -> MachineRates:
    """Fit the samples of a number of processes that run at once.

    A graph takes its call, and for each operator a launch and what the operator takes: FLOPs and bytes at a rate. The tiny
    operators of its padding take a launch each.
    Operators and collectives whose time does not grow with their size, because of noise, are left out, and operators that
    run along with them.

    Raises:
        ConfigError: the measurements are too noisy for the rate of products, memory or, of several processes, all-reduces.
    """
    of = {group: [s for s in samples if s.group == group] for group in GROUPS}
    graph, launch = line([s.times + s.padding for s in of[LAUNCH]], [s.median for s in of[LAUNCH]])

    def alone(sample: Sample) -> float:
        """Seconds of one of the operators, without launches and calls."""
        return (sample.median - graph - launch * sample.padding) / sample.times - launch * (1 + len(sample.also))

    operators: dict[str, Rate] = {}
    for kind in dict.fromkeys(s.kind for s in of[OPERATOR]):
        own = [s for s in of[OPERATOR] if s.kind == kind]
        if any(s.also.keys() - operators.keys() for s in own):
            continue  # it would have the time of what is lost in noise
        left = [alone(s) - sum(operators[k](b) for k, b in s.also.items()) for s in own]
        _add(operators, kind, own, left)
    if REFERENCE not in operators:
        raise _noise("bandwidth of memory")
    bytes_per_s = operators[REFERENCE].bytes_per_s

    def flops(group: str) -> float:
        left = [alone(s) - s.num_bytes / bytes_per_s for s in of[group]]
        slope = through_origin([s.flops for s in of[group]], left, [s.median / s.times for s in of[group]])
        if slope <= 0:
            raise _noise(f"rate of {group}")
        return 1 / slope

    collectives: dict[tuple[str, int], Rate] = {}
    for key in dict.fromkeys((s.kind, s.ranks) for s in of[COLLECTIVE]):
        own = [s for s in of[COLLECTIVE] if (s.kind, s.ranks) == key]
        _add(collectives, key, own, [(s.median - graph) / s.times if s.in_graph else s.median for s in own])
    if processes > 1 and all(kind != RING for kind, _ in collectives):
        raise _noise("rate of all-reduces")
    rates = flops(PRODUCT), flops(ATTENTION), bytes_per_s
    (waiting,) = of[AT_ONCE]
    at_once = max(1, round(WAIT_S / max(alone(waiting), WAIT_S / waiting.times)))
    return MachineRates(processes, launch, graph, *rates, operators, collectives, at_once)


def _add(found: dict[Any, Rate], key: Any, samples: Sequence[Sample], seconds: Sequence[float]) -> None:
    """Fit a rate, and add it unless the slope is lost in noise."""
    latency, slope = line([s.num_bytes for s in samples], seconds, [s.median / s.times for s in samples])
    if slope > 0:
        found[key] = Rate(latency, 1 / slope)


def _noise(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: times did not grow with sizes, so the noise is larger than what was measured; run calibrate again while "
        "the machine is idle"
    )


def table(samples: Sequence[Sample]) -> list[str]:
    """A table of what was measured: each graph's time and the spread of its calls."""
    lines = [f"{'measured':34} {'operators':>9} {'KB each':>10} {'ms':>10} {'spread':>8}"]
    for s in samples:
        name = f"{s.kind} of {s.ranks}" if s.ranks > 1 else s.kind
        name = name if s.group in (OPERATOR, COLLECTIVE) else f"{s.group}: {name}"
        lines.append(
            f"{name:34} {s.times:9} {s.num_bytes / 1e3:10,.0f} {s.median * 1e3:10.3f} {spread(s.seconds):8.0%}"
        )
    return lines


def summary(measured: MachineRates, samples: Sequence[Sample]) -> list[str]:
    """A summary of the rates, and what was left out."""
    us, giga = (lambda value: f"{value / MICROSECOND:,.0f} us"), (lambda value: f"{value / GIGA:,.3g} G")
    lines = [
        f"launch of an operator {us(measured.launch)}, call of a graph {us(measured.graph)}; "
        f"products {giga(measured.flops)}FLOP/s, attention {giga(measured.attention_flops)}FLOP/s; "
        f"memory {giga(measured.bytes_per_s)}B/s; operators at once: {measured.at_once}"
    ]
    for (kind, ranks), rate in measured.collectives.items():
        lines.append(f"{kind} of {ranks}: {us(rate.latency)} + bytes at {giga(rate.bytes_per_s)}B/s")
    fitted = {*measured.operators, *measured.collectives}
    asked = {s.kind if s.group == OPERATOR else (s.kind, s.ranks) for s in samples if s.group in (OPERATOR, COLLECTIVE)}
    lines += [f"left out, lost in noise: {_named(key)}" for key in sorted(asked - fitted, key=_named)]
    return lines


def _named(key: str | tuple[str, int]) -> str:
    return key if isinstance(key, str) else f"{key[0]} of {key[1]}"
