# SPDX-License-Identifier: Apache-2.0
"""Rules that a document passes or not, each counted. Source of most: Rae et al. 2021 ("Gopher"), appendix A."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import regex

from mindloom.data.rewrite import Rewritten, with_text
from mindloom.data.sources import Batch, Source
from mindloom.errors import ConfigError, did_you_mean

SCRIPTS = {
    "arabic": r"\p{Arabic}",
    "cyrillic": r"\p{Cyrillic}",
    "devanagari": r"\p{Devanagari}",
    "greek": r"\p{Greek}",
    "han": r"\p{Han}",
    "hangul": r"\p{Hangul}",
    "hebrew": r"\p{Hebrew}",
    "kana": r"[\p{Hiragana}\p{Katakana}]",
    "latin": r"\p{Latin}",
    "thai": r"\p{Thai}",
}
LETTER = regex.compile(r"\p{L}")
SPACE = re.compile(r"\s")
WORD = regex.compile(r"\p{Han}|[\p{L}\p{M}\p{N}]+")  # in Chinese every character counts as a word
NGRAM = 10


@dataclass(frozen=True)
class FilterRules:
    """What a document must be; a rule at its default passes everything."""

    min_chars: int = 0
    max_chars: int = 0
    """0: no limit."""
    min_letters: float = 0.0
    """Share of letters among the characters that are not white space."""
    scripts: tuple[str, ...] = ()
    min_script: float = 0.5
    """Share of the letters that must be of one of `scripts`."""
    max_repeated_lines: float = 1.0
    """Share of the lines that have been there before, blank ones aside."""
    max_repeated_ngrams: float = 1.0
    """Share of the runs of 10 words that have been there before."""
    classifier: Path | None = None
    """Python file with a function `score(text)` that returns a number."""
    min_score: float = 0.0

    def check(self) -> None:
        """Raises:
        ConfigError: rules that make no sense.
        """
        problems = [
            f"--scripts {s} is unknown{did_you_mean(s, SCRIPTS)}; known: {', '.join(SCRIPTS)}"
            for s in self.scripts
            if s not in SCRIPTS
        ]
        if self.max_chars and self.max_chars < self.min_chars:
            problems.append(f"--max-chars {self.max_chars} is below --min-chars {self.min_chars}")
        if self.min_score and not self.classifier:
            problems.append("--min-score needs --classifier FILE.py with a function score(text)")
        if self.classifier:
            try:
                load_classifier(self.classifier)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        if self == FilterRules():
            raise ConfigError("no rule was given, so every document would pass; see --help")

    def failed(self, text: str) -> list[str]:
        """Names of the rules that a text does not pass."""
        failed = []
        if len(text) < self.min_chars:
            failed.append("min_chars")
        if self.max_chars and len(text) > self.max_chars:
            failed.append("max_chars")
        if self.min_letters and share_of_letters(text) < self.min_letters:
            failed.append("min_letters")
        if self.scripts and share_of_scripts(text, self.scripts) < self.min_script:
            failed.append("scripts")
        if self.max_repeated_lines < 1 and repeated_lines(text) > self.max_repeated_lines:
            failed.append("max_repeated_lines")
        if self.max_repeated_ngrams < 1 and repeated_ngrams(text) > self.max_repeated_ngrams:
            failed.append("max_repeated_ngrams")
        if self.classifier and load_classifier(self.classifier)(text) < self.min_score:
            failed.append("min_score")
        return failed


def share_of_letters(text: str) -> float:
    solid = SPACE.sub("", text)
    return len(LETTER.findall(solid)) / max(1, len(solid))


def share_of_scripts(text: str, scripts: tuple[str, ...]) -> float:
    letters = LETTER.findall(text)
    return len(regex.findall("|".join(SCRIPTS[s] for s in scripts), "".join(letters))) / max(1, len(letters))


def repeated_lines(text: str) -> float:
    return _repeated([line.strip() for line in text.split("\n") if line.strip()])


def repeated_ngrams(text: str, n: int = NGRAM) -> float:
    words = WORD.findall(text.casefold())
    return _repeated([tuple(words[i : i + n]) for i in range(len(words) - n + 1)])


def _repeated(items: list) -> float:  # type: ignore[type-arg]
    return 1 - len(set(items)) / len(items) if items else 0.0


@lru_cache(1)
def load_classifier(path: Path) -> Callable[[str], float]:
    """`score` of a Python file.

    Raises:
        ConfigError: there is none, or the file cannot be run.
    """
    try:
        score = runpy.run_path(str(path)).get("score")
    except FileNotFoundError:
        raise ConfigError(f"--classifier {path}: there is no such file") from None
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"--classifier {path}: {type(error).__name__}: {error}") from None
    if not callable(score):
        raise ConfigError(f"--classifier {path}: has no function score(text)")

    def checked(text: str) -> float:
        try:
            return float(score(text))
        except Exception as error:
            raise ConfigError(f"--classifier {path}: score(text) raised {type(error).__name__}: {error}") from None

    return checked


def make_filter(source: Source, rules: FilterRules, keep_removed: bool) -> Callable[[Batch], Rewritten]:
    """Work for `rewrite`: the documents that pass; the others, with the rules they failed, as notes."""

    def work(batch: Batch) -> Rewritten:
        parsed, done = source.parse(batch), Rewritten()
        for _, document in parsed.documents:
            failed = rules.failed(document.text)
            done.counts.update(["removed" if failed else "kept", *(f"failed {name}" for name in failed)])
            if not failed:
                done.lines.append(with_text(document, source.key, document.text))
            elif keep_removed:
                done.notes.append({"place": document.place, "failed": failed, "text": document.text})
        done.counts += Counter(documents=len(parsed.documents)) + parsed.skipped
        done.problems = parsed.remarks
        return done

    return work
