# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha's tokenizer: jieba's words, then SentencePiece.

Source: pcl_pangu 1.2.6.2 tokenizer/tokenization_jieba.py. Lossy by design: full-width punctuation folds to half-width,
tabs and carriage returns vanish, what the model has no piece for becomes <unk>.

The words are jieba 0.42.1's, found by rjieba (Rust, 25 times as fast) wherever the two agree; tests hold them together.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import rjieba

from pangu.open_tokenizer import END, TURN, OpenPanguTokenizer, has_turns
from pangu.two_tokenizer import OpenPanguTwoTokenizer
from sporeloom.core.errors import ConfigError
from sporeloom.data.pieces import PieceTokenizer, described, rare_characters, train_pieces

SPACE, NEWLINE = "\u2582", "\u2583"
# Ids 0..9 of the released vocabulary, in order; a trained one keeps them.
SPECIAL = ("<unk>", "<s>", "</s>", NEWLINE, SPACE, "<sep>", "<pad>", "<mask>", "<eod>", "<eot>")
_WHITE = str.maketrans({" ": "", SPACE: " ", NEWLINE: "\n"})
"""Pieces that stand for white space, and their characters: the spaces between pieces stand between jieba's words."""
NUM_BYTES = 256
MIN_VOCAB_SIZE = 14
"""Leaves room for the special pieces and a character."""
TOKENIZER_KINDS = ("unigram", "bpe")
"""Kinds that `train_tokenizer` makes, the published one first."""
# What jieba takes for one block, in which it looks for words; everything else is words of one character.
_BLOCKS = re.compile(r"([\u4E00-\u9FD5a-zA-Z0-9+#&\._%\-]+)")
_PUNCTUATION = re.compile(r"[+#&._%\-]")  # inside a block: rjieba cuts decimals elsewhere
_LINE_BREAK = re.compile(r"(\r\n)")
# Besides, rjieba counts the rarer ideographs to its blocks.
_THEY_DIFFER = re.compile(r"[+#&._%\-\u3400-\u4DBF\u9FD6-\u9FFF\uF900-\uFAFF\U00020000-\U0003FFFF]")


class PanGuTokenizer(PieceTokenizer):
    """Reads a SentencePiece model file (the released vocab.model, or one of `train_tokenizer`)."""

    eod_id = 9
    pad_id = 6

    def __init__(self, path: str | Path):
        super().__init__(path)
        if not is_alpha(self):
            raise ConfigError(f"{path}: not PanGu-alpha's tokenizer but {described(self.file)}")
        self._bytes: dict[int, bytes] = {}

    def encode_text(self, text: str) -> list[int]:
        return super().encode_text(segment(text))

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode_text(text)  # spaces between words have no meaning

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            found = super().token_bytes(token)
            is_half = not found.isascii() and self.pieces.is_byte(token)
            found = found if is_half else found.decode().translate(_WHITE).encode()
            self._bytes[token] = found
        return found


def is_alpha(tokenizer: PieceTokenizer) -> bool:
    """Whether a SentencePiece model begins with PanGu-alpha's special pieces."""
    return tuple(name for name, _ in tokenizer.file.kinds[: len(SPECIAL)]) == SPECIAL


def segment(text: str) -> str:
    """Words with spaces between, white space as visible signs: the input of SentencePiece."""
    return " ".join(cut(text.replace(" ", SPACE))).replace("\n", NEWLINE)


def cut(text: str) -> list[str]:
    """The words of `jieba.cut(text, cut_all=False)`."""
    if not _THEY_DIFFER.search(text):
        return rjieba.cut(text)
    words: list[str] = []
    for i, block in enumerate(_BLOCKS.split(text)):
        if i % 2 == 0:
            words += [part for part in _LINE_BREAK.split(block) for part in ([part] if part == "\r\n" else part)]
        elif _PUNCTUATION.search(block):
            words += _jieba().cut(block, cut_all=False)
        else:
            words += rjieba.cut(block)
    return words


@cache
def _jieba() -> Any:
    """jieba itself, which takes a second to load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports pkg_resources
        jieba = import_module("jieba")
    jieba.setLogLevel(logging.WARNING)
    return jieba


def train_tokenizer(documents: Iterable[str], vocab_size: int, kind: str = TOKENIZER_KINDS[0]) -> bytes:
    """Train a SentencePiece model of at most `vocab_size` pieces, in the released vocabulary's form.

    Where there is room it has a piece for each byte, so that no character is unknown.

    Raises:
        ConfigError: `vocab_size` leaves no room for characters.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"a vocabulary of {vocab_size} is too small for {len(SPECIAL)} special pieces and characters")
    lines = [segment(line) for document in documents for line in document.split("\n") if line.strip()]
    with_bytes = vocab_size >= 2 * NUM_BYTES
    room = int(0.8 * vocab_size) - len(SPECIAL) - with_bytes * NUM_BYTES  # the rest is for pieces of several characters
    rare = rare_characters(lines, room)
    return train_pieces(
        (line.translate(rare) for line in lines),
        vocab_size,
        model_type=kind,
        character_coverage=1.0,
        byte_fallback=with_bytes,
        user_defined_symbols=list(SPECIAL[3:]),
        bos_id=1,
        eos_id=2,
    )


def open_tokenizer(path: str | Path) -> PieceTokenizer | OpenPanguTwoTokenizer:
    """Open the tokenizer of PanGu-alpha or of openPangu in a file.

    Raises:
        ConfigError: neither a SentencePiece model nor a tokenizer.json, or another's.
    """
    if Path(path).suffix == ".json":
        return OpenPanguTwoTokenizer(path)
    found = PieceTokenizer(path)
    if is_alpha(found):
        return PanGuTokenizer(path)
    if has_turns(found):
        return OpenPanguTokenizer(path)
    raise ConfigError(
        f"{path}: {described(found.file)}: neither PanGu-alpha's, which begins with {', '.join(map(repr, SPECIAL))}, nor "
        f"openPangu's, which has {TURN} and {END} and a token that begins a text; name the model's own with --tokenizer"
    )


FILE_NAMES = ("tokenizer.model", "tokenizer.json")
