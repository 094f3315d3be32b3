# SPDX-License-Identifier: Apache-2.0
"""Curriculum learning by a difficulty metric: the difficulty of each sample, and the samples that each step may
use.

Source: arXiv:2206.03688 and 2212.03597; words and schedules are those of DeepSpeed's `curriculum_learning`. A file says it:

    index: rarity.npz                # of `sporeloom preprocess difficulty`, relative to this file
    difficulty_type: percentile      # of the samples, easiest first; or value: of the metric itself
    min_difficulty: 5
    max_difficulty: 100
    schedule_type: fixed_root        # or fixed_linear, fixed_discrete
    schedule_config: {total_curriculum_step: 1000, difficulty_step: 5, root_degree: 2}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.core import elementary
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.core.numbers import Count, NotNegative, Positive
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.data.arrays import read_arrays
from sporeloom.data.packing import Arrangement, Packing
from sporeloom.data.sample_order import Ints, epoch_samples
from sporeloom.data.token_file import TokenFile

Metric = Literal["vocabularyrarity", "seqlen", "loss"]
AT_ONCE = 16
"""Number of samples whose loss is computed together."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Schedule of the difficulty."""

    total_curriculum_step: Count = 1
    difficulty_step: Positive = 1.0
    """The difficulty is a multiple of this."""
    root_degree: Count = 2
    """Root degree of fixed_root."""
    difficulty: tuple[NotNegative, ...] = ()
    """Difficulties of fixed_discrete, one after the other."""
    max_step: tuple[Count, ...] = ()
    """Last step of each difficulty of fixed_discrete but the last."""


@dataclass(frozen=True)
class CurriculumConfig:
    """The contents of a curriculum file."""

    index: str
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"]
    schedule_config: ScheduleConfig
    min_difficulty: NotNegative = 0.0
    max_difficulty: NotNegative = 100.0
    difficulty_type: Literal["value", "percentile"] = "percentile"

    def __post_init__(self) -> None:
        problems, schedule = [], self.schedule_config
        if self.schedule_type == "fixed_discrete":
            levels, ends = schedule.difficulty, schedule.max_step
            if not levels or len(levels) != len(ends) + 1:
                problems.append(
                    "schedule_config: fixed_discrete needs `difficulty`, and `max_step` with one entry less"
                )
            if [*levels] != sorted(levels) or [*ends] != sorted(ends):
                problems.append("schedule_config: difficulty and max_step must not fall")
        elif self.min_difficulty > self.max_difficulty:
            problems.append(f"min_difficulty {self.min_difficulty:g} is above max_difficulty {self.max_difficulty:g}")
        if self.difficulty_type == "percentile" and self.highest > 100:
            problems.append(f"a difficulty of {self.highest:g} percent of the samples; at most 100")
        if problems:
            raise ConfigError(problems)

    @property
    def highest(self) -> float:
        discrete = self.schedule_type == "fixed_discrete"
        return max(self.schedule_config.difficulty, default=0.0) if discrete else self.max_difficulty

    def difficulty(self, step: int) -> float:
        """Difficulty of a step counted from 1; it never falls."""
        schedule = self.schedule_config
        if self.schedule_type == "fixed_discrete":
            return schedule.difficulty[bisect_left(schedule.max_step, step)]
        degree = 1 if self.schedule_type == "fixed_linear" else schedule.root_degree
        part = (step / schedule.total_curriculum_step) ** (1 / degree)
        value = math.floor(part * (self.max_difficulty - self.min_difficulty) + self.min_difficulty)
        return min(value - value % schedule.difficulty_step, self.max_difficulty)


def read_curriculum(path: Path) -> CurriculumConfig:
    """Raises:
    ConfigError: what is wrong with the file.
    """
    return fields_from(CurriculumConfig, read_yaml(path))


@dataclass(frozen=True)
class DifficultyIndex:
    """Difficulty of each sample of a dataset."""

    metric: str
    seq_len: int
    packing: str
    content: str
    """Hash of the token files."""
    values: NDArray[np.float64]

    def save(self, path: Path) -> None:
        about = {name: value for name, value in vars(self).items() if name != "values"}

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.savez(file, values=self.values, about=np.array(json.dumps(about)))

        write_atomically(path, write)

    @classmethod
    def read(cls, path: Path) -> DifficultyIndex:
        """Raises:
        ConfigError: it is none.
        """
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file; make it with sporeloom preprocess difficulty")
        try:
            about, values = read_arrays(path, "about", "values")
            return cls(**json.loads(str(about)), values=values)
        except (ConfigError, ValueError, TypeError):
            raise ConfigError(f"{path}: not what sporeloom preprocess difficulty writes") from None


