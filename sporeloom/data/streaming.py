# SPDX-License-Identifier: Apache-2.0
"""Texts that are tokenized while a run trains: no token files, and memory for one block of sequences.

The tokens of all documents, one after another and over again, are one stream. A sequence is a window of it, and sequences
are shuffled within blocks. What a step gets is therefore a function of the files, the seed and the step alone: every rank of
every mesh computes it for itself. The positions where blocks begin only save the way there.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch, make_batch
from sporeloom.data.sample_order import Sizes, shuffled
from sporeloom.data.sources import TABLES, DocumentSource, FilePart, RawDocument, parse, read_raw
from sporeloom.data.tables import column_names
from sporeloom.data.tokenizer import Tokenizer

SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev")
"""Names of splits by which a folder with several is recognized."""
CACHED = "cache-"
"""Beginning of the names of .arrow files that Hugging Face datasets keeps of intermediate results."""


class Cursor(NamedTuple):
    """A position in the stream: `skip` tokens after the beginning of a document."""

    epoch: int = 0
    file: int = 0
    document: int = 0
    """Number of the document in its file, counted from 0."""
    skip: int = 0


@dataclass(frozen=True)
class StreamedText:
    """Files whose documents are tokenized while a run trains.

    Raises:
        ConfigError: no files, files of several splits, a table without the column.
    """

    path: Path
    key: str = "text"
    split: str | None = None

    def __post_init__(self) -> None:
        problems = []
        for file in self.files():
            if file.name.endswith(TABLES) and self.key not in (names := column_names(file)):
                problems.append(f"{file}: no column `{self.key}`; it has: {', '.join(names)}; choose one with --key")
        if problems:
            raise ConfigError(problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else []))

    def files(self) -> list[Path]:
        """The files of the split, in their order.

        Raises:
            ConfigError: see above.
        """
        files = [file for file in DocumentSource((self.path,)).files() if not file.name.startswith(CACHED)]
        words = {file: _words(file.relative_to(self.path) if file != self.path else Path(file.name)) for file in files}
        if self.split:
            found = [file for file in files if self.split in words[file]]
            if not found:
                shown = ", ".join(file.name for file in files[:5])
                raise ConfigError(
                    f"--split {self.split}: no file of {self.path} has it in its name; there are: {shown}"
                )
            return found
        splits = sorted({word for of_file in words.values() for word in of_file if word in SPLITS})
        if len(splits) > 1 and self.path.is_dir():
            raise ConfigError(f"{self.path}: holds the splits {', '.join(splits)}; choose one with --split {splits[0]}")
        return files

    def identity(self) -> str:
        """Hash of the names and sizes of the files, and of what is read of them."""
        names = [(file.name, file.stat().st_size) for file in self.files()]
        return hashlib.sha256(repr((names, self.key)).encode()).hexdigest()[:16]


def _words(path: Path) -> set[str]:
    """Words of a path below a folder, by which splits are named."""
    return set(re.split(r"[^a-z0-9]+", str(path.with_suffix("")).lower()))


class TokenStream:
    """Reads the tokens of the stream from a position on."""

    def __init__(self, text: StreamedText, tokenizer: Tokenizer, cursor: Cursor):
        self.text, self.tokenizer, self.files = text, tokenizer, text.files()
        self.cursor = cursor
        self._tokens = np.zeros(0, np.int32)
        self._documents = self._read(cursor)

    def take(self, count: int) -> NDArray[np.int32]:
        """The next tokens, which the next call returns again but for `advance`.

        Raises:
            ConfigError: a document that cannot be read; no file has text.
        """
        parts, held = [self._tokens], len(self._tokens)
        while held < count:
            parts.append(next(self._documents))
            held += len(parts[-1])
        self._tokens = np.concatenate(parts) if len(parts) > 1 else self._tokens
        return self._tokens[:count]

    def advance(self, count: int) -> None:
        """Leave the first tokens behind. `cursor` is then the position of the next one."""
        self.take(count)
        self._tokens = self._tokens[count:]
        while self._starts and self._starts[0][1] <= count:
            count -= self._starts.popleft()[1]
        if not self._starts:
            self.cursor = self._next
            return
        begin, length = self._starts[0]
        self.cursor = begin._replace(skip=begin.skip + count)
        self._starts[0] = self.cursor, length - count

    def _read(self, cursor: Cursor) -> Iterator[NDArray[np.int32]]:
        """Tokens of one document after another, with the token that ends it, and their positions in `_starts`."""
        self._starts: deque[tuple[Cursor, int]] = deque()
        self._next = cursor
        epoch, file, document, skip = cursor
        num_tokens = 1  # of this epoch; whether one from the middle on is empty is not known
        while True:
            for index in range(file, len(self.files)):
                for number, tokens in self._tokens_of(index, document):
                    begin, document = Cursor(epoch, index, number, skip), number + 1
                    tokens, skip = tokens[skip:], 0
                    num_tokens += len(tokens)
                    self._starts.append((begin, len(tokens)))
                    self._next = Cursor(epoch, index, document)
                    yield tokens
                document = 0
            if not num_tokens:
                raise ConfigError(f"{self.text.path}: contains no text in `{self.text.key}`")
            epoch, file, num_tokens = epoch + 1, 0, 0

    def _tokens_of(self, index: int, first: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Number and tokens of the documents of a file that have text, from number `first` on."""
        for number, raw in enumerate(self._raw(self.files[index], first), first):
            text = parse(raw, self.text.key).text
            if text.strip():
                ids = self.tokenizer.encode_document(text)
                yield number, np.array([*ids, self.tokenizer.eod_id], np.int32)

    def _raw(self, file: Path, first: int) -> Iterator[RawDocument]:
        source = DocumentSource((self.text.path,))
        documents = read_raw(
            [FilePart(file)], source.inputs, self.text.key, int(source.max_document_mb * 1e6), first_row=first
        )
        if not file.name.endswith(TABLES):
            for _ in zip(range(first), documents, strict=False):
                pass
        return documents


