# SPDX-License-Identifier: Apache-2.0
"""Choose the candidates that are simulated, one after another, from closed forms and from what was simulated before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from sporeloom.strategy.config import Strategy
from sporeloom.strategy_search.front import pareto
from sporeloom.strategy_search.scoring import Scored

EVERY = 3
"""Each so-many-th choice lies on the front of time and memory; the others are the fastest."""


class Choice:
    """Choices among scored candidates. Memory in closed form is corrected by the ratios of simulated to closed form that were
    seen on the same mesh, else with the same kind of recomputation, else at all: a candidate that is then too large waits."""

    def __init__(self, fitting: Sequence[Scored], usable_bytes: float):
        self.left = list(fitting)
        """The candidates that were not chosen yet, the fastest first."""
        self.usable_bytes = usable_bytes
        self.num_chosen = 0
        self.ratios: dict[Hashable, list[float]] = defaultdict(list)

    def next(self) -> Scored | None:
        """The next candidate; None: there is no more. Where none is expected to fit, the one with the least memory."""
        if not self.left:
            return None
        expected = [self.expected_bytes(one) for one in self.left]
        likely = [n for n, size in enumerate(expected) if size <= self.usable_bytes]
        if not likely:
            found = min(range(len(self.left)), key=lambda n: (expected[n], n))
        elif self.num_chosen % EVERY == EVERY - 1:
            front = pareto([(self.left[n].seconds, expected[n]) for n in likely])
            found = likely[front[self.num_chosen // EVERY * 7 % len(front)]]  # spread over the front
        else:
            found = likely[0]
        self.num_chosen += 1
        return self.left.pop(found)

    def learn(self, one: Scored, peak_bytes: int) -> None:
        """Learn from a simulated candidate."""
        for key in _keys(one.candidate.strategy, one.candidate.accumulate):
            self.ratios[key].append(peak_bytes / one.peak_bytes)

    def leave_out(self, name: str) -> None:
        """Do not choose a candidate that was simulated for another reason."""
        self.left = [one for one in self.left if one.name != name]

    def expected_bytes(self, one: Scored) -> float:
        """Memory of a candidate, by its closed form and by what was learnt."""
        for key in _keys(one.candidate.strategy, one.candidate.accumulate):
            if key in self.ratios:
                return one.peak_bytes * min(self.ratios[key])
        return one.peak_bytes


def _keys(strategy: Strategy, accumulate: int) -> Iterator[Hashable]:
    """Keys that candidates share whose closed forms err alike, the most specific first."""
    recompute = strategy.recompute and (strategy.recompute.kind, strategy.recompute.per_stage is None)
    microbatches = strategy.num_microbatches(accumulate)
    yield str(strategy.mesh), microbatches, recompute, strategy.sequence_parallel
    yield str(strategy.mesh), microbatches, recompute
    yield recompute, strategy.mesh.pp > 1
    yield None
