# SPDX-License-Identifier: Apache-2.0
"""Order of the samples: a function of seed and position alone, whatever the mesh and wherever a run resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.log import progress
from sporeloom.data.batch import split_mix

ROUNDS = 6
STRIDE = 1024
MAX_STEPS = 10_000_000  # of a ramp
Ints = NDArray[np.int64]


def shuffled(places: Ints, size: int, key: int) -> Ints:
    """Map `places` by a pseudo-random permutation of 0..size-1, without the permutation in memory.

    A balanced Feistel network over the next power of four, walked along until it is inside (Black and Rogaway, 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = split_mix(np.arange(ROUNDS, dtype=np.uint64) + split_mix(np.array([key % 2**64], np.uint64)))
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (split_mix(right + round_key) & mask)
        values[outside] = left << half | right
        outside = values >= size
    return values.astype(np.int64)


def counted_up(counts: Ints) -> Ints:
    """0, 1, ... for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def epoch_samples(first: int, count: int, size: int, key: int) -> Ints:
    """Draws number `first` to `first + count` from a dataset of `size` samples: epoch after epoch, each in an
    order of its own."""
    draws = np.arange(first, first + count)
    chosen = np.empty(count, np.int64)
    for epoch in np.unique(draws // size):
        mine = draws // size == epoch
        chosen[mine] = shuffled(draws[mine] % size, size, key + int(epoch) * 0x9E3779B97F4A7C15)
    return chosen


@dataclass(frozen=True)
class Sizes:
    """Number and length of the sequences of each step; the last entry of each serves all further steps.

    `batch_sizes`: of the first steps, then for good. `seq_lens`: likewise.
    """

    batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of a sample, as the order counts them; a step with shorter sequences splits samples."""
        return self.seq_lens[-1]

    def of_step(self, step: int) -> tuple[int, int]:
        """Number and length of the sequences of a step counted from 0."""
        return self.batch_sizes[min(step, len(self.batch_sizes) - 1)], self.seq_lens[min(step, len(self.seq_lens) - 1)]

    def samples_of_step(self, step: int) -> int:
        batch, length = self.of_step(step)
        return batch * length // self.longest

    def shapes(self) -> list[tuple[int, int]]:
        """The different (sequences, length), in the order of their first use."""
        changes = max(len(self.batch_sizes), len(self.seq_lens))
        return list(dict.fromkeys(map(self.of_step, range(changes))))

    def problems(self) -> list[str]:
        return [
            f"{batch} sequences of {length} tokens are not a multiple of samples of {self.longest}; choose "
            f"batch sizes that are multiples of {self.longest // np.gcd(length, self.longest)} there"
            for batch, length in self.shapes()
            if batch * length % self.longest
        ] + [
            f"a length of {length} does not divide the final {self.longest}"
            for length in sorted(set(self.seq_lens))
            if self.longest % length
        ]


def ramped_batch_sizes(
    start: int, increment: int, until: int, final: int, counted: Callable[[int], int] = lambda step: 1
) -> tuple[int, ...]:
    """Batch sizes that grow from `start` by `increment`, evenly over `until` sequences, to `final`.

    `counted`: what a sequence of a step counts; its tokens, if `until` is a number of tokens.
    Source: Megatron-LM --rampup-batch-size.

    Raises:
        ValueError: the growth is not a multiple of the increment.
    """
    if start < 1 or increment < 1 or until < 1 or start > final or (final - start) % increment:
        raise ValueError(f"{start} to {final} is not a multiple of {increment}")
    increments = (final - start) // increment
    sizes, seen = list[int](), 0
    while increments and (size := start + increment * (seen * increments // until)) < final:
        sizes.append(size)
        if len(sizes) > MAX_STEPS:
            raise ValueError(f"it takes more than {MAX_STEPS:,} steps")
        seen += size * counted(len(sizes) - 1)
    return (*sizes, final)


def growing_seq_lens(steps_of: Sequence[tuple[int, int]], final: int) -> tuple[int, ...]:
    """Lengths of the first steps: (length, steps) one after another, then `final`.

    Raises:
        ValueError: they do not grow.
    """
    lengths = [*(length for length, _ in steps_of), final]
    if any(a >= b for a, b in pairwise(lengths)) or any(length < 1 or steps < 1 for length, steps in steps_of):
        raise ValueError(f"lengths must grow up to {final}, each for at least one step")
    return (*(length for length, steps in steps_of for _ in range(steps)), final)


class Shares:
    """Numbers of samples of each dataset in the first steps: after any step, within a sample of its weight."""

    def __init__(self, weights: Sequence[float], sizes: Sizes):
        total = sum(weights)
        self.weights, self.sizes = np.array(weights) / total, sizes
        self._known = [np.zeros(len(weights), np.int64)]  # before every STRIDE-th step
        self._last = (0, self._known[0])

    def before(self, step: int) -> Ints:
        """Number of samples of each dataset in the steps before `step`."""
        at, drawn = self._last if self._last[0] <= step else (0, self._known[0])
        nearest = min(step // STRIDE, len(self._known) - 1)
        if nearest * STRIDE > at:
            at, drawn = nearest * STRIDE, self._known[nearest]
        remaining = range(at, step)
        for at in progress(remaining, "assigning samples") if len(remaining) > STRIDE else remaining:
            drawn = drawn + self._allocate(drawn, self.sizes.samples_of_step(at))
            if at + 1 == len(self._known) * STRIDE:
                self._known.append(drawn)
        self._last = (step, drawn)
        return drawn

    def _allocate(self, drawn: Ints, count: int) -> Ints:
        """Assign `count` more samples, so that each dataset comes as close to its weight as possible."""
        wanted = self.weights * (drawn.sum() + count) - drawn
        given = np.floor(np.maximum(wanted, 0)).astype(np.int64)
        while (missing := count - given.sum()) != 0:
            rest = wanted - given
            if missing > 0:
                given[np.argsort(-rest, kind="stable")[:missing]] += 1
            else:
                rest[given == 0] = np.inf
                given[np.argmin(rest)] -= 1
        return given
