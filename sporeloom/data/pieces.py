# SPDX-License-Identifier: Apache-2.0
"""What tokenizers that read a SentencePiece model file share."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from sporeloom.errors import ConfigError

SPACE = "\u2581"
"""SentencePiece's sign for one, which it also puts in front of every text."""


class PieceTokenizer:
    """A SentencePiece model, and special tokens that are not found in ordinary text."""

    file_name = "tokenizer.model"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{path}: there is no such tokenizer model")
        try:
            self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise ConfigError(f"{path}: not a SentencePiece model") from None
        self.special: Mapping[str, int] = {}
        """Name of a special token -> its id."""
        self.prefix: list[int] = []
        """What every text begins with."""

    @property
    def vocab_size(self) -> int:
        return self.pieces.get_piece_size()

    def encode(self, text: str) -> list[int]:
        """Token ids; names of special tokens in the text are these tokens."""
        return self.prefix + encode_with(text, self.special, self.encode_text)

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text of a corpus, in which a name of a special token is text."""
        return self.prefix + self.encode_text(text)

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self.pieces.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text; tokens that stand for none are left out. What does not begin as a text does continues one: spaces in
        front of its first word are kept."""
        if [int(i) for i in ids[: len(self.prefix)]] != self.prefix:
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


LONGEST_LINE = 1000
"""Characters; SentencePiece passes lines of more than 4192 bytes over."""


def rare_characters(lines: Iterable[str], most: int) -> dict[int, None]:
    """What `str.translate` needs to drop all characters but the `most` commonest, and whitespace. SentencePiece wants a piece
    for 98 % of a text's characters at least: what has no room is not shown to it."""
    counts = Counter(character for line in lines for character in line if not character.isspace())
    return {ord(character): None for character, _ in counts.most_common()[most:]}


def train_pieces(lines: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """A SentencePiece model of at most `vocab_size` pieces, the same from the same lines. `options`: SentencePiece's.

    Raises:
        ConfigError: SentencePiece cannot make one of these texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                line[start : start + LONGEST_LINE] for line in lines for start in range(0, len(line), LONGEST_LINE)
            ),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            num_threads=1,
            input_sentence_size=200_000,
            shuffle_input_sentence=True,
            minloglevel=2,
            **{"unk_id": 0, "pad_id": -1, **options},
        )
    except RuntimeError as error:
        why = str(error).rpartition("] ")[2].strip() or str(error).strip()
        raise ConfigError(f"no vocabulary of {vocab_size} can be made of these texts: {why}") from None
    return model.getvalue()


def encode_with(text: str, special: Mapping[str, int], encode: Callable[[str], list[int]]) -> list[int]:
    """Ids of a text in which the names of special tokens stand for these."""
    if not any(name in text for name in special):
        return encode(text)
    names = sorted(special, key=len, reverse=True)
    ids: list[int] = []
    for i, part in enumerate(re.split("(" + "|".join(map(re.escape, names)) + ")", text)):
        ids += [special[part]] if i % 2 else encode(part) if part else []
    return ids
