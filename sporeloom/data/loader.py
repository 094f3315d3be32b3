# SPDX-License-Identifier: Apache-2.0
"""The exact batch of any step, from a weighted blend of token files; read in the background, on each rank its own
rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sporeloom.data.batch import Batch, make_batch
from sporeloom.data.curriculum import Curriculum
from sporeloom.data.packing import Arrangement
from sporeloom.data.sample_order import Ints, Shares, Sizes, epoch_samples, shuffled
from sporeloom.data.token_file import TokenFile

T = TypeVar("T")


@dataclass(frozen=True)
class Dataset:
    """Token files and their weight in a blend."""

    name: str
    tokens: TokenFile
    weight: float
    ignored: Ints
    """Sorted positions of the tokens that are not trained on."""
    arrangement: Arrangement
    """Its samples."""
    offset: int = 0
    """Number added to its ids as a network gets them: its domain, see `HashRouter` of `sporeloom.nn.routing`."""


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step: dataset and sample of each row of the batch, on every rank."""

    datasets: Ints
    epochs: Ints
    samples: Ints


class Loader:
    """The batches of a run.

    Args:
        rows: of a batch of so many sequences, those this rank's graph will read; the others are left zero.
        curriculum: which samples a step draws of the one dataset there is.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        sizes: Sizes,
        seed: int,
        eod_id: int | None,
        loss_ignore_id: int | None,
        rows: Callable[[int], NDArray[np.int64]] = np.arange,
        curriculum: Curriculum | None = None,
    ):
        self.datasets, self.sizes, self.seed, self.rows = list(datasets), sizes, seed, rows
        self.eod_id, self.loss_ignore_id = eod_id, loss_ignore_id
        self.shares = Shares([dataset.weight for dataset in datasets], sizes)
        self.num_samples = [dataset.arrangement.num_samples for dataset in datasets]
        assert all(self.num_samples), self.num_samples
        self.curriculum = curriculum
        self._drawn_before = lru_cache(4)(lambda step: int(self.shares.before(step).sum()))

    def drawn(self, step: int) -> StepSamples:
        """Draw the samples of `step`, counted from 0: a function of seed and step alone."""
        before = self.shares.before(step)
        counts = self.shares.before(step + 1) - before
        datasets = np.repeat(np.arange(len(counts)), counts)
        epochs = np.concatenate(
            [np.arange(n, n + c) // size for n, c, size in zip(before, counts, self.num_samples, strict=True)]
        )
        if self.curriculum:  # which starts anew with each difficulty, so there are no epochs of the dataset
            samples = self.curriculum.draws(step, self._drawn_before, int(counts[0]))
            return self._mixed(step, datasets, np.zeros_like(samples), samples)
        samples = np.concatenate(
            [
                epoch_samples(int(first), int(count), size, self._key(dataset.tokens.info.content))
                for dataset, first, count, size in zip(self.datasets, before, counts, self.num_samples, strict=True)
            ]
        )
        return self._mixed(step, datasets, epochs, samples)

    def _mixed(self, step: int, datasets: Ints, epochs: Ints, samples: Ints) -> StepSamples:
        """Shuffle, so that the order does not depend on the dataset of a sample."""
        mixed = shuffled(np.arange(len(datasets)), len(datasets), self._key(f"step {step}"))
        return StepSamples(datasets[mixed], epochs[mixed], samples[mixed])

    def sample_ids(self, step: int) -> dict[str, list[int]]:
        """Dataset, epoch and sample of each row of `step`, on every rank."""
        drawn = self.drawn(step)
        return {name: getattr(drawn, name).tolist() for name in ("datasets", "epochs", "samples")}

    def samples(self, step: int) -> NDArray[np.int32]:
        """Tokens of `step`, (B, T+1), in the rows of this rank."""
        return self._read(step, self.drawn(step))[0]

    def _read(self, step: int, drawn: StepSamples) -> tuple[NDArray[np.int32], Ints]:
        """Tokens of this rank's rows, (B, T+1), and how many of each row are not padding."""
        batch, length = self.sizes.of_step(step)
        tokens, counts = np.zeros((batch, length + 1), np.int32), np.zeros(batch, np.int64)
        for row in self.rows(batch):
            number, part = divmod(int(row), self.sizes.longest // length)
            source = self.datasets[drawn.datasets[number]].tokens
            pieces = self._pieces(drawn, number)
            sample = np.concatenate([source.tokens[start:stop] for start, stop in pieces])
            sample = sample[part * length : (part + 1) * length + 1]
            tokens[row, : len(sample)], tokens[row, len(sample) :] = sample, source.info.eod_id
            counts[row] = len(sample)
        return tokens, counts

    def _pieces(self, drawn: StepSamples, number: int) -> Ints:
        arrangement = self.datasets[drawn.datasets[number]].arrangement
        return arrangement.pieces(int(drawn.epochs[number]), int(drawn.samples[number]))

    def source(self, step: int, row: int) -> tuple[Dataset, Ints]:
        """Dataset of a row of `step`, and the parts of its token file that the row is made of, its last label
        included: (n, 2), starts and ends."""
        drawn, length = self.drawn(step), self.sizes.of_step(step)[1]
        number, part = divmod(row, self.sizes.longest // length)
        pieces = self._pieces(drawn, number)
        lengths = pieces[:, 1] - pieces[:, 0]
        before = np.cumsum(lengths) - lengths
        window = part * length, (part + 1) * length + 1
        starts, stops = (pieces[:, 0] + np.clip(place - before, 0, lengths) for place in window)
        return self.datasets[drawn.datasets[number]], np.stack([starts, stops], axis=1)[starts < stops]

    def batch(self, step: int) -> Batch:
        """Inputs of `step`; the loss weights count the global batch, also where only some rows are read."""
        drawn = self.drawn(step)
        tokens, counts = self._read(step, drawn)
        batch = make_batch(tokens, self.eod_id, self.loss_ignore_id, self._num_trained(drawn), counts)
        offsets = np.array([dataset.offset for dataset in self.datasets], np.int32)[drawn.datasets]
        return batch._replace(tokens=batch.tokens + np.repeat(offsets, len(tokens) // len(offsets))[:, None])

    def first_token(self, step: int) -> int:
        """Number of tokens that the steps before `step` have trained on."""
        return int(self.shares.before(step).sum()) * self.sizes.longest

    def epochs(self, step: int) -> list[float]:
        """Epochs of each dataset in the steps before `step`."""
        return [float(n) / size for n, size in zip(self.shares.before(step), self.num_samples, strict=True)]

    def describe(self, steps: int) -> str:
        """Describe the data that a run of this many steps reads."""
        return "data: " + "; ".join(
            f"{dataset.name} {weight:.1%}, {passes:.2f} epochs of {size:,} sequences"
            + (f" ({told})" if (told := dataset.arrangement.describe()) else "")
            for dataset, weight, passes, size in zip(
                self.datasets, self.shares.weights, self.epochs(steps), self.num_samples, strict=True
            )
        )

    def data_state(self) -> dict[str, Any]:
        """Return the settings that must be the same when the run is resumed."""
        return {
            "datasets": [
                f"{d.tokens.info.content[:16]} x {d.weight:.6g}" + (f" + {d.offset}" if d.offset else "")
                for d in self.datasets
            ],
            "curriculum": self.curriculum and self.curriculum.state(),
        }

    def _num_trained(self, drawn: StepSamples) -> int:
        """Number of tokens of a step that are trained on: inputs but those that are ignored."""
        count = 0
        for number, dataset in enumerate(drawn.datasets):
            pieces, ignored = self._pieces(drawn, number), self.datasets[dataset].ignored
            begins, stops = pieces[:, 0], pieces[:, 1].copy()
            stops[-1] -= 1  # the last token is not an input
            count += int((stops - begins).sum())
            if len(ignored):
                count -= int((ignored.searchsorted(stops) - ignored.searchsorted(begins)).sum())
        return count

    def _key(self, of: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed} {of}".encode()).digest()[:8], "big")


class Prefetcher(Generic[T]):
    """Calls `make(step)` for one step after another, ahead, in a thread."""

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
    """Rows of a batch that the graph of a data-parallel rank takes: its rows of each microbatch."""

    def rows(batch: int) -> NDArray[np.int64]:
        return np.arange(batch).reshape(microbatches, dp, -1)[:, dp_rank].reshape(-1)

    return rows
