# SPDX-License-Identifier: Apache-2.0
"""Remove every run of characters that occurred before, in an earlier document or the same one.

What is removed is what Lee et al. 2021 (arXiv:2107.06499) remove: each character of each run of `min_length` that occurred
before. They use a suffix array; here every place of a text is looked up among windows of earlier texts that start a fixed
distance apart, so dense that each such run holds one, and what is found is compared character by character.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import split_mix
from sporeloom.data.cluster import Workers, over_batches
from sporeloom.data.rewrite import RewriteResult, check_outputs, rewrite, with_text
from sporeloom.data.sample_order import Ints, counted_up
from sporeloom.data.sources import Batch, DocumentSource

TEXTS, ENDS, HASHES, PLACES = "texts.u32", "ends.i64", "hashes.u64", "places.i64"
MAX_POSITIONS = 100
"""Maximum number of positions that a window is compared with: the first ones."""
PAIRS_AT_ONCE = 1 << 14
Hashes = NDArray[np.uint64]
Codes = NDArray[np.uint32]


@dataclass(frozen=True)
class SubstringSettings:
    """Settings of the removal."""

    min_length: int = 200
    """Minimum number of characters of a removed run."""
    min_rest: int = 50
    """Minimum number of characters besides white space that remain of a shortened document."""

    @property
    def window(self) -> int:
        """Length of a window: a power of two, for hashes by doubling."""
        return 1 << ((self.min_length + 1) // 2).bit_length() - 1

    @property
    def distance(self) -> int:
        """Distance between windows that are stored."""
        return self.min_length - self.window + 1


@dataclass(frozen=True)
class WindowBatch:
    """A batch as characters, and its windows."""

    first: int
    """Number of its first document."""
    codes: bytes
    lengths: Ints
    hashes: Hashes
    places: Ints


def dedup_substrings(
    source: DocumentSource, out: Path, settings: SubstringSettings, workers: Workers, report: Path | None = None
) -> dict[str, Any]:
    """Write the documents without repeated runs to `out`, every removal to `report`. Returns counts.

    Raises:
        ConfigError: bad input, a file that is there already, a full disk. Neither file appears then.
    """
    check_outputs(out, report)
    source.files()
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".substrings-", dir=out.parent))
    try:
        bases = _remember(source, folder, settings, workers)
        make_work = partial(_make_cutter, source, settings, folder, bases)
        return rewrite(source, out, make_work, workers, report)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def codes_of(texts: list[str]) -> Codes:
    return np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)


def window_hashes(codes: Codes, window: int) -> Hashes:
    """Hashes of the window at each position, where a full window fits."""
    hashes, size, factor = split_mix(codes.astype(np.uint64)), 1, 0x9E3779B97F4A7C15
    while size < window:
        hashes = hashes[: len(hashes) - size] * np.uint64(factor) + hashes[size:]
        size, factor = 2 * size, factor * factor % 2**64
    return split_mix(hashes) if len(codes) >= window else hashes[:0]


def _make_signer(source: DocumentSource, settings: SubstringSettings) -> Callable[[Batch], WindowBatch]:
    def sign(batch: Batch) -> WindowBatch:
        texts = [document.text for _, document in source.parse(batch).documents]
        codes, lengths = codes_of(texts), np.array([len(text) for text in texts], np.int64)
        begins = np.cumsum(lengths) - lengths
        counts = np.maximum(0, (lengths - settings.window) // settings.distance + 1)
        places = np.repeat(begins, counts) + settings.distance * counted_up(counts)
        hashes = window_hashes(codes, settings.window)[places]
        return WindowBatch(batch[0], codes.tobytes(), lengths, hashes, places)

    return sign


def _remember(source: DocumentSource, folder: Path, settings: SubstringSettings, workers: Workers) -> dict[int, int]:
    """Read every document once; windows sorted by hash, and by position among equal ones. Returns for the number
    of each batch's first document where it begins."""
    bases, base = dict[int, int](), 0
    with ExitStack() as files:
        texts, ends, hashes, places = (
            files.enter_context((folder / name).open("wb")) for name in (TEXTS, ENDS, HASHES, PLACES)
        )
        results = over_batches(workers, WindowBatch, partial(_make_signer, source, settings), source)
        files.callback(results.close)  # type: ignore[attr-defined]
        for signed in tqdm(results, unit="MB", disable=None):
            bases[signed.first] = base
            texts.write(signed.codes)
            ends.write((np.cumsum(signed.lengths) + base).tobytes())
            hashes.write(signed.hashes.tobytes())
            places.write((signed.places + base).tobytes())
            base += int(signed.lengths.sum())
    found, where = np.fromfile(folder / HASHES, np.uint64), np.fromfile(folder / PLACES, np.int64)
    order = np.argsort(found, kind="stable")
    found[order].tofile(folder / HASHES)
    where[order].tofile(folder / PLACES)
    return bases


