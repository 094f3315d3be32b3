# SPDX-License-Identifier: Apache-2.0
"""Read all documents of a small text file at once."""

from __future__ import annotations

from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes
from sporeloom.core.lines import split_lines
from sporeloom.data.sources import DocumentSource, RawDocument, parse


def read_documents(path: Path) -> list[str]:
    """Texts of all documents of a file or folder, in memory. `sources` defines what each kind of file contains.

    Raises:
        ConfigError: missing, without text, not UTF-8, not JSON, or a line without `text`.
    """
    source, documents, problems = DocumentSource((path,), on_error="skip"), list[str](), list[str]()
    for batch in source.batches():
        parsed = source.parse(batch)
        documents += [document.text for _, document in parsed.documents]
        problems += parsed.problems
    if not documents and not problems:
        problems = [f"{path}: contains no text"]
    if problems:
        raise ConfigError(_shortened(path, problems))
    return documents


def decode_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        ConfigError: missing, unreadable, or not UTF-8.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file")
    try:
        content = read_bytes(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None


def json_lines(path: Path, text: str, key: str) -> list[tuple[int, str]]:
    """(line number, the text under `key`) of each JSON object, one a line.

    Raises:
        ConfigError: lines that are not such objects.
    """
    found, problems = list[tuple[int, str]](), list[str]()
    for number, line in enumerate(split_lines(text), 1):
        if line.strip():
            try:
                found.append((number, parse(RawDocument(f"{path}:{number}", line.encode(), "json"), key).text))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(_shortened(path, problems))
    return found


def _shortened(path: Path, problems: list[str]) -> list[str]:
    return problems[:5] + ([f"{path}: and {len(problems) - 5} more lines like these"] if len(problems) > 5 else [])
