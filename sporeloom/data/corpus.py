# SPDX-License-Identifier: Apache-2.0
"""The flags with which commands read a corpus, and its documents as one stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from sporeloom.core.command_line import Overwrite, argument, option
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Positive
from sporeloom.data.sources import MAX_DOCUMENT_MB, DocumentSource, OnError
from sporeloom.data.stores import DocumentPath

SHOWN_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Overwrite):
    """Base of the configurations of commands that read documents."""

    inputs: tuple[DocumentPath, ...] = argument("files or folders of documents, or URLs as s3://BUCKET/FOLDER")
    key: str = option("text", "field of JSON lines, or column of tables, with the text")
    suffixes: tuple[str, ...] = option(
        (), "endings of the file names to read in folders, as in .py .cpp (default: all files)"
    )
    on_error: OnError = option("stop", "action on unreadable documents: stop, or count them and skip")
    max_document_mb: Positive = option(MAX_DOCUMENT_MB, "maximum size of a document in MB; a longer one cannot be read")

    def source(self, **more: Any) -> DocumentSource:
        """The documents; `more`: further settings of the source."""
        return DocumentSource(self.inputs, self.key, self.suffixes, self.on_error, self.max_document_mb, **more)


@dataclass
class CorpusReader:
    """Iterates once over the texts of a corpus, and counts.

    Raises:
        ConfigError: while iterating: a document cannot be read, as the source's `on_error` says; at the end: none has text.
    """

    source: DocumentSource
    num_documents: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        for batch in tqdm(self.source.batches(), unit="MB", disable=None):
            parsed = self.source.parse(batch)
            self.skipped += parsed.skipped
            self.problems += parsed.remarks[: SHOWN_PROBLEMS - len(self.problems)]
            for _, document in parsed.documents:
                self.num_documents += 1
                self.num_bytes += len(document.text.encode())
                yield document.text
        if not self.num_documents:
            raise no_text(self.source, self.problems)

    def report(self) -> dict[str, Any]:
        return {
            "documents": self.num_documents,
            "text_bytes": self.num_bytes,
            "skipped": dict(sorted(self.skipped.items())),
            "first_problems": self.problems,
        }


def no_text(source: DocumentSource, problems: Sequence[str]) -> ConfigError:
    """The error of a corpus without text, with the first problems of its documents."""
    return ConfigError([f"{', '.join(map(str, source.inputs))}: contains no text", *problems[:5]])
