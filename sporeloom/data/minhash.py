# SPDX-License-Identifier: Apache-2.0
"""Texts as sets of shingles, and signatures that find similar ones: MinHash with banding.

Source: Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3. A text's shingles are its runs of
`shingle` characters, in lower case, every run of white space one space. All of a batch is computed at once by NumPy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.data.batch import split_mix

MAX_HASHES = 128
CERTAINTY = 0.99
BLOCK = 1 << 15
"""Number of shingles hashed at a time, so that they stay in the processor's cache."""
Hashes = NDArray[np.uint32]


@dataclass(frozen=True)
class MinHash:
    """Band keys of texts: `bands` of `rows` hash functions each."""

    threshold: float
    """Minimum Jaccard similarity of near-duplicates."""
    shingle: int = 5
    seed: int = 1

    @property
    def rows(self) -> int:
        """The largest number of hash functions in a band that finds a pair at the threshold with CERTAINTY: more
        of them give fewer pairs to compare."""
        fitting = [r for r in range(1, MAX_HASHES) if 1 - (1 - self.threshold**r) ** (MAX_HASHES // r) >= CERTAINTY]
        return max(fitting, default=1)

    @property
    def bands(self) -> int:
        return MAX_HASHES // self.rows

    def band_keys(self, texts: list[str]) -> NDArray[np.uint64]:
        """(len(texts), bands): texts that share a key are candidates."""
        hashes, ends = shingle_hashes(texts, self.shingle)
        random = np.random.default_rng(self.seed)
        factors = random.integers(0, 2**31, self.bands * self.rows, np.uint32) * np.uint32(2) + np.uint32(1)
        offsets = random.integers(0, 2**32, self.bands * self.rows, np.uint32)
        smallest = np.empty((len(factors), len(texts)), np.uint32)
        first = 0
        while first < len(texts):
            begin = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begin + BLOCK, "right")))
            block = hashes[begin : int(ends[last - 1])]
            starts = np.concatenate([[0], ends[first : last - 1] - begin])
            for function, (factor, offset) in enumerate(zip(factors, offsets, strict=True)):
                smallest[function, first:last] = np.minimum.reduceat(block * factor + offset, starts)
            first = last
        keys = np.zeros((self.bands, len(texts)), np.uint64)
        for row in range(self.rows):
            keys = split_mix(keys + smallest.reshape(self.bands, self.rows, -1)[:, row])
        return keys.T


def shingle_hashes(texts: list[str], shingle: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Hashes of the shingles of all texts, and where each text's end; a text shorter than a shingle is one itself."""
    padded = [normalized.ljust(shingle, "\0") for normalized in map(normalize, texts)]
    lengths = np.array([len(text) for text in padded], np.int64)
    codes = np.frombuffer("".join(padded).encode("utf-32-le"), np.uint32).astype(np.uint64)
    hashes = run_hashes(codes, shingle)
    inside = np.ones(len(codes), bool)  # but for shingles that reach into the next text
    text_ends = np.cumsum(lengths)
    for offset in range(1, shingle):
        inside[text_ends - offset] = False
    mixed = (split_mix(hashes) >> np.uint64(32)).astype(np.uint32)
    return mixed[inside[: len(hashes)]], np.cumsum(lengths - shingle + 1)


def run_hashes(numbers: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """A number for each run of n numbers, equal for equal runs."""
    hashes = np.zeros(max(0, len(numbers) - n + 1), np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + numbers[offset : offset + len(hashes)]
    return hashes


def shingle_set(text: str, shingle: int) -> Hashes:
    """Hashes of the different shingles, sorted."""
    return np.unique(shingle_hashes([text], shingle)[0])


def jaccard(a: Hashes, b: Hashes) -> float:
    """Jaccard similarity: shared shingles among all."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def normalize(text: str) -> str:
    return " ".join(text.lower().split())


def text_hash(text: str) -> bytes:
    """Hash of 16 bytes that identifies a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
