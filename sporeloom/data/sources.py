# SPDX-License-Identifier: Apache-2.0
"""Read documents from files of many kinds, one after another; a file is never fully in memory.

Reading has two halves: `read_raw` cuts files into documents, in one process and in order; `parse` makes text of one, in any.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sporeloom.core.document import shown_key
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.reader import parse_json
from sporeloom.data.compressed import COMPRESSED, open_frames
from sporeloom.data.stores import open_document
from sporeloom.data.tables import read_arrow_rows, read_rows
from sporeloom.data.web import WEB, extract_text, read_records

LINES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSED))
ARROW = (".arrow",)
TABLES = (".parquet", *ARROW)
CUT = (".jsonl", ".parquet")
"""Files that can be read from any line, or any group of rows, on."""
DATASET_FILES = ("dataset_info.json", "state.json")
"""Files that Hugging Face datasets saves next to the .arrow files of a dataset."""
SPLITS_FILE = "dataset_dict.json"
"""File that marks a folder of several splits of a dataset."""
NOT_TEXT = (".json", ".csv", ".zip", ".tar", ".tgz", ".bin", ".npy", ".mindrecord", *COMPRESSED, ".7z", ".pdf")
BATCH_BYTES = 1 << 20
SHARD_MB = 64
SHARD_NUMBERS = 1 << 40
"""Distance between the numbers of the first documents of two shards."""
MAX_DOCUMENT_MB = 64
OnError = Literal["stop", "skip"]


class RawDocument(NamedTuple):
    """One document as its file has it."""

    place: str
    """file:line, for messages."""
    content: bytes
    form: Literal["text", "json", "html"]
    problem: str = ""
    """Why there is no content."""
    about: Mapping[str, str] = {}
    """Further fields of the document."""


class FilePart(NamedTuple):
    """A file, or of a large one the lines or groups of rows that begin from byte `start` up to byte `end`."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def name(self) -> str:
        """Name in messages, before `:line`: lines are counted from the piece's first on."""
        return f"{self.path}@{self.start}" if self.start else str(self.path)


Batch = tuple[int, list[RawDocument]]
"""Some documents, and the number of the first."""


class TextDocument(NamedTuple):
    """One document as text."""

    place: str
    text: str
    record: dict[str, Any]
    """All fields it came with."""


