# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank over a step: three peaks, what is alive at the peak, the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.dry_run.memory.allocator import ALIGNMENT, Pool
from sporeloom.dry_run.memory.labels import KINDS, Label
from sporeloom.dry_run.memory.recorder import Recorder

CURVE_POINTS = 400
MAX_OPERATORS = 12
"""Number of operators listed at the peak."""
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Timeline:
    """All allocations of a step in logical time, a tick for each operator."""

    sizes: Numbers
    """Requested bytes of each allocation."""
    of_label: Numbers
    """Number of its label."""
    labels: list[Label]
    addresses: Numbers
    """Its address in the simulated pool."""
    events: Numbers
    """`n + 1`: allocation n is made; `-n - 1`: it is freed."""
    ticks: Numbers
    """Tick of each event."""
    phases: list[tuple[int, str]]
    pool_bytes: int
    """Bytes that the pool reserved in the end, with fragments."""
    earlier: Numbers
    """Events of the step before, which leaves fragments in the pool; the first `num_initial` events repeat what it leaves."""
    num_initial: int
    live_as_written: int = 0
    """Peak of the live bytes if operators ran in the order in which the graph lists them; 0: not known."""

    @classmethod
    def of(cls, recorded: Recorder) -> Timeline:
        """Place the recorded allocations in a pool."""
        sizes, of_label = np.array(recorded.sizes, np.int64), np.array(recorded.labels, np.int64)
        events, ticks = np.array(recorded.events, np.int64), np.array(recorded.ticks, np.int64)
        rest = recorded.phases, np.array(recorded.earlier, np.int64), recorded.num_initial
        return cls._placed(sizes, of_label, list(recorded.known), events, ticks, *rest)

    @classmethod
    def _placed(
        cls,
        sizes: Numbers,
        of_label: Numbers,
        labels: list[Label],
        events: Numbers,
        ticks: Numbers,
        phases: list[tuple[int, str]],
        earlier: Numbers,
        num_initial: int,
    ) -> Timeline:
        pool, addresses, bytes_of = Pool(), [0] * len(sizes), sizes.tolist()
        for event in [*earlier.tolist(), *events[num_initial:].tolist()]:
            if event > 0:
                addresses[event - 1] = pool.allocate(bytes_of[event - 1])
            else:
                pool.free(addresses[-event - 1], bytes_of[-event - 1])
        placed = np.array(addresses, np.int64)
        return cls(sizes, of_label, labels, placed, events, ticks, phases, pool.reserved, earlier, num_initial)

    def only(self, wanted: Callable[[Label], bool]) -> Timeline:
        """The timeline of the allocations with some labels alone, in a pool of their own."""
        chosen = np.array([wanted(label) for label in self.labels], bool)
        kept = chosen[self.of_label]
        sizes = np.where(kept, self.sizes, 0)
        rest = self.events, self.ticks, self.phases, self.earlier, self.num_initial
        return self._placed(sizes, self.of_label, self.labels, *rest)

    def curve(self, is_aligned: bool = False) -> Numbers:
        """Bytes alive after each event."""
        sizes = -(-self.sizes // ALIGNMENT) * ALIGNMENT if is_aligned else self.sizes
        numbers = np.abs(self.events) - 1
        return np.cumsum(np.sign(self.events) * sizes[numbers], dtype=np.int64)

    @property
    def live_bytes(self) -> int:
        """Peak of the requested bytes."""
        return int(self.curve().max(initial=0))

    @property
    def aligned_bytes(self) -> int:
        """Peak of the bytes allocated: each allocation rounded up."""
        return int(self.curve(is_aligned=True).max(initial=0))

    def alive_at(self, event: int) -> Numbers:
        """Numbers of the allocations that exist after an event."""
        before = self.events[: event + 1]
        freed = np.zeros(len(self.sizes), bool)
        freed[-before[before < 0] - 1] = True
        made = before[before > 0] - 1
        alive: Numbers = made[~freed[made]]
        return alive

    def ends(self) -> Numbers:
        """Tick at which each allocation is freed; the last one of the step if it never is."""
        ends = np.full(len(self.sizes), self.ticks[-1] if len(self.ticks) else 0, np.int64)
        freed = self.events < 0
        ends[-self.events[freed] - 1] = self.ticks[freed]
        return ends

    def phase_at(self, tick: int) -> str:
        """The pass that runs at a tick."""
        begun = [name for start, name in self.phases if start <= tick]
        return begun[-1] if begun else "before the step"

    def summary(self) -> dict[str, Any]:
        """Peaks, what is alive at the peak of live bytes, and the curve, as data."""
        curve = self.curve()
        peak = int(curve.argmax()) if len(curve) else 0
        alive = self.alive_at(peak)

        def grouped(key: Callable[[Label], Any]) -> Counter[Any]:
            found: Counter[Any] = Counter()
            for number in alive.tolist():
                found[key(self.labels[self.of_label[number]])] += int(self.sizes[number])
            return +found

        kinds, tick = grouped(lambda label: label.kind), int(self.ticks[peak]) if len(curve) else 0
        largest = grouped(lambda label: (label.kind, label.operator)).most_common(MAX_OPERATORS)
        return {
            "live_bytes": self.live_bytes,
            "allocated_bytes": self.aligned_bytes,
            "pool_bytes": self.pool_bytes,
            "peak_in": self.phase_at(tick),
            "peak_tick": tick,
            "live_as_written_bytes": self.live_as_written,
            "num_ticks": int(self.ticks[-1]) if len(curve) else 0,
            "by_kind": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
            "by_layer": dict(sorted(grouped(lambda label: label.layer or "elsewhere").items())),
            "largest": [{"kind": kind, "operator": name, "bytes": size} for (kind, name), size in largest],
            "curve": self.drawn(curve),
            "phases": [[start, name] for start, name in self.phases],
        }

    def drawn(self, curve: Numbers) -> list[list[int]]:
        """The curve as at most CURVE_POINTS pairs of a tick and the most bytes alive since the pair before."""
        if not len(curve):
            return []
        bins = np.minimum(self.ticks * CURVE_POINTS // (int(self.ticks[-1]) + 1), CURVE_POINTS - 1)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        tops = np.maximum.reduceat(curve, starts)
        return [[int(self.ticks[start]), int(top)] for start, top in zip(starts, tops, strict=True)]