class StreamLoader:
    """The batches of a run whose text is tokenized while it trains.

    Args:
        content: hash of the tokenizer.
        block: number of sequences that are shuffled together, and held in memory.
        rows: of a batch of so many sequences, those this rank's graph will read; the others are left zero.
    """

    def __init__(
        self,
        text: StreamedText,
        tokenizer: Tokenizer,
        content: str,
        sizes: Sizes,
        seed: int,
        block: int,
        rows: Callable[[int], NDArray[np.int64]] = np.arange,
        *,
        eod_id: int | None,
        loss_ignore_id: int | None,
    ):
        self.text, self.tokenizer, self.sizes, self.seed, self.rows = text, tokenizer, sizes, seed, rows
        self.content, self.eod_id, self.loss_ignore_id, self.block = content, eod_id, loss_ignore_id, block
        self.first = [0]
        for step in range(len(sizes.batch_sizes)):
            self.first.append(self.first[-1] + sizes.batch_sizes[step])
        self.cursors: dict[int, Cursor] = {0: Cursor()}
        """Positions of blocks that were reached."""
        self._stream: TokenStream | None = None
        self._at = 0
        """Block that the stream comes to next."""
        self._held: dict[int, NDArray[np.int32]] = {}
        self._lock = threading.Lock()
        """Held by the thread that moves the stream or reads the positions: batches are made ahead in one of their own."""

    def first_sequence(self, step: int) -> int:
        """Number of the first sequence of a step."""
        last = len(self.first) - 2
        return self.first[min(step, last)] + max(0, step - last) * self.sizes.batch_sizes[-1]

    def sample_ids(self, step: int) -> list[int]:
        """Numbers of the sequences of `step`, before they are shuffled within blocks."""
        return list(range(self.first_sequence(step), self.first_sequence(step + 1)))

    def samples(self, step: int) -> NDArray[np.int32]:
        """Tokens of all sequences of a step, (B, T + 1).

        Raises:
            ConfigError: a document that cannot be read.
        """
        first, found = self.first_sequence(step), []
        with self._lock:
            for number in range(first, self.first_sequence(step + 1)):
                block, place = divmod(number, self.block)
                found.append(self._block(block)[place])
            for old in [block for block in self._held if block < first // self.block]:
                del self._held[old]
        return np.stack(found)

    def blank(self, step: int) -> Batch:
        """Zeros of the shapes of `step`, for which nothing is read."""
        count = self.first_sequence(step + 1) - self.first_sequence(step)
        batch = make_batch(np.zeros((count, self.sizes.longest + 1), np.int32), None, None)
        for array in batch:
            array[:] = 0
        return batch

    def batch(self, step: int) -> Batch:
        """Inputs of `step`; the loss weights count the global batch, also where only some rows are read."""
        batch = make_batch(self.samples(step), self.eod_id, self.loss_ignore_id)
        others = np.ones(len(batch.tokens), bool)
        others[self.rows(len(batch.tokens))] = False
        for array in batch:
            array[others] = 0
        return batch

    def first_token(self, step: int) -> int:
        """Number of tokens that the steps before `step` have trained on."""
        return self.first_sequence(step) * self.sizes.longest

    def describe(self, steps: int) -> str:
        """Describe the data that a run of this many steps reads."""
        files, count = len(self.text.files()), self.first_sequence(steps)
        return (
            f"data: {self.text.path}, {files} file{'s' * (files != 1)}, tokenized while training: {count:,} sequences, "
            f"shuffled within {self.block:,}"
        )

    def data_state(self) -> dict[str, Any]:
        """Return the settings that must be the same when the run is resumed."""
        return {
            "datasets": [self.text.identity()],
            "tokenizer": self.content[:16],
            "shuffle_block": self.block,
        }

    def state(self, step: int) -> dict[str, Any]:
        """Positions for a run that resumes after `step` steps. Earlier ones are dropped, but for the beginning."""
        needed = self.first_sequence(step) // self.block
        with self._lock:
            reached = max(block for block in self.cursors if block <= needed)
            self.cursors = {block: at for block, at in self.cursors.items() if not 0 < block < reached}
            return {"blocks": {str(reached): list(self.cursors[reached])}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the positions of a checkpoint.

        Raises:
            ValueError: they are not positions of these files.
        """
        files = len(self.text.files())
        for block, values in state.get("blocks", {}).items():
            cursor = Cursor(*values)
            if int(block) < 0 or min(cursor) < 0 or cursor.file >= files or len(values) != len(Cursor._fields):
                raise ValueError(f"{block}: {values} is not a position in {files} files")
            with self._lock:
                self.cursors[int(block)] = cursor

    def _block(self, block: int) -> NDArray[np.int32]:
        """Sequences of a block, shuffled, (block, T + 1)."""
        if block not in self._held:
            self._go_to(block)
            assert self._stream
            length = self.sizes.longest
            tokens = self._stream.take(self.block * length + 1)
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
            order = shuffled(np.arange(self.block), self.block, self._key(block))
            self._held[block] = windows[order]
            self._stream.advance(self.block * length)
            self._at = block + 1
            self.cursors[self._at] = self._stream.cursor
        return self._held[block]

    def _go_to(self, block: int) -> None:
        """Let the stream come to a block, from the nearest position before it that is known."""
        nearest = max(known for known in self.cursors if known <= block)
        if self._stream is None or not nearest <= self._at <= block:
            self._stream, self._at = TokenStream(self.text, self.tokenizer, self.cursors[nearest]), nearest
        while self._at < block:
            self._stream.advance(self.block * self.sizes.longest)
            self._at += 1
            self.cursors[self._at] = self._stream.cursor

    def _key(self, block: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed} block {block}".encode()).digest()[:8], "big")
