# SPDX-License-Identifier: Apache-2.0
"""Rewrite documents: JSON lines that are complete or absent, written by one process while others work."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush
from sporeloom.core.json_text import json_text
from sporeloom.core.locks import one_writer
from sporeloom.data.cluster import Workers, over_batches
from sporeloom.data.sources import LINES, Batch, DocumentSource, TextDocument

SHOWN_PROBLEMS = 20
SAMPLES, SAMPLE_CHARS = 10, 500
"""Number of removed documents shown for each reason, and of characters of each."""


Sample = tuple[bytes, str, str]
"""Hash, file:line and the beginning of a document."""


@dataclass
class RewriteResult:
    """Result of a batch."""

    lines: list[bytes] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    """Lines for the file of notes."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Reason of a removal -> a few removed documents, to be read."""

    def add_sample(self, why: str, document: TextDocument, most: int) -> None:
        """Keep a document, if it is among the `most` of the smallest hash: the same ones on any number of
        processes."""
        digest = hashlib.blake2b(f"{document.place} {document.text}".encode(), digest_size=8).digest()
        self.add_samples({why: [(digest, document.place, document.text[:SAMPLE_CHARS])]}, most)

    def add_samples(self, samples: Mapping[str, list[Sample]], most: int) -> None:
        """Keep several documents in the same way."""
        for why, some in samples.items():
            self.samples[why] = sorted([*self.samples.get(why, []), *some])[:most]


def rewrite(
    source: DocumentSource,
    out: Path,
    make_work: Callable[[], Callable[[Batch], RewriteResult]],
    workers: Workers,
    notes: Path | None = None,
    samples: Path | None = None,
) -> dict[str, Any]:
    """Write the results of `make_work()` for each batch to `out`, its notes to `notes`, samples of removed
    documents to `samples`.

    Returns counts and first problems.

    Raises:
        ConfigError: bad input, a file that is there already, a full disk. Neither file appears then.
    """
    check_outputs(out, notes)
    if samples and samples.exists():
        raise ConfigError(f"{samples}: is there already; remove it or give another name")
    total = RewriteResult()
    with (
        one_writer(out, is_folder=False),
        complete_or_absent(out) as write,
        complete_or_absent(notes) as note,
        complete_or_absent(samples) as show_samples,
        ExitStack() as stack,
    ):
        results = over_batches(workers, RewriteResult, make_work, source, all_fields=True)
        stack.callback(results.close)  # type: ignore[attr-defined]
        for done in tqdm(results, unit="MB", disable=None):
            write(b"".join(done.lines))
            note(b"".join(to_line(record) for record in done.notes))
            total.counts += done.counts
            total.problems += done.problems[: SHOWN_PROBLEMS - len(total.problems)]
            total.add_samples(done.samples, SAMPLES)
        if not total.counts["documents"]:
            raise ConfigError([f"{', '.join(map(str, source.inputs))}: contains no text", *total.problems[:5]])
        show_samples("".join(_shown(why, total) for why in sorted(total.samples)).encode())
    return {**total.counts, "first_problems": total.problems}


def _shown(why: str, total: RewriteResult) -> str:
    """Format samples of removed documents for one reason, as text."""
    some = "".join(f"\n--- {place}\n{text}\n" for _, place, text in total.samples[why])
    return f"=== {why}: {total.counts[why]:,} documents, of them {len(total.samples[why])}\n{some}\n"


def to_line(record: Mapping[str, Any]) -> bytes:
    """Format a record as JSON; NaN and infinity become null, and half a surrogate pair is escaped."""
    try:
        return json_text(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json_text(record).encode() + b"\n"


def with_text(document: TextDocument, key: str, text: str, **more: Any) -> bytes:
    """A document's line with another text."""
    return to_line({**document.record, key: text, **more})


def check_outputs(*paths: Path | None) -> None:
    """Check that files can be created there.

    Raises:
        ConfigError: one is there already, or cannot be written in its format.
    """
    problems = [f"{path}: is there already; remove it or give another name" for path in paths if path and path.exists()]
    problems += [
        f"{path}: the output is JSON lines; end the name in {', '.join(LINES)}"
        for path in paths
        if path and not path.name.endswith(LINES)
    ]
    if problems:
        raise ConfigError(problems)


@contextmanager
def complete_or_absent(path: Path | None) -> Iterator[Callable[[bytes], object]]:
    """Writes a file, compressed as its name says, that gets its name only on success. None: writes nothing.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        yield lambda content: None
        return
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as raw, _compressed(raw, path) as file:
            yield file.write
        flush(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _compressed(file: IO[bytes], path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile("", "wb", fileobj=file, mtime=0)  # the same bytes for the same documents
    if path.suffix == ".bz2":
        return bz2.BZ2File(file, "wb")
    if path.suffix == ".xz":
        return lzma.LZMAFile(file, "wb")
    if path.suffix == ".zst":
        try:
            return import_module("zstandard").ZstdCompressor().stream_writer(file, closefd=False)
        except ModuleNotFoundError:
            raise ConfigError(f"{path}: .zst files need zstandard: pip install -e '.[data]'") from None
    return nullcontext(file)
