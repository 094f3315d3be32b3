# SPDX-License-Identifier: Apache-2.0
"""Common parts of tokenizers that read a SentencePiece model file."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes
from sporeloom.data.passages import MAX_PASSAGE_CHARS
from sporeloom.data.piece_file import BYTE, CONTROL, UNKNOWN, USER_DEFINED, PieceFile, read_piece_file
from sporeloom.data.special_tokens import SpecialTokens

SPACE = "\u2581"
"""SentencePiece's sign for a space, which it also adds before every text."""
MARKUP = re.compile(r"<[^<>\s]+>:?|\[[^\[\]\s]+\]")
"""Names of special tokens among user-defined pieces, which may be text as well (runs of spaces, line breaks)."""


class PieceTokenizer(SpecialTokens):
    """A SentencePiece model, with special tokens that are not found in ordinary text."""

    file_name = "tokenizer.model"
    eod_id: int

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{path}: there is no such tokenizer model")
        try:
            content = read_bytes(self.path)
            self.pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.file = read_piece_file(content)
        except (RuntimeError, OSError, ValueError):
            raise ConfigError(f"{path}: not a SentencePiece model") from None

    @property
    def vocab_size(self) -> int:
        return self.pieces.get_piece_size()

    @cached_property
    def control(self) -> dict[str, int]:
        """Every special token of the file: name -> id."""
        return {
            name: i
            for i, (name, kind) in enumerate(self.file.kinds)
            if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and MARKUP.fullmatch(name))
        }

    @property
    def token_names(self) -> dict[int, str]:
        return {i: name for name, i in {**self.control, **self.special}.items()}

    @property
    def template_tokens(self) -> dict[str, int]:
        return {**self.control, **self.special}

    @property
    def variables(self) -> dict[str, str]:
        """Special tokens by the names of chat templates, where no file gives others."""
        names = self.token_names
        known = {"bos_token": self.prefix[0] if len(self.prefix) == 1 else -1, "eos_token": self.eod_id}
        known["unk_token"] = self.pieces.unk_id()
        return {name: names[token] for name, token in known.items() if token in names}

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        if not self.file.adds_space:
            return self.encode_text(text)
        if text.startswith(" "):  # the space added before every text is this one
            return self.encode_text(text[1:])
        ids: list[int] = self._continuing.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; tokens without text are left out. Tokens that are not the start of a text continue one:
        spaces in front of its first word are kept."""
        if [int(i) for i in ids[: len(self.prefix)]] != list(self.prefix):
            return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")
        own = [int(i) for i in ids if 0 <= int(i) < self.pieces.get_piece_size()]
        text: str = self.pieces.decode(own)
        return text

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.pieces.get_piece_size() or self.pieces.is_control(token):
            return b""
        piece: str = self.pieces.id_to_piece(token)
        if self.pieces.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0xE9>
        return str(self.pieces.decode([token]) if self.pieces.is_unknown(token) else piece.replace(SPACE, " ")).encode()

    def token_name(self, token: int) -> str | None:
        return self.pieces.id_to_piece(token) if 0 <= token < self.pieces.get_piece_size() else None

    def save(self, folder: Path) -> None:
        """Copy the SentencePiece model into a checkpoint folder."""
        shutil.copyfile(self.path, folder / self.file_name)

    @cached_property
    def _plain(self) -> Any:
        """The model for which names of special tokens are text."""
        found = self._found_in_text
        return _processor(self.file.with_control(found, self.file.adds_space)) if found else self.pieces

    @cached_property
    def _continuing(self) -> Any:
        """The same model, without the space before every text."""
        return _processor(self.file.with_control(self._found_in_text, adds_space=False))

    @property
    def _found_in_text(self) -> list[str]:
        """Special tokens that SentencePiece makes of their names."""
        return [name for name, i in self.control.items() if self.file.kinds[i][1] == USER_DEFINED]


def _processor(content: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def has_bytes(file: PieceFile) -> bool:
    """Whether characters without a piece are spelled in bytes."""
    return sum(kind == BYTE for _, kind in file.kinds) == 256


def described(file: PieceFile) -> str:
    """Describe a model file to a user who named the wrong one."""
    first = ", ".join(repr(name) for name, _ in file.kinds[:5])
    return f"a SentencePiece model of {len(file.kinds):,} pieces that begin with {first}"


def rare_characters(lines: Iterable[str], most: int) -> dict[int, None]:
    """Argument of `str.translate` that drops all characters but the `most` commonest, and whitespace. SentencePiece needs
    a piece for at least 98 % of a text's characters: those without room are removed before."""
    counts = Counter(character for line in lines for character in line if not character.isspace())
    return {ord(character): None for character, _ in counts.most_common()[most:]}


RESERVED = str.maketrans({"\u2585": " "})
"""SentencePiece leaves out whole passages with this character, which its log has for unknown ones."""


def train_pieces(lines: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """Train a SentencePiece model of at most `vocab_size` pieces, the same from the same lines, of which all are used:
    SentencePiece's own sample differs from run to run. `options`: SentencePiece's.

    Raises:
        ConfigError: SentencePiece cannot make one of these texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                line[start : start + MAX_PASSAGE_CHARS].translate(RESERVED)
                for line in lines
                for start in range(0, len(line), MAX_PASSAGE_CHARS)
            ),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
            **{"unk_id": 0, "pad_id": -1, **options},
        )
    except RuntimeError as error:
        why = str(error).rpartition("] ")[2].strip() or str(error).strip()
        if "sentences_.empty()" in why or "all_chars_count" in why:
            why = "they have no characters that a piece can be made of"
        raise ConfigError(f"no vocabulary of {vocab_size} can be made of these texts: {why}") from None
    return model.getvalue()
