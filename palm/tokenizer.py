# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as PaLM's: SentencePiece that loses nothing. White space is kept, digits stand alone, and what the vocabulary
does not have is spelled in bytes. Source: arXiv:2204.02311 section 2.2. Google's own was not published.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.data.pieces import SPACE, PieceTokenizer, described, has_bytes, rare_characters, train_pieces

END = "</s>"
BASE_PIECES = 3 + 256 + 10
"""Special pieces, bytes and digits."""
MIN_VOCAB_SIZE = BASE_PIECES + 16
TOKENIZER_KINDS = ("bpe", "unigram")
"""Kinds that `train_tokenizer` makes, the published one first."""


class PaLMTokenizer(PieceTokenizer):
    """Reads a SentencePiece model of `train_tokenizer`. `decode(encode(text))` is the text."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.eod_id: int = self.pieces.eos_id()
        loses = {
            "has no token that ends a text": self.eod_id < 0,
            "does not spell what it lacks in bytes": not has_bytes(self.file),
            f"changes text by the rule {self.file.normalization}": self.file.normalization != "identity",
            "adds a space before every text": self.file.adds_space,
            "removes spaces": self.file.drops_spaces,
        }
        if why := [reason for reason, holds in loses.items() if holds]:
            raise ConfigError(f"{path}: not PaLM's tokenizer: {described(self.file)}, which {', '.join(why)}")


def train_tokenizer(documents: Iterable[str], vocab_size: int, kind: str = TOKENIZER_KINDS[0]) -> bytes:
    """Train a SentencePiece model of at most `vocab_size` pieces: <unk> 0, </s> 1, a piece for each byte.

    Raises:
        ConfigError: `vocab_size` leaves no room for bytes and digits.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small for {BASE_PIECES} bytes, digits and special pieces and some "
            f"characters; give {MIN_VOCAB_SIZE} or more"
        )
    texts = list(documents)
    rare = rare_characters(texts, int(0.8 * (vocab_size - BASE_PIECES)))  # the rest is for pieces of several characters
    return train_pieces(
        (text.translate(rare) for text in texts) if rare else texts,
        vocab_size,
        model_type=kind,
        character_coverage=0.9995,
        required_chars=SPACE,  # also where the texts have no spaces: the bytes of this sign would be decoded as the sign
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        eos_id=1,
        bos_id=-1,
    )


open_tokenizer = PaLMTokenizer
FILE_NAMES = ("tokenizer.model",)
