# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle: a document is cut at two places and its middle comes last, so that a model learns to fill gaps.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle": cut at characters; PSM is
prefix, suffix, middle; SPM (their joint variant) puts the suffix first and lets prefix and middle follow as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class FillInTheMiddle:
    """Which documents are rearranged, and the tokens that say so. A function of seed and document number alone."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    rate: float
    """Share of the documents that are rearranged."""
    spm_rate: float = 0.5
    """Share of those that are in SPM order."""
    seed: int = 1

    def encode(self, text: str, number: int, encode: Encode) -> list[int]:
        """Token ids of document `number`."""
        random = np.random.default_rng((self.seed, number))
        rearrange, spm = random.random(2)
        if rearrange >= self.rate:
            return encode(text)
        first, last = sorted(random.integers(0, len(text) + 1, 2))
        prefix, middle, suffix = encode(text[:first]), encode(text[first:last]), encode(text[last:])
        if spm < self.spm_rate:
            return [self.prefix_id, self.suffix_id, *suffix, self.middle_id, *prefix, *middle]
        return [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id, *middle]

    def decode(self, ids: Sequence[int], decode: Decode) -> str:
        """The text of a document as it was before it was rearranged."""
        ids = list(ids)
        if not ids or ids[0] != self.prefix_id:
            return decode(ids)
        suffix, middle = ids.index(self.suffix_id), ids.index(self.middle_id)
        before, after, last = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
        if before or not after:  # PSM; with neither prefix nor suffix the two orders are the same
            return decode(before) + decode(last) + decode(after)
        return decode(last) + decode(after)
