# SPDX-License-Identifier: Apache-2.0
"""Statistics of tokenizers on a corpus: fertility, bytes per token, unknown tokens, texts that do not survive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import regex
from tqdm import tqdm

from sporeloom.core.document import shown_key
from sporeloom.core.errors import ConfigError, printable
from sporeloom.data.cluster import over_batches
from sporeloom.data.corpus import SHOWN_PROBLEMS, no_text
from sporeloom.data.pieces import PieceTokenizer
from sporeloom.data.sources import Batch, DocumentSource, TextDocument
from sporeloom.data.tokenizer import Tokenizer, open_tokenizer

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
"""Scripts that are written without spaces between words."""
WORD = regex.compile(rf"(?V1)[[\p{{L}}\p{{N}}]&&[{_UNSPACED}]]|[[\p{{L}}\p{{N}}]--[{_UNSPACED}]][^\s{_UNSPACED}]*+")
"""A word: a letter of a script without spaces, or what stands between spaces and has another letter or digit in it."""
MAX_GROUPS = 1000
SHOWN_FAILURES = 5


class NamedTokenizer(NamedTuple):
    """A tokenizer by its family and file."""

    family: str
    path: Path


@dataclass(frozen=True)
class StatisticsJob:
    """Tokenizers and the corpus they are measured on."""

    source: DocumentSource
    tokenizers: tuple[NamedTokenizer, ...]
    by: str | None = None
    """Field of the documents by which they are grouped; its parts joined by dots if it is nested."""
    by_file: bool = False


@dataclass
class TokenCounts:
    """Counts of the tokens of texts."""

    num_tokens: int = 0
    num_unknown: int = 0
    num_failures: int = 0
    """Number of documents that the tokens do not decode to."""
    failures: list[str] = field(default_factory=list)
    """file:line of the first of them."""

    def add(self, other: TokenCounts) -> None:
        self.num_tokens += other.num_tokens
        self.num_unknown += other.num_unknown
        self.num_failures += other.num_failures
        self.failures += other.failures[: SHOWN_FAILURES - len(self.failures)]


@dataclass
class GroupCounts:
    """Counts of the texts of one group, and of their tokens by each tokenizer."""

    tokenizers: list[TokenCounts]
    num_documents: int = 0
    num_bytes: int = 0
    num_words: int = 0

    def add(self, other: GroupCounts) -> None:
        self.num_documents += other.num_documents
        self.num_bytes += other.num_bytes
        self.num_words += other.num_words
        for own, more in zip(self.tokenizers, other.tokenizers, strict=True):
            own.add(more)


@dataclass
class CorpusCounts:
    """Counts of a corpus, or of a batch of its documents."""

    groups: dict[str, GroupCounts] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: CorpusCounts) -> None:
        for name, counts in other.groups.items():
            if name in self.groups:
                self.groups[name].add(counts)
            else:
                self.groups[name] = counts
        self.skipped += other.skipped
        self.problems += other.problems[: SHOWN_PROBLEMS - len(self.problems)]


def count_corpus(job: StatisticsJob, workers: int = 0) -> CorpusCounts:
    """Count a corpus. `workers`: processes; 0: this one alone.

    Raises:
        ConfigError: no such tokenizer, an unreadable corpus or one without text, a document without the field `by`, or more
            than MAX_GROUPS values of it.
    """
    for family, path in job.tokenizers:  # mistakes come first
        open_tokenizer(family, path)
    total = CorpusCounts()
    results = over_batches(workers, CorpusCounts, partial(_make_counter, job), job.source, all_fields=bool(job.by))
    with closing(results):  # type: ignore[type-var]
        for counts in tqdm(results, unit="MB", disable=None):
            total.add(counts)
            if len(total.groups) > MAX_GROUPS:
                which = f"--by {job.by}: more than {MAX_GROUPS:,} values; choose a field with few"
                raise ConfigError(f"--by-file: more than {MAX_GROUPS:,} files; leave it out" if job.by_file else which)
    if not total.groups and total.skipped["without_field"]:
        inputs = ", ".join(map(str, job.source.inputs))
        raise ConfigError([f"{inputs}: no document has the field `{job.by}` of --by", *total.problems[:SHOWN_PROBLEMS]])
    if not total.groups:
        raise no_text(job.source, total.problems)
    return total


def num_words(text: str) -> int:
    """Number of words; in scripts that are written without spaces every letter counts as one."""
    return sum(1 for _ in WORD.finditer(text))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Token for what a tokenizer has no tokens for; None where that does not happen."""
    return int(tokenizer.pieces.unk_id()) if isinstance(tokenizer, PieceTokenizer) else None


