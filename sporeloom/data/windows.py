# SPDX-License-Identifier: Apache-2.0
"""All tokens of a token file in batches of windows, to compute a loss that does not depend on any order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sporeloom.data.batch import Batch, make_batch
from sporeloom.data.token_file import TokenFile


class Windows:
    """Windows of T + 1 tokens, each beginning with the last token of the one before, so that every token but the first is
    predicted once. The last one is padded; records that were made elsewhere stay as they are.

    Args:
        eod_id: as in `make_batch`.
        loss_ignore_id: likewise.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, eod_id: int | None, loss_ignore_id: int | None):
        self.tokens, self.seq_len, self.eod_id, self.loss_ignore_id = tokens, seq_len, eod_id, loss_ignore_id
        stop = tokens.info.num_tokens - 1
        count = tokens.num_samples(seq_len) if tokens.info.record_length else -(-stop // seq_len)
        self.starts = [tokens.start(sample, seq_len) for sample in range(max(0, count))]

    def samples(self, first: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Tokens (count, T + 1) from window `first` on, and how many of each row are not padding."""
        length = self.seq_len + 1
        tokens = np.full((count, length), self.tokens.info.eod_id, np.int32)
        counts = np.zeros(count, np.int64)
        for row, start in enumerate(self.starts[first : first + count]):
            window = self.tokens.tokens[start : start + length]
            tokens[row, : len(window)], counts[row] = window, len(window)
        return tokens, counts

    def batches(self, size: int) -> Iterator[Batch]:
        """All windows in batches of `size`, the last one filled up with padding. Loss weights are above 0 where a token
        counts."""
        for first in range(0, len(self.starts), size):
            tokens, counts = self.samples(first, size)
            yield make_batch(tokens, self.eod_id, self.loss_ignore_id, 1, counts)
