# SPDX-License-Identifier: Apache-2.0
"""The exact batch of any step, from a weighted blend of token files; read in the background, each rank its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mindloom.data.batch import Batch, make_batch
from mindloom.data.sample_order import Ints, Shares, Sizes, epoch_samples, shuffled
from mindloom.data.token_file import TokenFile

T = TypeVar("T")


@dataclass(frozen=True)
class Dataset:
    """Token files and their part in a blend."""

    name: str
    tokens: TokenFile
    weight: float
    ignored: Ints
    """Sorted places of the tokens that are not trained on."""


@dataclass(frozen=True)
class Drawn:
    """Where the samples of a step come from; all of them, on every rank."""

    datasets: Ints
    samples: Ints


class Loader:
    """Batches of a run.

    Args:
        rows: of a batch of so many sequences, those this rank's graph will read; the others are left zero.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        sizes: Sizes,
        seed: int,
        eod_id: int | None,
        loss_ignore_id: int | None,
        rows: Callable[[int], NDArray[np.int64]] = np.arange,
    ):
        self.datasets, self.sizes, self.seed, self.rows = list(datasets), sizes, seed, rows
        self.eod_id, self.loss_ignore_id = eod_id, loss_ignore_id
        self.shares = Shares([dataset.weight for dataset in datasets], sizes)
        self.num_samples = [dataset.tokens.num_samples(sizes.longest) for dataset in datasets]
        assert all(self.num_samples), self.num_samples

    def drawn(self, step: int) -> Drawn:
        """The samples of `step`, counted from 0: a function of seed and step alone."""
        before = self.shares.before(step)
        counts = self.shares.before(step + 1) - before
        datasets = np.repeat(np.arange(len(counts)), counts)
        samples = np.concatenate(
            [
                epoch_samples(int(first), int(count), size, self._key(dataset.tokens.info.content))
                for dataset, first, count, size in zip(self.datasets, before, counts, self.num_samples, strict=True)
            ]
        )
        mixed = shuffled(np.arange(len(datasets)), len(datasets), self._key(f"step {step}"))
        return Drawn(datasets[mixed], samples[mixed])

    def samples(self, step: int) -> NDArray[np.int32]:
        """Tokens of `step`, (B, T+1), in the rows of this rank."""
        return self._read(step, self.drawn(step))

    def _read(self, step: int, drawn: Drawn) -> NDArray[np.int32]:
        batch, length = self.sizes.of_step(step)
        tokens = np.zeros((batch, length + 1), np.int32)
        for row in self.rows(batch):
            sample, part = divmod(int(row), self.sizes.longest // length)
            source = self.datasets[drawn.datasets[sample]].tokens
            start = source.start(int(drawn.samples[sample]), self.sizes.longest) + part * length
            tokens[row] = source.tokens[start : start + length + 1]
        return tokens

    def batch(self, step: int) -> Batch:
        """Inputs of `step`; the loss weights count the whole batch, also where only some rows are read."""
        drawn = self.drawn(step)
        return make_batch(self._read(step, drawn), self.eod_id, self.loss_ignore_id, self._num_trained(drawn))

    def first_token(self, step: int) -> int:
        """How many tokens the steps before `step` have trained on."""
        return int(self.shares.before(step).sum()) * self.sizes.longest

    def epochs(self, step: int) -> list[float]:
        """How often the steps before `step` have been through each dataset."""
        return [float(n) / size for n, size in zip(self.shares.before(step), self.num_samples, strict=True)]

    def _num_trained(self, drawn: Drawn) -> int:
        longest, ignored = self.sizes.longest, 0
        for number, dataset in enumerate(self.datasets):
            mine = drawn.samples[drawn.datasets == number]
            starts = mine * dataset.tokens.start(1, longest)
            ignored += int(
                (dataset.ignored.searchsorted(starts + longest) - dataset.ignored.searchsorted(starts)).sum()
            )
        return len(drawn.samples) * longest - ignored

    def _key(self, of: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed} {of}".encode()).digest()[:8], "big")


class Prefetched(Generic[T]):
    """`make(step)` for one step after another, made ahead in a thread."""

    def __init__(self, make: Callable[[int], T], end: int, ahead: int = 2):
        self._make, self._end, self._ahead = make, end, ahead
        self._thread = ThreadPoolExecutor(1, "loader")
        self._pending: dict[int, Future[T]] = {}

    def get(self, step: int) -> T:
        wanted = range(step, min(step + 1 + self._ahead, max(self._end, step + 1)))
        for dropped in self._pending.keys() - set(wanted):
            self._pending.pop(dropped).cancel()
        for number in wanted:
            if number not in self._pending:
                self._pending[number] = self._thread.submit(self._make, number)
        return self._pending.pop(step).result()


def rows_of_rank(dp: int, dp_rank: int, microbatches: int) -> Callable[[int], NDArray[np.int64]]:
    """Which rows of a batch the graph of a data-parallel rank takes: its part of each microbatch."""

    def rows(batch: int) -> NDArray[np.int64]:
        return np.arange(batch).reshape(microbatches, dp, -1)[:, dp_rank].reshape(-1)

    return rows
