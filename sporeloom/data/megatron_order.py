# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's order of samples, element for element: split, document, sample and shuffle index, and blends.

Source: Megatron-Core 0.16 megatron/core/datasets: gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py and
helpers.cpp. A "document" of its document index is one sequence of the index file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import document_positions
from sporeloom.data.indexed_file import IndexedFile

PARTS = ("train", "valid", "test")
SEPARATE_BELOW = 0.80
"""The last epoch is shuffled by itself where less than this fraction of it is used."""
SURPLUS = 0.005
"""Fraction of samples that the datasets of a blend have in reserve."""
PAD = -1
MAX_DATASETS = 32767


@dataclass(frozen=True)
class OrderSettings:
    """Settings of the order of one corpus."""

    sequence_length: int
    seed: int
    num_samples: int | None
    """Samples of the run; None: one epoch."""
    add_extra_token: bool = True
    """Whether a sample has one token more than its inputs, the last label; samples then overlap by a token."""
    drop_last_partial: bool = True
    """Whether the last tokens of the order, fewer than a sample, are left out."""


def split_ranges(split: str, num_sequences: int) -> list[range | None]:
    """Sequences of the training, validation and test part, as --split gives their weights; None: the part is empty.

    Raises:
        ConfigError: the text has no weights, or more than three.
    """
    weights = [float(number) for number in re.findall(r"\d+\.?\d*|\.\d+", split)]
    if not weights or len(weights) > len(PARTS) or not sum(weights):
        raise ConfigError(f"split {split!r}: give up to three weights, of training, validation and test, as 969,30,1")
    fractions = normalized([*weights, *[0.0] * (len(PARTS) - len(weights))])
    bounds = list(accumulate(fractions, initial=0.0))
    return [
        None if end <= start else range(round(start * float(num_sequences)), round(end * float(num_sequences)))
        for start, end in pairwise(bounds)
    ]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, in Megatron-LM's order of operations."""
    values = np.array(weights, np.float64)
    found: list[float] = (values / np.sum(values)).tolist()
    return found


