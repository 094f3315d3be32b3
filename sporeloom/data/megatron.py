# SPDX-License-Identifier: Apache-2.0
"""Train on Megatron-LM's indexed files in Megatron-LM's own order of samples, so that its runs can be continued here.

format: megatron
data_path: [corpora/books_text_document, corpora/code_text_document]     # relative to this file, without .bin and .idx
weights: [0.3, 0.7]                # without weights: in proportion to the corpora's samples, one epoch of each
split: 969,30,1
seed: 1234
num_samples: 64000                 # of the original run: its steps times its global batch size
consumed_samples: 12800            # before the first step of this run
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.numbers import Amount, Natural, NotNegative, Share
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.data.batch import Batch
from sporeloom.data.blend import BLENDS
from sporeloom.data.indexed_file import IndexedFile
from sporeloom.data.megatron_order import (
    PAD,
    PARTS,
    Blend,
    CorpusOrder,
    OrderSettings,
    blend_by_weights,
    blend_exhaustively,
    gpt_sample,
    normalized,
    samples_asked,
    split_ranges,
)
from sporeloom.data.sample_order import Sizes


@dataclass(frozen=True)
class MegatronConfig:
    """Contents of a file with `format: megatron`; names and defaults are Megatron-LM's."""

    format: Literal["megatron"]
    data_path: tuple[str, ...]
    """Common name of the .bin and .idx file of each corpus."""
    weights: tuple[NotNegative, ...] | None = None
    split: str | Natural = "969,30,1"
    """Weights of the training, validation and test part of each corpus."""
    part: Literal["train", "valid", "test"] = "train"
    seed: Natural = 1234
    num_samples: Amount | None = None
    """Samples of the original run, all its steps; None: those of this run and `consumed_samples`."""
    consumed_samples: Amount = 0
    """Samples that were trained on before the first step of this run."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    """Whether predictions from an end-of-document token are not trained on."""
    add_extra_token_to_sequence: bool = True
    drop_last_partial_validation_sequence: bool = True
    mid_level_dataset_surplus: Share = 0.005
    pad_id: int = PAD
    """Token that fills partial samples; it is not trained on."""

    def __post_init__(self) -> None:
        problems = list[str]()
        if not self.data_path:
            problems.append("data_path is empty: name at least one corpus")
        if self.weights is not None and (len(self.weights) != len(self.data_path) or not sum(self.weights)):
            problems.append(
                f"weights has {len(self.weights)} entries for {len(self.data_path)} corpora, or none above 0"
            )
        if self.reset_position_ids != self.reset_attention_mask:
            problems.append(
                "reset_position_ids and reset_attention_mask: positions and attention restart together here; "
                "set both or neither"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def is_blend(self) -> bool:
        """Whether samples are those of a blend; one corpus without weights is none."""
        return len(self.data_path) > 1 or self.weights is not None


@dataclass(frozen=True)
class MegatronData:
    """A file with `format: megatron` and its corpora."""

    path: Path
    config: MegatronConfig
    files: tuple[IndexedFile, ...]


def is_megatron(path: Path) -> bool:
    """Whether a .yaml file describes Megatron-LM's data; other ones are blends of token files."""
    if path.suffix not in BLENDS:
        return False
    value = read_yaml(path).value
    return isinstance(value, dict) and "format" in value


def read_megatron(path: Path) -> MegatronData:
    """Read a file with `format: megatron` and open its corpora.

    Raises:
        ConfigError: everything that is wrong with the file and the corpora that it names.
    """
    config, problems = fields_from(MegatronConfig, read_yaml(path)), Problems()
    files = [problems.of(IndexedFile, path.parent / prefix) for prefix in config.data_path]
    problems += [found for file in files if file and (found := file.text_problem())]
    problems.of(split_ranges, str(config.split), 1)
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    return MegatronData(path, config, tuple(file for file in files if file))


