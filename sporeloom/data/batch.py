# SPDX-License-Identifier: Apache-2.0
"""Token samples (B, T+1) -> inputs of a training network: tokens, labels, positions, loss weights."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.models.config import NO_LABEL


class Batch(NamedTuple):
    """Four (B, T) arrays, in the order of `DecoderWithLoss.construct`; labels are `NO_LABEL` where there is padding."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    loss_weights: NDArray[np.float32]


def document_positions(tokens: NDArray[np.integer[Any]], eod_id: int | None) -> NDArray[np.int32]:
    """Position of each token in its document, (B, T); the end-of-document token is the last of its document.

    Source: PanGu-alpha src/dataset.py get_input_data_batch_slice_map (`eod_reset`). None: one document a row.
    """
    index = np.arange(tokens.shape[1], dtype=np.int32)
    if eod_id is None:
        return np.broadcast_to(index, tokens.shape).copy()
    starts = np.zeros(tokens.shape, np.int32)
    starts[:, 1:] = np.where(tokens[:, :-1] == eod_id, index[1:], 0)
    return index - np.maximum.accumulate(starts, axis=1)


def make_batch(
    samples: NDArray[np.integer[Any]],
    eod_id: int | None,
    loss_ignore_id: int | None,
    num_trained: int | None = None,
    counts: NDArray[np.int64] | None = None,
) -> Batch:
    """Split samples (B, T+1) into inputs and labels, with `mask / (sum(mask) + 1e-5)` as loss weights.

    The mask is off where the INPUT token is `loss_ignore_id`, as in the originals; None trains on every position.
    `num_trained`: sum(mask) of the global batch, where `samples` has only some rows of it. `counts`: tokens of each row that
    are not padding; without it, all.
    """
    tokens, labels = samples[:, :-1].astype(np.int32), samples[:, 1:].astype(np.int32)
    mask = (
        np.ones(tokens.shape, np.float64) if loss_ignore_id is None else (tokens != loss_ignore_id).astype(np.float64)
    )
    if counts is not None:
        has_label = np.arange(tokens.shape[1]) < counts[:, None] - 1
        mask, labels = mask * has_label, np.where(has_label, labels, np.int32(NO_LABEL))
    total = mask.sum() if num_trained is None else num_trained
    weights = (mask / (total + 1e-5)).astype(np.float32)
    return Batch(tokens, labels, document_positions(tokens, eod_id), weights)


def mtp_targets(batch: Batch, depths: int) -> list[NDArray[Any]]:
    """Labels and loss weights (B, T) of each depth of multi-token prediction, one after the other.

    Depth d predicts the token d + 1 positions on, where its position d tokens on is trained on and of the same document.
    Weights are T / (T - d) times those of these positions: the mean over its own targets, where rows are one document each.
    """
    result: list[NDArray[Any]] = []
    length = batch.tokens.shape[1]
    for depth in range(1, depths + 1):
        labels, weights = np.full_like(batch.labels, NO_LABEL), np.zeros_like(batch.loss_weights)
        ahead = length - depth
        if ahead > 0:
            same = batch.positions[:, depth:] == batch.positions[:, :ahead] + depth
            labels[:, :ahead] = np.where(same, batch.labels[:, depth:], NO_LABEL)
            weights[:, :ahead] = batch.loss_weights[:, depth:] * same * np.float32(length / ahead)
        result += [labels, weights]
    return result


def dropout_keys(seed: int, first_token: int, shape: tuple[int, int]) -> NDArray[np.int32]:
    """(B, T): a random number for each token of a batch, a function only of the seed and the token's position in
    the run.

    `first_token`: how many tokens the run saw before this batch. Source of the mixing: SplitMix64 (Steele et al., 2014).
    """
    (start,) = split_mix(np.array([seed % 2**64], np.uint64))  # far apart, also for seeds that are neighbours
    places = np.arange(shape[0] * shape[1], dtype=np.uint64) + np.uint64(first_token)
    return (split_mix(places + start) >> np.uint64(32)).astype(np.uint32).view(np.int32).reshape(shape)


def split_mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers with results that look random."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
