# SPDX-License-Identifier: Apache-2.0
"""Rules of published corpora, by name.

`gopher`: Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1, quality; for English. `gopher-repetition`: table A1 there; words
are runs of letters and digits, a Chinese character is one. `mt-nlg`: tools/openwebtext/cleanup_fix_dataset.py of Megatron-LM,
with which MT-NLG's data were cleaned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.data.batch import split_mix
from sporeloom.data.minhash import run_hashes
from sporeloom.data.web import detect_language

WORD = regex.compile(r"\p{Han}|[\p{L}\p{M}\p{N}]+")  # in Chinese every character counts as a word
ALPHABETIC = regex.compile(r"\p{L}")
BULLETS = ("\u2022", "\u2023", "\u25cf", "*", "-")
ELLIPSES = ("...", "\u2026")
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))


class TextStatistics:
    """A text with its statistics, each computed once."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """Words between white space."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.split("\n") if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part.strip() for part in regex.split(r"\n\s*\n", self.text) if part.strip()]

    @cached_property
    def runs(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Numbers of the words without punctuation in lower case, and their lengths."""
        words, numbers = WORD.findall(self.text.casefold()), dict[str, int]()
        ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.uint64)
        return split_mix(ids), np.array([len(word) for word in words], np.int64)

    def share_of_words(self, condition: Callable[[str], object]) -> float:
        return sum(map(bool, map(condition, self.words))) / max(1, len(self.words))

    def share_of_lines(self, condition: Callable[[str], bool]) -> float:
        return sum(map(condition, self.lines)) / max(1, len(self.lines))


def repeated(items: Iterable[Any], by_chars: bool = False) -> float:
    """Fraction of the items, or of their characters, in those that repeat an earlier one."""
    seen, again, total = set[Any](), 0, 0
    for item in items:
        size = len(item) if by_chars else 1
        total += size
        again += size * (item in seen)
        seen.add(item)
    return again / max(1, total)


def top_ngram(measured: TextStatistics, n: int) -> float:
    """Fraction of the words' characters in the most frequent run of n words, if it occurs twice."""
    ids, lengths = measured.runs
    _, first, counts = np.unique(run_hashes(ids, n), return_index=True, return_counts=True)
    if counts.max(initial=0) < 2:
        return 0.0
    best = int(counts.argmax())
    size = int(lengths[first[best] : first[best] + n].sum())
    return min(1.0, int(counts[best]) * size / int(lengths.sum()))


def duplicate_ngrams(measured: TextStatistics, n: int) -> float:
    """Fraction of the words' characters in runs of n words that repeat an earlier one, each character counted
    once."""
    ids, lengths = measured.runs
    _, first, inverse = np.unique(run_hashes(ids, n), return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(inverse)))
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.add.at(edges, again, 1)
    np.add.at(edges, again + n, -1)
    return int(lengths[np.cumsum(edges)[:-1] > 0].sum()) / max(1, int(lengths.sum()))


def _stop_words(measured: TextStatistics) -> int:
    return len(STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in measured.words))


def _symbols(measured: TextStatistics) -> float:
    count = measured.text.count("#") + sum(map(measured.text.count, ELLIPSES))
    return count / max(1, len(measured.words))


def _mean_length(measured: TextStatistics) -> float:
    return sum(map(len, measured.words)) / max(1, len(measured.words))


Rule = Callable[[TextStatistics], bool]
"""Whether a text passes."""

GOPHER: dict[str, Rule] = {
    "gopher_words": lambda m: 50 <= len(m.words) <= 100_000,
    "gopher_word_length": lambda m: 3 <= _mean_length(m) <= 10,
    "gopher_symbols": lambda m: _symbols(m) <= 0.1,
    "gopher_bullets": lambda m: m.share_of_lines(lambda line: line.startswith(BULLETS)) <= 0.9,
    "gopher_ellipses": lambda m: m.share_of_lines(lambda line: line.endswith(ELLIPSES)) <= 0.3,
    "gopher_alphabetic": lambda m: m.share_of_words(ALPHABETIC.search) >= 0.8,
    "gopher_stop_words": lambda m: _stop_words(m) >= 2,
}


def _at_most(share: Callable[[TextStatistics, int], float], n: int, most: float, measured: TextStatistics) -> bool:
    return share(measured, n) <= most


GOPHER_REPETITION: dict[str, Rule] = {
    "gopher_lines": lambda m: repeated(m.lines) <= 0.3,
    "gopher_paragraphs": lambda m: repeated(m.paragraphs) <= 0.3,
    "gopher_line_chars": lambda m: repeated(m.lines, True) <= 0.2,
    "gopher_paragraph_chars": lambda m: repeated(m.paragraphs, True) <= 0.2,
    **{f"gopher_top_{n}_gram": partial(_at_most, top_ngram, n, most) for n, most in ((2, 0.2), (3, 0.18), (4, 0.16))},
    **{f"gopher_{n}_grams": partial(_at_most, duplicate_ngrams, n, round(0.2 - n / 100, 2)) for n in range(5, 11)},
}
MT_NLG: dict[str, Rule] = {
    "mt_nlg_512": lambda m: len(m.text) >= 512,
    "mt_nlg_256_javascript": lambda m: len(m.text) >= 256 or "javascript" not in m.text.lower(),
    "mt_nlg_512_non_english": lambda m: len(m.text) >= 512 or detect_language(m.text)[0] == "en",
}
SETS = {"gopher": GOPHER, "gopher-repetition": GOPHER_REPETITION, "mt-nlg": MT_NLG}
RULES = GOPHER | GOPHER_REPETITION | MT_NLG


@cache
def named_rules(names: tuple[str, ...]) -> dict[str, Rule]:
    """The rules of sets and single ones.

    Raises:
        ConfigError: a name that is neither.
    """
    found, problems = dict[str, Rule](), []
    for name in names:
        if name in RULES:
            found[name] = RULES[name]
        elif name in SETS:
            found |= SETS[name]
        else:
            known = ", ".join(SETS)
            problems.append(f"--rules {name} is unknown{did_you_mean(name, (*SETS, *RULES))}; sets: {known}")
    if problems:
        raise ConfigError(problems)
    return found
