# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's indexed token files: PREFIX.bin holds the tokens of all sequences, PREFIX.idx where each begins.

PREFIX.idx, little endian: MMIDIDX 0 0, uint64 version 1, uint8 dtype code, uint64 S, uint64 D, int32[S] lengths, int64[S]
byte offsets, int64[D] the first sequence of each document and at last S, and int8[S] modes in multimodal files alone.
Source: Megatron-LM megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import check_regular, write_atomically
from sporeloom.data.token_file import CHECKED_BYTES

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}
MAX_UINT16_VOCABULARY = 65500
"""Megatron-LM stores vocabularies below this size as uint16, and larger ones as int32."""


def token_dtype(vocab_size: int) -> str:
    """Dtype in which Megatron-LM stores tokens of a vocabulary."""
    return "uint16" if vocab_size < MAX_UINT16_VOCABULARY else "int32"


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.idx")


class IndexedFile:
    """Reads PREFIX.bin and PREFIX.idx; the tokens are memory-mapped.

    Attributes:
        lengths: (S,) int32, number of tokens of each sequence.
        pointers: (S,) int64, byte offset of each sequence.
        document_indices: (D,) int64, first sequence of each document, and S.
        modes: (S,) int8 of a multimodal file, else None.

    Raises:
        ConfigError: a file is missing, truncated, of another version, or contradicts itself.
    """

    def __init__(self, prefix: Path):
        self.prefix, idx, tokens = prefix, idx_path(prefix), bin_path(prefix)
        for path in (idx, tokens):
            if not path.is_file():
                raise ConfigError(f"{path}: there is no such file; give the files' common name without .bin and .idx")
            check_regular(path)
        self._index_bytes = idx.read_bytes()
        self.dtype = self._read_index(idx)
        self._check(idx, tokens)
        self._size = tokens.stat().st_size
        empty: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._bytes: NDArray[np.uint8] = np.memmap(tokens, np.uint8, "r") if self._size else empty

    def _read_index(self, path: Path) -> np.dtype[Any]:
        data = self._index_bytes
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise ConfigError(f"{path}: not an index of Megatron-LM: it does not begin with MMIDIDX")
        _, version, code, num_sequences, num_entries = HEADER.unpack_from(data)
        if version != VERSION:
            raise ConfigError(f"{path}: version {version}; this program reads version {VERSION}")
        if code not in DTYPES:
            raise ConfigError(f"{path}: dtype code {code} is unknown; known: 1 to {max(DTYPES)}")
        size = HEADER.size + 12 * num_sequences + 8 * num_entries
        if len(data) not in (size, size + num_sequences):
            raise ConfigError(
                f"{path}: has {len(data)} bytes; {num_sequences} sequences and {num_entries} document entries take {size}, "
                f"or {size + num_sequences} with modes"
            )
        self.lengths = np.frombuffer(data, "<i4", num_sequences, HEADER.size)
        self.pointers = np.frombuffer(data, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_indices = np.frombuffer(data, "<i8", num_entries, HEADER.size + 12 * num_sequences)
        has_modes = len(data) > size
        self.modes: NDArray[np.int8] | None = np.frombuffer(data, "<i1", num_sequences, size) if has_modes else None
        return np.dtype(DTYPES[code]).newbyteorder("<")

    def _check(self, idx: Path, tokens: Path) -> None:
        """Raises:
        ConfigError: the index contradicts itself, or the file of tokens.
        """
        count, entries, problems = len(self.lengths), self.document_indices, list[str]()
        if count and (self.lengths.min() < 0 or self.pointers.min() < 0):
            problems.append(f"{idx}: a sequence has a negative length or offset")
        if not len(entries) or entries[0] != 0 or entries[-1] != count or (np.diff(entries) < 0).any():
            problems.append(f"{idx}: its documents do not cover sequences 0 to {count} in order")
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        size = tokens.stat().st_size
        if count and not problems and ends.max() > size:
            problems.append(f"{tokens}: has {size} bytes, its index needs {ends.max()}")
        if problems:
            raise ConfigError([f"{problem}; damaged: copy or make both files again" for problem in problems])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def content(self) -> str:
        """Hash of the index, of the number of bytes of the tokens, and of the tokens where these are few."""
        digest = hashlib.sha256(self._index_bytes + str(self._size).encode())
        if self._size <= CHECKED_BYTES:
            digest.update(self._bytes.tobytes())
        return digest.hexdigest()

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of a sequence from `offset` on, `length` of them or all the others, in the dtype of the file."""
        num_tokens = int(self.lengths[number]) - offset if length is None else length
        assert 0 <= num_tokens <= int(self.lengths[number]) - offset, (number, offset, length)
        start = int(self.pointers[number]) + offset * self.dtype.itemsize
        return self._bytes[start : start + num_tokens * self.dtype.itemsize].view(self.dtype)

    def document(self, number: int) -> NDArray[Any]:
        """Tokens of all sequences of a document."""
        first, end = self.document_indices[number : number + 2]
        parts = [self.sequence(int(sequence)) for sequence in range(first, end)]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def text_problem(self) -> str | None:
        """Say why these are not the tokens of a text; else None."""
        if self.modes is not None:
            return f"{idx_path(self.prefix)}: multimodal: sequences with modes are not supported; give a file of text"
        if self.dtype.kind == "f":
            return f"{idx_path(self.prefix)}: holds {self.dtype.name} values, not tokens"
        return None


def write_indexed(
    prefix: Path,
    documents: Iterable[Iterable[NDArray[Any] | Sequence[int]]],
    dtype: str,
    modes: Sequence[int] | None = None,
) -> int:
    """Write PREFIX.bin and PREFIX.idx from documents, which are sequences of tokens. Returns the number of sequences.

    Args:
        modes: of all sequences, for a multimodal file.

    Raises:
        ConfigError: an unknown dtype, values that it cannot hold, or another number of modes than of sequences.
    """
    if dtype not in CODES:
        raise ConfigError(f"{prefix}: dtype {dtype} is unknown; known: {', '.join(CODES)}")
    lengths, entries = array("i"), array("q", [0])

    def write_tokens(partial: Path) -> None:
        with partial.open("wb") as file:
            for document in documents:
                for sequence in document:
                    file.write(_stored(prefix, np.asarray(sequence), dtype).tobytes())
                    lengths.append(len(sequence))
                entries.append(len(lengths))
        if modes is not None and len(modes) != len(lengths):
            raise ConfigError(f"{prefix}: {len(modes)} modes for {len(lengths)} sequences")

    def write_index(partial: Path) -> None:
        counts = np.array(lengths, "<i4")
        ends = np.cumsum(counts, dtype="<i8") * np.dtype(dtype).itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[:-1]
        with partial.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(counts), len(entries)))
            for values in (counts, pointers, np.array(entries, "<i8")):
                file.write(values.tobytes())
            file.write(b"" if modes is None else np.array(modes, "<i1").tobytes())

    write_atomically(bin_path(prefix), write_tokens)
    write_atomically(idx_path(prefix), write_index)
    return len(lengths)


def _stored(prefix: Path, values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values in the dtype of a file.

    Raises:
        ConfigError: it cannot hold them.
    """
    if values.dtype.kind in "iu" and np.dtype(dtype).kind in "iu" and values.size:
        limits, low, high = np.iinfo(dtype), int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise ConfigError(f"{prefix}: token {low if low < limits.min else high} does not fit into {dtype}")
    return values.astype(np.dtype(dtype).newbyteorder("<"))
