# SPDX-License-Identifier: Apache-2.0
"""Remove passages of the evaluation sets from training documents.

Source: Brown et al. 2020 (GPT-3), appendix C, as MT-NLG did it: where a document shares a run of 13 words with an evaluation
set, the run and 200 characters on both sides are removed and the document is split there; pieces under 200 characters are
dropped, and documents that would be in more than 10 pieces as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import split_mix
from sporeloom.data.minhash import run_hashes
from sporeloom.data.rewrite import RewriteResult, with_text
from sporeloom.data.sources import Batch, DocumentSource

# Words in lower case without punctuation; a character of a script without spaces is a word.
WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[\p{L}\p{M}\p{N}_]+")
OTHER_WORD = -1
PIECE = "piece"
"""Field with the number of a piece."""


@dataclass(frozen=True)
class DecontaminationSettings:
    """Settings of the removal."""

    ngram: int = 13
    margin: int = 200
    """Number of characters removed on each side of a match."""
    min_piece: int = 200
    """Minimum number of characters of a remaining piece."""
    max_pieces: int = 10
    """Maximum number of remaining pieces; a document with more is dropped."""


@dataclass(frozen=True)
class Removal:
    """A removed range of characters, and the first match inside."""

    start: int
    end: int
    match: str
    source: str
    """file:line of the evaluation document."""


class EvaluationSet:
    """All n-grams of the evaluation documents."""

    def __init__(self, texts: list[tuple[str, str]], ngram: int):
        """`texts`: (file:line, text)."""
        self.ngram, self._vocabulary = ngram, dict[str, int]()
        self._places, ids, starts, documents = [place for place, _ in texts], list[int](), list[int](), list[int]()
        self.num_short = 0
        """Number of documents with fewer words than an n-gram, which cannot be found."""
        for number, (_, text) in enumerate(texts):
            words = [match.group().casefold() for match in WORD.finditer(text)]
            self.num_short += len(words) < ngram
            starts += range(len(ids), len(ids) + len(words) - ngram + 1)
            documents += [number] * max(0, len(words) - ngram + 1)
            ids += [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]
        self._ids, places = np.array(ids, np.int64), np.array(starts, np.int64)
        keys = (
            run_hashes(split_mix(self._ids.astype(np.uint64)), ngram)[places] if len(places) else np.empty(0, np.uint64)
        )
        order = np.argsort(keys, kind="stable")
        self._sorted, self._starts, self._documents = keys[order], places[order], np.array(documents, np.int64)[order]

    def cuts(self, text: str, settings: DecontaminationSettings) -> list[Removal]:
        """Ranges to remove from a text, in order and without overlaps."""
        matches = list(WORD.finditer(text))
        if len(matches) < self.ngram:
            return []
        ids = np.array([self._vocabulary.get(m.group().casefold(), OTHER_WORD) for m in matches], np.int64)
        keys = run_hashes(split_mix(ids.astype(np.uint64)), self.ngram)
        found = np.searchsorted(self._sorted, keys)
        cuts = list[Removal]()
        for i in np.flatnonzero(self._sorted[np.minimum(found, len(self._sorted) - 1)] == keys):
            entry = self._same(ids[i : i + self.ngram], int(found[i]), keys[i])
            if entry is None:
                continue
            first, last = matches[i].start(), matches[i + self.ngram - 1].end()
            start, end = max(0, first - settings.margin), min(len(text), last + settings.margin)
            if cuts and start <= cuts[-1].end:
                cuts[-1] = Removal(cuts[-1].start, end, cuts[-1].match, cuts[-1].source)
            else:
                cuts.append(Removal(start, end, text[first:last], self._places[self._documents[entry]]))
        return cuts

    def _same(self, ids: NDArray[np.int64], entry: int, key: np.uint64) -> int | None:
        """The entry that really has these words: keys of different words may be the same."""
        while entry < len(self._sorted) and self._sorted[entry] == key:
            start = self._starts[entry]
            if (self._ids[start : start + self.ngram] == ids).all():
                return entry
            entry += 1
        return None


def read_evaluation(paths: tuple[Path, ...], keys: tuple[str, ...], ngram: int) -> EvaluationSet:
    """The evaluation documents: the text of each of `keys` on its own.

    Raises:
        ConfigError: a file that cannot be read, or nothing long enough in all of them.
    """
    texts = []
    for key in keys:
        source = DocumentSource(paths, key=key)
        texts += [(d.place, d.text) for batch in source.batches() for _, d in source.parse(batch).documents]
    found = EvaluationSet(texts, ngram)
    if found.num_short == len(texts):
        raise ConfigError(f"{', '.join(map(str, paths))}: no document has {ngram} words; lower --ngram")
    return found


def make_decontaminator(
    source: DocumentSource, paths: tuple[Path, ...], keys: tuple[str, ...], settings: DecontaminationSettings
) -> Callable[[Batch], RewriteResult]:
    """Work for `rewrite`: the documents without the removed passages, with a note on each.

    Raises:
        ConfigError: the text's field has the name of the one that numbers pieces; evaluation sets that cannot be read.
    """
    if source.key == PIECE:
        raise ConfigError(
            f"--key {PIECE}: pieces of a document are numbered in a field of that name; rename the text's"
        )
    evaluation = read_evaluation(paths, keys, settings.ngram)

    def work(batch: Batch) -> RewriteResult:
        parsed, done = source.parse(batch), RewriteResult()
        for _, document in parsed.documents:
            cuts = evaluation.cuts(document.text, settings)
            if not cuts:
                done.lines.append(with_text(document, source.key, document.text))
                done.counts["clean"] += 1
                continue
            left = pieces(document.text, cuts, settings)
            for number, piece in enumerate(left):
                done.lines.append(with_text(document, source.key, piece, **{PIECE: number}))
            done.notes += [_note(document.place, cut) for cut in cuts]
            done.counts += Counter(cut=1, dropped=int(not left), pieces=len(left), matches=len(cuts))
        done.counts += Counter(documents=len(parsed.documents)) + parsed.skipped
        done.problems = parsed.remarks
        return done

    return work


def pieces(text: str, cuts: list[Removal], settings: DecontaminationSettings) -> list[str]:
    """The remaining pieces of a text; none if there are too many."""
    bounds = [0, *(place for cut in cuts for place in (cut.start, cut.end)), len(text)]
    left = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    left = [piece for piece in left if len(piece) >= max(1, settings.min_piece)]
    return left if len(left) <= settings.max_pieces else []


def _note(place: str, cut: Removal) -> dict[str, Any]:
    return {"place": place, "start": cut.start, "end": cut.end, "match": cut.match, "evaluation": cut.source}
