# SPDX-License-Identifier: Apache-2.0
"""Quality rules that a document passes or not, each counted. Source of most: Rae et al. 2021 ("Gopher"), appendix
A."""

from __future__ import annotations

import math
import re
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import regex

from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.data.quality import WORD, TextStatistics, named_rules, repeated
from sporeloom.data.rewrite import RewriteResult, with_text
from sporeloom.data.sources import Batch, DocumentSource
from sporeloom.data.web import detect_language, language_problems

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
HALF_A_PAIR = re.compile("[\ud800-\udfff]")
NGRAM = 10


@dataclass(frozen=True)
class FilterRules:
    """Rules for a document; a rule at its default passes everything."""

    min_chars: int = 0
    max_chars: int = 0
    """0: no limit."""
    min_letters: float = 0.0
    """Minimum fraction of letters among the characters that are not white space."""
    scripts: tuple[str, ...] = ()
    min_script: float = 0.5
    """Minimum fraction of the letters that are of one of `scripts`."""
    max_repeated_lines: float = 1.0
    """Maximum fraction of the lines that repeat an earlier line, without blank ones."""
    max_repeated_ngrams: float = 1.0
    """Maximum fraction of the runs of 10 words that repeat an earlier run."""
    rules: tuple[str, ...] = ()
    """Rules of published corpora, by name, see `sporeloom.data.quality`."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages that pass."""
    min_language: float = 0.5
    """Minimum probability of the language."""
    edit: Path | None = None
    """Python file with a function `edit(text)` that returns the new text, or None to drop it."""
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
        found = Problems(problems)
        for path, flag, name in ((self.classifier, "--classifier", "score"), (self.edit, "--edit", "edit")):
            if path:
                found.of(load_function, path, flag, name)
        found.of(named_rules, self.rules)
        found += found.of(language_problems, self.languages) or [] if self.languages else []
        found.raise_if_any()
        if self == FilterRules():
            raise ConfigError("no rule was given, so every document would pass; see --help")

    def failed(self, text: str) -> list[str]:
        """Names of the rules that a text fails."""
        failed = []
        if len(text) < self.min_chars:
            failed.append("min_chars")
        if self.max_chars and len(text) > self.max_chars:
            failed.append("max_chars")
        if self.min_letters and share_of_letters(text) < self.min_letters:
            failed.append("min_letters")
        if self.scripts and share_of_scripts(text, self.scripts) < self.min_script:
            failed.append("scripts")
        if self.max_repeated_lines < 1 and repeated(TextStatistics(text).lines) > self.max_repeated_lines:
            failed.append("max_repeated_lines")
        if self.max_repeated_ngrams < 1 and repeated_ngrams(text) > self.max_repeated_ngrams:
            failed.append("max_repeated_ngrams")
        if self.rules:
            measured = TextStatistics(text)
            failed += [name for name, passes in named_rules(self.rules).items() if not passes(measured)]
        if self.languages:
            language, certainty = detect_language(text)
            if language not in self.languages or certainty < self.min_language:
                failed.append("languages")
        if self.classifier and self._score(text) < self.min_score:
            failed.append("min_score")
        return failed

    def edited(self, text: str) -> str | None:
        """The text to judge and to keep; None: it is dropped.

        Raises:
            ConfigError: the user's function failed, or gave something else.
        """
        if self.edit is None:
            return text
        edited = load_function(self.edit, "--edit", "edit")(text)
        if edited is not None and not isinstance(edited, str):
            raise ConfigError(f"--edit {self.edit}: edit(text) returned a {type(edited).__name__}, not a text or None")
        if edited is not None and not edited.isascii() and HALF_A_PAIR.search(edited):
            raise ConfigError(
                f"--edit {self.edit}: edit(text) returned half of a surrogate pair, which is not a character"
            )
        return edited

    def _score(self, text: str) -> float:
        assert self.classifier
        try:
            score = float(load_function(self.classifier, "--classifier", "score")(text))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"--classifier {self.classifier}: score(text) returned no number") from None
        if math.isnan(score):  # which is not below anything
            raise ConfigError(f"--classifier {self.classifier}: score(text) returned NaN")
        return score


def share_of_letters(text: str) -> float:
    solid = SPACE.sub("", text)
    return len(LETTER.findall(solid)) / max(1, len(solid))


def share_of_scripts(text: str, scripts: tuple[str, ...]) -> float:
    letters = LETTER.findall(text)
    return len(regex.findall("|".join(SCRIPTS[s] for s in scripts), "".join(letters))) / max(1, len(letters))


def repeated_ngrams(text: str, n: int = NGRAM) -> float:
    words = WORD.findall(text.casefold())
    return repeated(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def load_function(path: Path, flag: str, name: str) -> Callable[[str], Any]:
    """A function of a user's Python file, run once as it is now; exceptions become a ConfigError.

    Raises:
        ConfigError: there is none, or the file cannot be run.
    """
    return _loaded(path, path.stat().st_mtime_ns if path.is_file() else 0, flag, name)


@lru_cache(4)
def _loaded(path: Path, changed: int, flag: str, name: str) -> Callable[[str], Any]:
    try:
        function = runpy.run_path(str(path)).get(name)
    except FileNotFoundError:
        raise ConfigError(f"{flag} {path}: there is no such file") from None
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"{flag} {path}: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{flag} {path}: has no function {name}(text)")

    def checked(text: str) -> Any:
        try:
            return function(text)
        except Exception as error:
            raise ConfigError(f"{flag} {path}: {name}(text) raised {type(error).__name__}: {error}") from None

    return checked


def make_filter(
    source: DocumentSource, rules: FilterRules, keep_removed: bool, samples: int = 0
) -> Callable[[Batch], RewriteResult]:
    """Work for `rewrite`: the documents that pass; the others, with the rules they failed, as notes, and up to
    `samples` of them for each rule."""

    def work(batch: Batch) -> RewriteResult:
        parsed, done = source.parse(batch), RewriteResult()
        for _, document in parsed.documents:
            text = rules.edited(document.text)
            failed = ["edit"] if text is None else rules.failed(text)
            done.counts.update(["removed" if failed else "kept", *(f"failed {name}" for name in failed)])
            if rules.edit:
                done.counts["edited"] += text is not None and text != document.text
            if not failed and text is not None:
                done.lines.append(with_text(document, source.key, text))
                continue
            if keep_removed:
                done.notes.append({"place": document.place, "failed": failed, "text": document.text})
            if samples:
                for name in failed:
                    done.add_sample(f"failed {name}", document, samples)
        done.counts += Counter(documents=len(parsed.documents)) + parsed.skipped
        done.problems = parsed.remarks
        return done

    return work
