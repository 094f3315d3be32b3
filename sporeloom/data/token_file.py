# SPDX-License-Identifier: Apache-2.0
"""Token files: a folder with all tokens of a corpus, memory-mapped, and where its documents end.

tokens.bin      one number a token, uint16 or uint32, little endian; an end-of-document token closes each document
ends.bin        int64 for each document: the number of tokens up to its end
dataset.json    what these are: version, dtype, counts, tokenizer, content hash, report
and the tokenizer's own file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import check_file, check_hashes, write_hashes
from sporeloom.core.numbers import Amount, Count, Natural
from sporeloom.core.reader import fields_from, read_json

TOKENS, ENDS, INFO = "tokens.bin", "ends.bin", "dataset.json"
VERSION = 1
SCAN_TOKENS = 1 << 24
CHECKED_BYTES = 64 << 20
"""Token files up to this size are verified by every reader, larger ones by `sporeloom checkpoint-info --verify`
alone."""


@dataclass(frozen=True)
class TokenFileInfo:
    """Contents of dataset.json."""

    version: int
    dtype: str
    """uint16 or uint32."""
    num_tokens: Amount
    num_documents: Amount
    content: str
    """Hash of the tokens and the ends of documents."""
    family: str
    tokenizer: str
    """Hash of the tokenizer's files."""
    vocab_size: Count
    eod_id: Natural
    record_length: Count | None = None
    """Length of records that were made elsewhere; None: one stream."""
    report: dict[str, Any] = field(default_factory=dict)


class TokenFile:
    """Reads such a folder.

    Raises:
        ConfigError: it is not such a folder, incomplete, or of another version.
    """

    def __init__(self, folder: Path):
        self.folder, self.info = folder, read_info(folder)
        info = self.info
        is_large = info.num_tokens * np.dtype(info.dtype).itemsize > CHECKED_BYTES
        for name, size in ((TOKENS, info.num_tokens * np.dtype(info.dtype).itemsize), (ENDS, info.num_documents * 8)):
            found = (folder / name).stat().st_size if (folder / name).exists() else -1
            if found != size:
                is_what = "is missing" if found < 0 else f"has {found} bytes, {INFO} says {size}"
                raise ConfigError(f"{folder / name}: {is_what}; tokenize again")
        check_hashes(folder, unread=(TOKENS,) if is_large else ())
        self.tokens: NDArray[Any] = np.memmap(folder / TOKENS, np.dtype(info.dtype).newbyteorder("<"), "r")
        self.ends: NDArray[np.int64] = np.memmap(folder / ENDS, "<i8", "r")

    def document(self, number: int) -> NDArray[Any]:
        """Tokens of a document, without the one that ends it."""
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number] - 1]

    def documents_in(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Documents of the tokens from `start` to `stop`: (number, first token, end), the latter two counted within the
        document, whose last token ends it."""
        while start < stop:
            number = int(np.searchsorted(self.ends, start, "right"))
            begin = int(self.ends[number - 1]) if number else 0
            end = int(self.ends[number]) if number < len(self.ends) else self.info.num_tokens  # of records: not ended
            yield number, start - begin, min(stop, end) - begin
            start = end

    def num_samples(self, seq_len: int) -> int:
        """Samples of seq_len+1 tokens; each but the first of a stream begins with the last token of the one before."""
        if self.info.record_length:
            return self.info.num_tokens // self.info.record_length if seq_len == self.info.record_length - 1 else 0
        return max(0, self.info.num_tokens - 1) // seq_len

    def start(self, sample: int, seq_len: int) -> int:
        """Position of a sample's first token."""
        return sample * (self.info.record_length or seq_len)

    def places_of(self, token: int) -> NDArray[np.int64]:
        """Positions of a token, sorted."""
        if token == self.info.eod_id:
            return np.asarray(self.ends) - 1
        found = [
            np.flatnonzero(self.tokens[start : start + SCAN_TOKENS] == token) + start
            for start in range(0, self.info.num_tokens, SCAN_TOKENS)
        ]
        return np.concatenate(found).astype(np.int64)


def is_token_file(folder: Path) -> bool:
    return (folder / INFO).is_file()


def read_info(folder: Path) -> TokenFileInfo:
    """Read dataset.json of a folder.

    Raises:
        ConfigError: there is none, or not one of this version.
    """
    path = folder / INFO
    check_file(path)
    if not path.is_file():
        partial = " (unfinished: run the same command again)" if partial_folder(folder).exists() else ""
        raise ConfigError(f"{folder}: no token files there{partial}; make them with tools/preprocess.py tokenize")
    try:
        info = fields_from(TokenFileInfo, read_json(path))
    except ConfigError as error:
        raise ConfigError([*error.problems, f"{path}: cannot be understood; tokenize again"]) from None
    if info.dtype not in ("uint16", "uint32"):
        raise ConfigError(f"{path}: dtype {info.dtype}; tokens are uint16 or uint32; tokenize again")
    if info.version != VERSION:
        raise ConfigError(f"{path}: version {info.version}; this program reads version {VERSION}; tokenize again")
    return info


def write_info(folder: Path, info: TokenFileInfo) -> None:
    """Write dataset.json, then the hashes of all files: the last file that is written."""
    (folder / INFO).write_text(json.dumps(asdict(info), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_hashes(folder)


def partial_folder(folder: Path) -> Path:
    """Folder where token files grow until they are complete."""
    return folder.with_name(f"{folder.name}.partial")


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def chained_hash(before: str, data: bytes) -> str:
    """The content hash after some more of the content."""
    return hashlib.sha256(before.encode() + hashlib.sha256(data).digest()).hexdigest()
