# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle: a document is split at two positions and its middle moves to the end, so that a model learns
to fill gaps.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle": cut at characters; PSM is
prefix, suffix, middle; SPM (their joint variant) puts the suffix first and lets prefix and middle follow as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Decode = Callable[[list[int]], str]


class Encoder(Protocol):
    """The interface of a tokenizer."""

    prefix: Sequence[int]
    """Tokens that every text begins with."""

    def encode_document(self, text: str) -> list[int]: ...

    def encode_text(self, text: str) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class FillInTheMiddle:
    """The documents that are rearranged, and the tokens that mark it. A function of seed and document number
    alone."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    rate: float
    """Fraction of the documents that are rearranged."""
    spm_rate: float = 0.5
    """Fraction of those in SPM order."""
    seed: int = 1

    def encode(self, text: str, number: int, tokenizer: Encoder) -> list[int]:
        """Token ids of document `number`. The prefix of every text stands at its start alone. After a special
        token a piece is encoded as in a prompt that names this token; the middle continues from there."""
        random = np.random.default_rng((self.seed, number))
        rearrange, spm = random.random(2)
        if rearrange >= self.rate:
            return tokenizer.encode_document(text)
        first, last = sorted(random.integers(0, len(text) + 1, 2))
        prefix, suffix = tokenizer.encode_text(text[:first]), tokenizer.encode_text(text[last:])
        middle = tokenizer.encode_continuation(text[first:last])
        if spm < self.spm_rate:
            rearranged = [self.prefix_id, self.suffix_id, *suffix, self.middle_id, *prefix, *middle]
        else:
            rearranged = [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id, *middle]
        return [*tokenizer.prefix, *rearranged]

    def decode(self, ids: Sequence[int], decode: Decode) -> str:
        """Restore the text of a document as it was before it was rearranged."""
        ids = list(ids)
        if self.prefix_id not in ids:
            return decode(ids)
        start, ids = ids[: ids.index(self.prefix_id)], ids[ids.index(self.prefix_id) :]
        suffix, middle = ids.index(self.suffix_id), ids.index(self.middle_id)
        before, after, last = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
        if before or not after:  # PSM; with neither prefix nor suffix the two orders are the same
            return decode([*start, *before]) + decode(last) + decode([*start, *after])
        return decode([*start, *last]) + decode([*start, *after])