class CorpusOrder:
    """Order of the samples of one part of one corpus.

    Args:
        lengths: (S,), numbers of tokens of all sequences of the corpus.
        part: numbers of the sequences that belong to the part.

    Raises:
        ConfigError: the part has no tokens.
    """

    def __init__(self, lengths: NDArray[np.int32], part: Sequence[int] | range, settings: OrderSettings):
        self.settings = settings
        sequences = np.array(part, np.int32)
        per_epoch = int(lengths[sequences].sum(dtype=np.int64))
        if not per_epoch:
            raise ConfigError("this part of the corpus has no tokens; give it a larger weight in split")
        self.epochs = self._num_epochs(per_epoch)
        before_last = self._num_whole((self.epochs - 1) * per_epoch)
        self.separate_final_epoch = self._is_last_apart(before_last, self._num_whole(per_epoch))
        random = np.random.RandomState(settings.seed)
        self.document_index = _document_index(sequences, self.epochs, random, self.separate_final_epoch)
        self.sample_index = self._sample_index(lengths, self.epochs * per_epoch)
        first = before_last if self.separate_final_epoch else len(self)
        self.shuffle_index = _shuffle_index(first, len(self), random)

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def _num_whole(self, num_tokens: int) -> int:
        return (num_tokens - self.settings.add_extra_token) // self.settings.sequence_length

    def _num_epochs(self, per_epoch: int) -> int:
        settings = self.settings
        if settings.num_samples is None:
            return 1
        wanted = settings.num_samples * settings.sequence_length + settings.add_extra_token
        return max(1, -(-wanted // per_epoch))

    def _is_last_apart(self, before_last: int, per_epoch: int) -> bool:
        if self.epochs == 1 or self.settings.num_samples is None:
            return False
        return self.settings.num_samples - before_last < int(SEPARATE_BELOW * per_epoch)

    def _sample_index(self, lengths: NDArray[np.int32], num_tokens: int) -> NDArray[Any]:
        """(N+1, 2): position in `document_index` and offset where each sample starts, and where the last ends."""
        extra, length = int(self.settings.add_extra_token), self.settings.sequence_length
        count = self._num_whole(num_tokens)
        if not self.settings.drop_last_partial:
            count = -(-(num_tokens - extra) // length)
            theirs = math.ceil(np.float32(num_tokens - extra) / np.float32(length))
            if count != theirs:
                raise ConfigError(
                    f"drop_last_partial_validation_sequence: Megatron-LM counts samples in float32 and gets {theirs} of "
                    f"{num_tokens} tokens, which have {count}; its order cannot be continued"
                )
        sizes = lengths[self.document_index].astype(np.int64)
        ends = np.cumsum(sizes)
        reached = np.minimum(np.arange(1, count + 1, dtype=np.int64) * length + extra, num_tokens)
        documents = np.searchsorted(ends, reached, "left")
        if len(reached) and count > self._num_whole(
            num_tokens
        ):  # the last sample is partial: it ends with the last document
            documents[-1] = len(sizes) - 1
        offsets = reached - extra - (ends - sizes)[documents]
        largest = max(len(sizes), int(lengths.max()))
        dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
        found = np.zeros((count + 1, 2), dtype)
        found[1:, 0], found[1:, 1] = documents, offsets
        return found

    def pieces(self, number: int) -> list[tuple[int, int, int | None]]:
        """Sequence, offset and number of tokens (None: all the others) of each piece of a sample."""
        sample = int(self.shuffle_index[number])
        (first, start), (last, end) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        extra = int(self.settings.add_extra_token)
        if first == last:
            return [(int(self.document_index[first]), start, end - start + extra)]
        return [
            (
                int(self.document_index[document]),
                start if document == first else 0,
                end + extra if document == last else None,
            )
            for document in range(first, last + 1)
        ]

    def text(self, corpus: IndexedFile, number: int, pad: int = PAD) -> NDArray[np.int64]:
        """Tokens of a sample, filled with `pad` where it is partial."""
        text = np.concatenate([corpus.sequence(*piece).astype(np.int64) for piece in self.pieces(number)])
        missing = self.settings.sequence_length + self.settings.add_extra_token - len(text)
        return np.concatenate([text, np.full(missing, pad, np.int64)])


def _document_index(
    sequences: NDArray[np.int32], epochs: int, random: np.random.RandomState, separate: bool
) -> NDArray[np.int32]:
    if separate and epochs > 1:
        others = _document_index(sequences, epochs - 1, random, False)
        return np.concatenate([others, _document_index(sequences, 1, random, False)])
    index = np.tile(sequences, epochs)
    random.shuffle(index)
    return index


def _shuffle_index(first: int, count: int, random: np.random.RandomState) -> NDArray[Any]:
    """Numbers below `first` shuffled, then the others shuffled."""
    dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(0, first, dtype=dtype), np.arange(first, count, dtype=dtype)]
    for part in parts[: 1 if first == count else 2]:
        random.shuffle(part)
    return np.concatenate(parts)


class GPTSample(NamedTuple):
    """Inputs of a sequence as Megatron-LM's GPTDataset returns them; each (L,) or (B, L)."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]


def gpt_sample(
    text: NDArray[np.int64],
    eod_id: int,
    add_extra_token: bool = True,
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
    pad: int = PAD,
) -> GPTSample:
    """Split the text of samples (B, L+1), or (B, L) without the extra token, into inputs and labels."""
    if add_extra_token:
        tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
    else:
        tokens, labels = text.copy(), np.roll(text, -1, axis=1)
        labels[:, -1] = pad
    mask = np.ones(tokens.shape, np.float32)
    if eod_mask_loss:
        mask[tokens == eod_id] = 0.0
    positions = document_positions(tokens, eod_id if reset_position_ids else None).astype(np.int64)
    mask[labels == pad] = 0.0
    tokens[tokens == pad], labels[labels == pad] = 0, 0
    return GPTSample(tokens, labels, mask, positions)


def samples_asked(size: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """Number of samples that a blend of `size` takes of each dataset, `surplus` more of each in reserve.

    `weights`: normalized. With `surplus=SURPLUS`, the number that Megatron-LM builds.
    """
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]


class Blend(NamedTuple):
    """Dataset of each sample of a blend, and the number of the sample in it; both (N,)."""

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


def blend_by_weights(weights: Sequence[float], size: int) -> Blend:
    """Blend `size` samples: each comes from the dataset that lacks most of its share, the first of equals."""
    shares, taken = normalized(weights), [0] * len(weights)
    blend = _empty_blend(size, len(weights))
    for sample in range(size):
        seen = max(float(sample), 1.0)
        errors = [share * seen - count for share, count in zip(shares, taken, strict=True)]
        _take(blend, sample, errors.index(max(errors)), taken)
    return blend


def blend_exhaustively(sizes: Sequence[int]) -> Blend:
    """Blend all samples of all datasets, in proportion to their sizes; a dataset that is used up takes no part."""
    total, taken = sum(sizes), [0] * len(sizes)
    blend, shares = _empty_blend(total, len(sizes)), [size / total for size in sizes]
    left = [dataset for dataset, size in enumerate(sizes) if size]
    for sample in range(total):
        seen = max(float(sample), 1.0)
        errors = [shares[dataset] * seen - taken[dataset] for dataset in left]
        dataset = left[errors.index(max(errors))]
        _take(blend, sample, dataset, taken)
        if taken[dataset] == sizes[dataset]:
            left.remove(dataset)
    return blend


def _empty_blend(size: int, num_datasets: int) -> Blend:
    if num_datasets >= MAX_DATASETS:
        raise ConfigError(f"{num_datasets} datasets; Megatron-LM blends fewer than {MAX_DATASETS}")
    return Blend(np.zeros(size, np.int16), np.zeros(size, np.int64))


def _take(blend: Blend, sample: int, dataset: int, taken: list[int]) -> None:
    blend.dataset_index[sample], blend.dataset_sample_index[sample] = dataset, taken[dataset]
    taken[dataset] += 1