class _Memory:
    """All texts and their windows, on disk."""

    def __init__(self, folder: Path, settings: SubstringSettings):
        self.settings = settings
        self.codes, self.ends = _mapped(folder / TEXTS, np.uint32), _mapped(folder / ENDS, np.int64)
        self.hashes, self.places = _mapped(folder / HASHES, np.uint64), _mapped(folder / PLACES, np.int64)
        # Most positions are in no window: a bit for each of 16 times as many ranges of hashes finds that at once.
        self.shift = np.uint64(64 - max(10, (16 * len(self.hashes)).bit_length()))
        known = np.zeros(1 << (64 - int(self.shift)), bool)
        known[self.hashes >> self.shift] = True
        self.known = np.packbits(known, bitorder="little")

    def repeated(self, begin: int, lengths: Ints) -> NDArray[np.bool_]:
        """Mark the characters from `begin` on that, in documents of these lengths, belong to a run that occurred before."""
        window, total = self.settings.window, int(lengths.sum())
        hashes = window_hashes(self.codes[begin : begin + total], window)
        parts = hashes >> self.shift
        maybe = np.flatnonzero(self.known[parts >> np.uint64(3)] >> (parts & np.uint64(7)).astype(np.uint8) & 1)
        first = np.searchsorted(self.hashes, hashes[maybe], "left")
        counts = np.minimum(np.searchsorted(self.hashes, hashes[maybe], "right") - first, MAX_POSITIONS)
        here = np.repeat(maybe + begin, counts)
        there = self.places[np.repeat(first, counts) + counted_up(counts)]
        is_before = there < here
        here, there = here[is_before], there[is_before]
        edges = np.zeros(total + 1, np.int64)
        for start in range(0, len(here), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            left, right = self._compared(here[part], there[part])
            np.add.at(edges, left - begin, 1)
            np.add.at(edges, right - begin, -1)
        return np.cumsum(edges)[:-1] > 0

    def _compared(self, here: Ints, there: Ints) -> tuple[Ints, Ints]:
        """Starts and ends of the runs, long enough, that are equal around two positions."""
        length, window = self.settings.min_length, self.settings.window
        around = np.arange(window - length, length)
        equal = np.ones((len(here), len(around)), bool)
        for places in (here, there):  # within their documents
            document = np.searchsorted(self.ends, places, "right")
            begins = np.where(document > 0, self.ends[np.maximum(document - 1, 0)], 0)
            at = places[:, None] + around
            equal &= (at >= begins[:, None]) & (at < self.ends[document][:, None])
        last = len(self.codes) - 1
        mine, theirs = (self.codes[np.clip(p[:, None] + around, 0, last)] for p in (here, there))
        equal &= mine == theirs
        middle = length - window
        left = np.logical_and.accumulate(equal[:, :middle][:, ::-1], axis=1).sum(1)
        right = np.logical_and.accumulate(equal[:, middle:], axis=1).sum(1)
        enough = (right >= window) & (left + right >= length)
        return (here - left)[enough], (here + right)[enough]


def _mapped(path: Path, kind: type) -> NDArray[Any]:
    return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)


def _make_cutter(
    source: DocumentSource, settings: SubstringSettings, folder: Path, bases: dict[int, int]
) -> Callable[[Batch], RewriteResult]:
    memory = _Memory(folder, settings)

    def cut(batch: Batch) -> RewriteResult:
        parsed, done = source.parse(batch), RewriteResult()
        lengths = np.array([len(document.text) for _, document in parsed.documents], np.int64)
        repeated, end = memory.repeated(bases[batch[0]], lengths), 0
        for _, document in parsed.documents:
            begin, end = end, end + len(document.text)
            mask = repeated[begin:end]
            done.counts["characters"] += len(mask)
            if not mask.any():
                done.lines.append(with_text(document, source.key, document.text))
                done.counts["whole"] += 1
                continue
            done.counts["characters_removed"] += int(mask.sum())
            edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
            text, at = document.text, [0, *edges, end - begin]
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                done.notes.append({"place": document.place, "start": start, "end": stop, "text": text[start:stop]})
            rest = "".join(text[start:stop] for start, stop in zip(at[::2], at[1::2], strict=True))
            is_dropped = len("".join(rest.split())) < settings.min_rest
            done.counts["dropped" if is_dropped else "cut"] += 1
            if not is_dropped:
                done.lines.append(with_text(document, source.key, rest))
        done.counts["documents"] += len(parsed.documents)
        done.counts += parsed.skipped
        done.problems = parsed.remarks
        return done

    return cut