@dataclass
class ReadableBatch:
    """The readable documents of a batch, with their numbers, and the problems of the others."""

    documents: list[tuple[int, TextDocument]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    """file:line of documents without text; an empty source file is not a mistake."""
    problems: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> Counter[str]:
        return Counter(empty=len(self.empty), broken=len(self.problems))

    @property
    def remarks(self) -> list[str]:
        """Report what was skipped, the worst first."""
        return [*self.problems, *(f"{place}: empty" for place in self.empty)]


@dataclass(frozen=True)
class DocumentSource:
    """The documents that a job reads, and the treatment of unreadable ones."""

    inputs: tuple[Path, ...]
    key: str = "text"
    """Field of JSON lines and column of tables with the text."""
    suffixes: tuple[str, ...] = ()
    """Name endings of the files that are read in folders; none: all."""
    on_error: OnError = "stop"
    max_document_mb: float = MAX_DOCUMENT_MB
    shard_mb: float = SHARD_MB
    """Size of a group of files that is processed as one."""

    def files(self) -> list[Path]:
        return source_files(self.inputs, self.suffixes)

    def shards(self) -> list[list[FilePart]]:
        """The files in groups of at least `shard_mb`, each of which can be processed alone. Files of JSON lines
        that are much larger are split between lines and tables between groups of rows; compressed files and
        others cannot be."""
        shards, size, wanted = list[list[FilePart]](), 0, self.shard_mb * 1e6
        for path in self.files():
            length = path.stat().st_size
            parts = max(1, int(length // wanted)) if path.name.endswith(CUT) else 1
            bounds = [length * part // parts for part in range(parts)] + [None]
            for start, end in itertools.pairwise(bounds):
                if not shards or size >= wanted or start:
                    shards.append([])
                    size = 0
                shards[-1].append(FilePart(path, start or 0, end))
                size += length // parts
        return shards

    def batches(self, all_fields: bool = False) -> Iterator[Batch]:
        """All documents, undecoded."""
        for number, files in enumerate(self.shards()):
            yield from self.batches_of(number, files, all_fields)

    def batches_of(self, shard: int, files: Sequence[FilePart], all_fields: bool = False) -> Iterator[Batch]:
        """The documents of a shard: no document is in two. Numbers of documents begin anew with each shard, far
        apart."""
        max_bytes = int(self.max_document_mb * 1e6)
        return batches(read_raw(files, self.inputs, self.key, max_bytes, all_fields), shard * SHARD_NUMBERS)

    def parse(self, batch: Batch) -> ReadableBatch:
        """The documents of a batch.

        Raises:
            ConfigError: one cannot be read, and `on_error` is to stop.
        """
        parsed = ReadableBatch()
        for number, raw in enumerate(batch[1], batch[0]):
            try:
                document = parse(raw, self.key)
            except ConfigError as error:
                parsed.problems += error.problems
                continue
            if document.text.strip():
                parsed.documents.append((number, document))
            else:
                parsed.empty.append(raw.place)
        if parsed.problems and self.on_error == "stop":
            count = len(parsed.problems)
            more = [f"and {count - 5} more like these nearby"] if count > 5 else []
            raise ConfigError([*parsed.problems[:5], *more, "--on-error skip counts such documents and continues"])
        return parsed


def source_files(inputs: Iterable[Path], suffixes: tuple[str, ...] = ()) -> list[Path]:
    """The files of `inputs`, in a fixed order: files as given, folders with everything below, names sorted.

    Hidden files and folders are left out, and of a folder what does not end in one of `suffixes`, if there are any.

    Raises:
        ConfigError: nothing there, or a kind of file that holds no text.
    """
    files, problems = list[Path](), Problems()
    for path in inputs:
        files += problems.of(_files_of, path, suffixes) or []
    problems.raise_if_any()
    return files


def _files_of(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of one input."""
    try:
        if path.is_dir():
            below = [f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts)]
            found = sorted(f for f in below if f.is_file() and (not suffixes or f.name.endswith(suffixes)))
            found = _without_dataset_files(path, found)
            kind = f" that end in {' or '.join(suffixes)}" if suffixes else ""
            if not found:
                raise ConfigError(f"{path}: the folder holds no files{kind}")
            return found
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file")
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(path, Path):
            raise
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None  # what a store says
    if path.name.endswith(NOT_TEXT) and not path.name.endswith((*LINES, *WEB)):
        kinds = ", ".join((*LINES, *TABLES, *WEB))
        raise ConfigError(f"{path}: this kind of file cannot be read; give {kinds}, .txt or source")
    return [path]


def _without_dataset_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files of a folder, of saved datasets the tables alone.

    Raises:
        ConfigError: the folder holds several splits of a dataset.
    """
    datasets = {file.parent for file in files if file.name.endswith(ARROW)}
    if datasets and folder / SPLITS_FILE in files:
        names = sorted(each.name for each in datasets)
        raise ConfigError(f"{folder}: holds the splits {', '.join(names)} of a dataset; name one: {folder / names[0]}")
    return [file for file in files if file.name not in DATASET_FILES or file.parent not in datasets]


def read_raw(
    files: Iterable[FilePart],
    inputs: Iterable[Path],
    key: str,
    max_bytes: int,
    all_columns: bool = False,
    first_row: int = 0,
) -> Iterator[RawDocument]:
    """Every document of `files`: a line of a .jsonl file, a row of a .parquet or .arrow file, a page or text of a web
    archive, a part between blank lines of a .txt file that was named itself, and each other file as a whole.

    What cannot be read comes as a `RawDocument` with a `problem`. `all_columns`: rows of tables with all their fields.
    `first_row`: number of rows of each table to leave out, counted from its first one.
    """
    named = set(inputs)
    for piece in files:
        path = piece.path
        try:
            if not path.stat().st_size and path.name.endswith((*LINES, *TABLES, *WEB)):
                yield RawDocument(f"{path}:1", b"", "text", "an empty file")
                continue
            if path.name.endswith(TABLES):
                is_arrow = path.name.endswith(ARROW)
                for row in (
                    read_arrow_rows(path, key, all_columns, first_row)
                    if is_arrow
                    else read_rows(path, piece.start, piece.end, key, all_columns, first_row)
                ):
                    problem = row.problem or (
                        _too_long(len(row.content), max_bytes) if len(row.content) > max_bytes else ""
                    )
                    place = f"{path}:{row.number}" if row.number else str(path)
                    yield RawDocument(place, b"" if problem else row.content, "json", problem)
            elif path.name.endswith(LINES):
                yield from _lines(piece, max_bytes)
            elif path.name.endswith(WEB):
                for number, (content, form, about, problem) in enumerate(read_records(path, max_bytes), 1):
                    yield RawDocument(f"{path}:{number}", content, form, problem, about)
            elif path.suffix == ".txt" and path in named:
                yield from _paragraphs(path, max_bytes)
            elif path.stat().st_size > max_bytes:
                yield RawDocument(f"{path}:1", b"", "text", _too_long(path.stat().st_size, max_bytes))
            else:
                with open_document(path) as file:
                    yield RawDocument(f"{path}:1", file.read(), "text")
        except OSError as error:
            yield RawDocument(str(path), b"", "text", f"cannot be read: {error.strerror or error}")
        except Exception as error:
            if isinstance(path, Path) or isinstance(error, ConfigError):
                raise
            yield RawDocument(
                str(path), b"", "text", f"cannot be read: {type(error).__name__}: {error}"
            )  # what a store says


def batches(documents: Iterable[RawDocument], first: int = 0) -> Iterator[Batch]:
    """Documents in lists of about BATCH_BYTES, each with the number of its first, `first` on; where one ends
    follows from the documents alone."""
    batch, size = list[RawDocument](), 0
    for document in documents:
        batch.append(document)
        size += len(document.content) + 100
        if size >= BATCH_BYTES:
            yield first, batch
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield first, batch


def parse(raw: RawDocument, key: str) -> TextDocument:
    """The text of a document.

    Raises:
        ConfigError: file, line and what is wrong: not UTF-8, not JSON, no such field.
    """
    if raw.problem:
        raise ConfigError(f"{raw.place}: {raw.problem}")
    if raw.form == "html":
        return TextDocument(raw.place, extract_text(raw.content, raw.about.get("url")), dict(raw.about))
    try:
        text = raw.content.decode("utf-8")
    except UnicodeDecodeError as error:
        path, _, line = raw.place.rpartition(":")
        number = int(line) + raw.content[: error.start].count(b"\n")
        raise ConfigError(f"{path}:{number}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None
    if raw.form == "text":
        return TextDocument(raw.place, text, dict(raw.about))
    record = parse_json(text, raw.place, finite=False)
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        keys = ", ".join(map(shown_key, record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{raw.place}: no `{key}` field with a string; found: {keys}")
    text = record[key]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{raw.place}: contains half of a surrogate pair, which is not a character") from None
    return TextDocument(raw.place, text, record)


def _too_long(size: int, max_bytes: int) -> str:
    return f"a document of {size / 1e6:.1f} MB is longer than --max-document-mb {max_bytes / 1e6:g}"


def _lines(piece: FilePart, max_bytes: int) -> Iterator[RawDocument]:
    number, path, name = 0, piece.path, piece.name
    with open_document(path) as raw_file:
        frames = open_frames(raw_file, path, max_bytes)
        file = io.BufferedReader(frames, 1 << 20) if frames else raw_file
        try:
            if piece.start:  # a line belongs to the piece that it begins in
                file.seek(piece.start - 1)
                while (line := file.readline(max_bytes)) and not line.endswith(b"\n"):
                    pass
            while (piece.end is None or file.tell() < piece.end) and (line := file.readline(max_bytes + 1)):
                number += 1
                size = len(line)
                while size > max_bytes and not line.endswith(b"\n") and (line := file.readline(max_bytes + 1)):
                    size += len(line)
                if size > max_bytes:
                    yield RawDocument(f"{name}:{number}", b"", "json", _too_long(size, max_bytes))
                    continue
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 and not piece.start else line
                if frames and frames.problem and not _is_whole(line):
                    number -= 1  # the damage is in this line
                elif line.strip():
                    yield RawDocument(f"{name}:{number}", line, "json")
            problem = frames.problem if frames else ""
        except OSError as error:
            problem = str(error)
        if problem:
            yield RawDocument(f"{name}:{number + 1}", b"", "json", f"damaged from here on: {problem}")


def _is_whole(line: bytes) -> bool:
    """Whether a line, maybe the last one before a damage, is complete."""
    try:
        return line.endswith(b"\n") or json.loads(line) is not None
    except ValueError:
        return False


def _paragraphs(path: Path, max_bytes: int) -> Iterator[RawDocument]:
    """Parts of a text between blank lines."""
    lines, start, size, number = list[bytes](), 1, 0, 0
    with open_document(path) as file:
        while True:
            line = file.readline(max_bytes + 1)
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip(b"\r\n"):
                start = start if size else number
                size += len(line)
                if size <= max_bytes:
                    lines.append(line)
                number -= not line.endswith(b"\n")  # a part of a line that is too long
                continue
            if size > max_bytes:
                yield RawDocument(f"{path}:{start}", b"", "text", _too_long(size, max_bytes))
            elif size:
                yield RawDocument(f"{path}:{start}", b"".join(lines).replace(b"\r\n", b"\n").rstrip(b"\n"), "text")
            lines, size = [], 0
            if not line:
                return