class MegatronLoader:
    """The batches of a run, in Megatron-LM's order: step after step, the next samples of the data set.

    Args:
        rows: of a batch of so many sequences, those this rank's graph will read; the others are left zero.
        steps: of the run.

    Raises:
        ConfigError: a part of a corpus is empty, or the run needs more samples than there are.
    """

    def __init__(
        self,
        data: MegatronData,
        sizes: Sizes,
        steps: int,
        eod_id: int,
        vocab_size: int,
        rows: Callable[[int], NDArray[np.int64]] = np.arange,
    ):
        self.data, self.config, self.sizes, self.rows = data, data.config, sizes, rows
        self.eod_id, self.vocab_size = eod_id, vocab_size
        self._first = np.cumsum((0, *sizes.batch_sizes[:-1]))  # samples before each step of a ramp
        needed = self.first_sample(steps)
        self.num_samples = needed if self.config.num_samples is None else self.config.num_samples
        self.orders, self.blend = self._build()
        self.size = len(self.blend.dataset_index) if self.blend else len(self.orders[0])
        if needed > self.size:
            raise ConfigError(
                f"{data.path}: the run's steps need samples up to number {needed:,}, the data set has {self.size:,}; lower "
                "--steps, or raise num_samples if the original run had more"
            )

    def _build(self) -> tuple[list[CorpusOrder], Blend | None]:
        config, problems = self.config, Problems()
        weights = None if config.weights is None else normalized(config.weights)
        asked: Sequence[int | None] = [self.num_samples if not config.is_blend else None] * len(config.data_path)
        if weights is not None:
            asked = samples_asked(self.num_samples, weights, config.mid_level_dataset_surplus)
        orders = [problems.of(self._order, file, count) for file, count in zip(self.data.files, asked, strict=True)]
        if problems:
            raise ConfigError(problems)
        built = [order for order in orders if order]
        if not config.is_blend:
            return built, None
        return built, self._blended(weights, [len(order) for order in built])

    def _blended(self, weights: list[float] | None, built: list[int]) -> Blend:
        if weights is None:
            size = min(self.num_samples, sum(built))
            blend = blend_by_weights(built, size) if size else blend_exhaustively(built)
        else:
            blend = blend_by_weights(weights, sum(samples_asked(self.num_samples, weights)))
        for number, count in enumerate(np.bincount(blend.dataset_index, minlength=len(built))):
            if count > built[number]:
                raise ConfigError(
                    f"{self.data.path}: the blend takes {count} samples of {self.config.data_path[number]}, which has "
                    f"{built[number]}; raise mid_level_dataset_surplus"
                )
        return blend

    def _order(self, file: IndexedFile, num_samples: int | None) -> CorpusOrder:
        config = self.config
        part = split_ranges(str(config.split), len(file.lengths))[PARTS.index(config.part)]
        settings = OrderSettings(
            self.sizes.longest,
            config.seed,
            num_samples,
            config.add_extra_token_to_sequence,
            config.drop_last_partial_validation_sequence or config.part != "valid",
        )
        try:
            return CorpusOrder(file.lengths, part or range(0), settings)
        except ConfigError as error:
            raise ConfigError(f"{self.data.path}: {file.prefix}: {problem}" for problem in error.problems) from None

    def first_sample(self, step: int) -> int:
        """Number of the first sample of `step`, counted from 0, in the data set."""
        ramp = min(step, len(self._first) - 1)
        return self.config.consumed_samples + int(self._first[ramp]) + (step - ramp) * self.sizes.batch_sizes[-1]

    def sample_ids(self, step: int) -> list[int]:
        """Numbers of the samples of `step` in the data set."""
        return list(range(self.first_sample(step), self.first_sample(step + 1)))

    def first_token(self, step: int) -> int:
        """Number of tokens that were trained on before `step`, those of the original run included."""
        return self.first_sample(step) * self.sizes.longest

    def text(self, sample: int) -> NDArray[np.int64]:
        """Tokens of a sample of the data set, (T+1,), or (T,) without the extra token.

        Raises:
            ConfigError: it has a token that the model has not.
        """
        dataset = 0
        if self.blend:
            dataset, sample = int(self.blend.dataset_index[sample]), int(self.blend.dataset_sample_index[sample])
        file = self.data.files[dataset]
        text = self.orders[dataset].text(file, sample, self.config.pad_id)
        wrong = text[((text < 0) | (text >= self.vocab_size)) & (text != self.config.pad_id)]
        if len(wrong):
            raise ConfigError(
                f"{file.prefix}: sample {sample} has token {wrong[0]}, outside 0 .. {self.vocab_size - 1}, the model's "
                "vocabulary; loss mask bits of packed conversations are not supported"
            )
        return text

    def batch(self, step: int) -> Batch:
        """Inputs of `step`; the loss weights count the global batch, also where only some rows are read."""
        (batch, length), first, config = self.sizes.of_step(step), self.first_sample(step), self.config
        mine = self.rows(batch)
        is_uniform = not config.eod_mask_loss and config.drop_last_partial_validation_sequence and config.pad_id < 0
        rows = mine if is_uniform else np.arange(batch)
        sample = gpt_sample(
            np.stack([self.text(first + int(row)) for row in rows]),
            self.eod_id,
            config.add_extra_token_to_sequence,
            config.reset_position_ids,
            config.eod_mask_loss,
            config.pad_id,
        )
        total = batch * (length - (not config.add_extra_token_to_sequence)) if is_uniform else sample.loss_mask.sum()
        kept = np.isin(rows, mine)
        shape, weights = (batch, length), sample.loss_mask.astype(np.float64) / (float(total) + 1e-5)
        arrays = [
            _at_rows(values[kept].astype(dtype), rows[kept], shape)
            for values, dtype in zip(
                (*sample[:2], sample.position_ids, weights), (*[np.int32] * 3, np.float32), strict=True
            )
        ]
        return Batch(*arrays)

    def describe(self, steps: int) -> str:
        """Describe the data that a run of this many steps reads."""
        config = self.config
        first, last = self.first_sample(0), self.first_sample(steps) - 1
        corpora = "; ".join(
            f"{prefix} {len(order):,} sequences of {order.epochs} epochs"
            for prefix, order in zip(config.data_path, self.orders, strict=True)
        )
        return f"data: samples {first:,} to {last:,} of {self.size:,} in Megatron-LM's order: {corpora}"

    def data_state(self) -> dict[str, Any]:
        """Return the settings that must be the same when the run is resumed."""
        settings = {**vars(self.config), "num_samples": self.num_samples}
        del settings["data_path"]  # which may have moved; what it holds must not change
        text = repr(sorted(settings.items()))
        return {
            "datasets": [file.content[:16] for file in self.data.files],
            "megatron": hashlib.sha256(text.encode()).hexdigest()[:16],
            "num_samples": self.num_samples,
            "consumed_samples": self.config.consumed_samples,
        }


def _at_rows(values: NDArray[Any], rows: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[Any]:
    """Array of this shape with `values` in its rows, zero elsewhere."""
    found = np.zeros(shape, values.dtype)
    found[rows] = values
    return found