class Curriculum:
    """The samples of a run with one dataset, as a function of the step.

    While the difficulty stays the same its samples, the pool, are drawn epoch after epoch, each in an order of its own; with
    each new difficulty this begins anew, with more samples.
    """

    def __init__(self, config: CurriculumConfig, index: DifficultyIndex, seed: int):
        self.config, self._seed, values = config, seed, index.values
        self.order = np.lexsort((np.arange(len(values)), values))
        """The samples, easiest first."""
        self._sorted = values[self.order]
        self._identity = hashlib.sha256(values.tobytes()).hexdigest()[:16]

    def pool(self, step: int) -> int:
        """Number of the easiest samples that a step counted from 0 uses."""
        difficulty, count = self.config.difficulty(step + 1), len(self.order)
        if self.config.difficulty_type == "value":
            return int(np.searchsorted(self._sorted, difficulty, "right"))
        return int(count * difficulty / 100)

    def problems(self) -> Iterator[str]:
        if not self.pool(0):
            first = self.config.difficulty(1)
            yield f"{self.config.index}: no sample is within the first difficulty, {first:g}; raise min_difficulty"

    def draws(self, step: int, before: Callable[[int], int], count: int) -> Ints:
        """The samples of a step counted from 0. `before`: number of samples that the steps before one have used."""
        pool = self.pool(step)
        begun = bisect_left(range(step + 1), pool, key=self.pool)
        key = hashlib.sha256(f"{self._seed} pool {pool}".encode()).digest()
        places = epoch_samples(before(step) - before(begun), count, pool, int.from_bytes(key[:8], "big"))
        return self.order[places]

    def state(self) -> dict[str, Any]:
        """Settings that must be the same when a run is resumed."""
        return {**dataclasses.asdict(self.config), "index": self._identity}


def sample_lengths(arrangement: Arrangement) -> NDArray[np.float64]:
    """Number of tokens of each sample without padding."""
    pieces = (arrangement.pieces(0, sample) for sample in range(arrangement.num_samples))
    return np.array([float((part[:, 1] - part[:, 0]).sum()) for part in pieces])


def vocabulary_rarity(tokens: TokenFile, arrangement: Arrangement) -> NDArray[np.float64]:
    """-sum of log p of a sample's tokens, with p the share of a token in the whole dataset."""
    counts, step = np.zeros(tokens.info.vocab_size, np.int64), 1 << 24
    for start in range(0, tokens.info.num_tokens, step):
        counts += np.bincount(tokens.tokens[start : start + step], minlength=len(counts))
    rarity = -elementary.log(np.maximum(counts, 1) / counts.sum())
    return np.array([float(rarity[sample].sum()) for sample in _samples(tokens, arrangement)])


def loss_by(
    tokens: TokenFile,
    arrangement: Arrangement,
    seq_len: int,
    ignored: int | None,
    losses: Callable[[NDArray[Any]], NDArray[Any]],
) -> NDArray[np.float64]:
    """Mean loss of each sample over the trained tokens: not those after the token `ignored`. `losses`: maps token
    ids (B, T+1) to the losses of the T that follow another, (B, T)."""
    found = []
    for sample in _batches(_samples(tokens, arrangement), AT_ONCE):
        rows = np.full((len(sample), seq_len + 1), tokens.info.eod_id, np.int64)
        for row, ids in zip(rows, sample, strict=True):
            row[: len(ids)] = ids
        counted = np.arange(seq_len) < np.array([len(ids) - 1 for ids in sample])[:, None]
        counted &= rows[:, :-1] != ignored
        found.append((losses(rows) * counted).sum(1) / np.maximum(1, counted.sum(1)))
    return np.concatenate(found).astype(np.float64)


def _samples(tokens: TokenFile, arrangement: Arrangement) -> Iterator[NDArray[Any]]:
    for sample in range(arrangement.num_samples):
        yield np.concatenate([tokens.tokens[start:stop] for start, stop in arrangement.pieces(0, sample)])


def _batches(items: Iterator[NDArray[Any]], size: int) -> Iterator[list[NDArray[Any]]]:
    batch: list[NDArray[Any]] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def check_index(path: Path, index_path: Path, seq_len: int, packing: Packing, content: str) -> DifficultyIndex:
    """Read the index of a curriculum and check it against the data of a run.

    Raises:
        ConfigError: it is of other samples.
    """
    index = DifficultyIndex.read(index_path)
    given = {"seq_len": seq_len, "packing": packing, "content": content}
    if problems := [
        f"{path}: {index_path} is of {name.replace('_', ' ')} {getattr(index, name)}, the run's is {value}"
        for name, value in given.items()
        if getattr(index, name) != value
    ]:
        raise ConfigError(problems)
    return index
