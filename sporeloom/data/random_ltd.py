# SPDX-License-Identifier: Apache-2.0
"""Random layerwise token dropping (random-LTD): the tokens of each sequence that the middle layers process.

Source: arXiv:2211.11586; words and schedule are those of DeepSpeed's `data_efficiency.data_routing.random_ltd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.data.batch import split_mix
from sporeloom.data.sample_order import Ints, Sizes


@dataclass(frozen=True)
class RandomLTD:
    """Schedule of the number of tokens that the layers in `layers` process: `min_value` at first, all of `max_value`
    after `require_steps`, and multiples of `seq_per_step` between."""

    layers: tuple[int, ...]
    """Numbers of the layers among the model's plain layers, counted from 0."""
    num_layers: int
    """Number of layers of the model."""
    min_value: int
    max_value: int
    require_steps: int
    seq_per_step: int

    def kept(self, step: int, length: int) -> int:
        """Number of tokens of each sequence of `length` that those layers process in a step counted from 0."""
        value = math.floor(step / self.require_steps * (self.max_value - self.min_value) + self.min_value)
        return min(value - value % self.seq_per_step, self.max_value, length)

    def lengths(self, sizes: Sizes, steps: int) -> list[int]:
        """The different numbers of tokens in a run, in the order of their first use."""
        until = min(steps, max(self.require_steps, len(sizes.seq_lens)) + 1)  # after which nothing changes
        return list(dict.fromkeys(self.kept(step, sizes.of_step(step)[1]) for step in range(until)))

    def layer_tokens(self, step: int, sizes: Sizes) -> int:
        """Number of tokens of a step, counted once for each layer that processes them."""
        batch, length = sizes.of_step(step)
        return batch * (len(self.layers) * self.kept(step, length) + (self.num_layers - len(self.layers)) * length)

    def describe(self, sizes: Sizes, steps: int) -> str:
        """Text for reports."""
        lengths, first, last = self.lengths(sizes, steps), min(self.layers), max(self.layers)
        layers = f"layers {first}-{last}" if len(self.layers) == last - first + 1 else f"{len(self.layers)} layers"
        return (
            f"random-LTD: {layers} of {self.num_layers} see {' '.join(map(str, lengths))} of {self.max_value} tokens: "
            f"{len(lengths)} graphs"
        )


def draw_kept(
    seed: int, step: int, layers: tuple[int, ...], rows: Ints, shape: tuple[int, int], kept: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The tokens that each layer processes of each sequence: a function of seed, step, row and layer alone.

    Args:
        rows: those of the batch that are drawn; the others are left 0.
        shape: B sequences of T tokens.

    Returns:
        (B, layers x kept), the places of the tokens in order, layer after layer; and (B, layers x T), for each token where
        it is afterwards, when what a layer gave for those it saw is followed by the full sequence as it was before.
    """
    batch, length = shape
    (state,) = split_mix(np.array([seed % 2**64], np.uint64))
    of_step = split_mix(np.array([step], np.uint64) + state)
    of_row = split_mix(rows.astype(np.uint64) + of_step)[:, None]
    of_layer = split_mix(np.array(layers, np.uint64) + of_row)[..., None]
    numbers = split_mix(np.arange(length, dtype=np.uint64) + of_layer)  # (rows, layers, T)
    chosen = np.sort(np.argpartition(numbers, kept - 1)[..., :kept].astype(np.int32))
    afterwards = np.broadcast_to(np.arange(kept, kept + length, dtype=np.int32), numbers.shape).copy()
    np.put_along_axis(afterwards, chosen, np.arange(kept, dtype=np.int32)[None, None], axis=-1)
    places = np.zeros((batch, len(layers) * kept), np.int32)
    back = np.zeros((batch, len(layers) * length), np.int32)
    places[rows], back[rows] = chosen.reshape(len(rows), -1), afterwards.reshape(len(rows), -1)
    return places, back