def _make_counter(job: StatisticsJob) -> Callable[[Batch], CorpusCounts]:
    tokenizers = [open_tokenizer(family, path) for family, path in job.tokenizers]
    unknown = [unknown_id(tokenizer) for tokenizer in tokenizers]

    def count(batch: Batch) -> CorpusCounts:
        parsed = job.source.parse(batch)
        counts = CorpusCounts(skipped=parsed.skipped, problems=parsed.remarks[:SHOWN_PROBLEMS])
        for _, document in parsed.documents:
            try:
                name = _group(job, document)
            except ConfigError as error:
                if job.source.on_error == "stop":
                    raise
                counts.skipped["without_field"] += 1
                counts.problems += error.problems[: SHOWN_PROBLEMS - len(counts.problems)]
                continue
            if name not in counts.groups:
                counts.groups[name] = GroupCounts([TokenCounts() for _ in tokenizers])
            text = document.text
            made = [_tokens(tokenizer, token, document) for tokenizer, token in zip(tokenizers, unknown, strict=True)]
            counts.groups[name].add(GroupCounts(made, 1, len(text.encode()), num_words(text)))
        return counts

    return count


def _tokens(tokenizer: Tokenizer, unknown: int | None, document: TextDocument) -> TokenCounts:
    ids = tokenizer.encode_text(document.text)
    is_lost = tokenizer.decode([*tokenizer.prefix, *ids]) != document.text
    num_unknown = 0 if unknown is None else ids.count(unknown)
    return TokenCounts(len(ids), num_unknown, int(is_lost), [document.place] if is_lost else [])


def _group(job: StatisticsJob, document: TextDocument) -> str:
    """Name of a document's group.

    Raises:
        ConfigError: it has no such field, or one that names nothing.
    """
    if job.by_file:
        return printable(document.place.rpartition(":")[0])
    if job.by is None:
        return ""
    value = _field(document.record, job.by)
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return printable(str(value))
    if not document.record:
        raise ConfigError(f"{document.place}: --by {job.by}: a text has no fields; group by files with --by-file")
    found = ", ".join(map(shown_key, document.record))
    problem = f"the field `{job.by}` is {_kind(value)}, not a text or an integer"
    if value is None:
        problem = f"the field `{job.by}` is null" if job.by in document.record else f"no field `{job.by}`"
    remedy = "; --on-error skip leaves such documents out" if job.source.on_error == "stop" else ""
    raise ConfigError(f"{document.place}: --by: {problem}; found: {found}{remedy}")


def _kind(value: Any) -> str:
    """Kind of a JSON value, for a message."""
    if value == "":
        return "empty"
    kinds = {bool: "true or false", float: "a number with a fraction", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def _field(record: Mapping[str, Any], name: str) -> Any:
    """Value of a field, which may be inside others: `meta.language`."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first) if dot else None
    return _field(inner, rest) if isinstance(inner, Mapping) else None


def total_of(groups: Sequence[GroupCounts]) -> GroupCounts:
    """Sum of groups."""
    total = GroupCounts([TokenCounts() for _ in groups[0].tokenizers])
    for group in groups:
        total.add(group)
    return total
