# SPDX-License-Identifier: Apache-2.0
"""openPangu 2.0's tokenizer: byte-level BPE, with the markers of turns, reasoning and tool calls among its added tokens.

Source: openPangu-2.0's tokenizer.json as described by its readers: 148,899 tokens and 701 added ones, no normalizer. The
released file is not at hand here: this is tested on one made in its format. How turns are written is left to the folder's
chat template.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_utf8
from sporeloom.core.lines import first_line
from sporeloom.data.byte_level import bytes_of
from sporeloom.data.special_tokens import SpecialTokens

START, PAD, END = "<|pangu_text_start|>", "<|pangu_text_end|>", "<|message_end|>"
MARKERS = (
    *(START, PAD, "<|message_start|>", END),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"),
)
"""Added tokens by which the file is known; consecutive ids from 148899 on in the released vocabulary."""


class OpenPanguTwoTokenizer(SpecialTokens):
    """Reads the tokenizer.json of openPangu 2.0. A document ends as a message does, by the model's end token.

    Raises:
        ConfigError: not such a file.
    """

    file_name = "tokenizer.json"
    benchmark_form = "chat"
    """Prompt form of HumanEval-X for such a model."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._whole = tokenizers.Tokenizer.from_str(read_utf8(self.path))
            # Without added tokens: in ordinary text their names are text.
            self._text = tokenizers.Tokenizer(self._whole.model)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises plain exceptions
            raise ConfigError(f"{path}: not a tokenizer: {first_line(error)}") from None
        added = self._whole.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items()}
        if missing := [name for name in MARKERS if name not in self.special]:
            raise ConfigError(f"{path}: not openPangu 2.0's tokenizer: it has no special token {', '.join(missing)}")
        self._hidden = {i for i, token in added.items() if token.special}
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (value := getattr(self._whole, part)) is not None:
                setattr(self._text, part, value)
        self.prefix = self._before_texts()
        self.eod_id: int = self.special[END]

    def _before_texts(self) -> list[int]:
        """Tokens that the file's post-processor puts before a text."""
        plain = self._whole.encode("a", add_special_tokens=False).ids
        whole = self._whole.encode("a", add_special_tokens=True).ids
        return list(whole[: whole.index(plain[0])])

    @property
    def vocab_size(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return max(self._whole.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def variables(self) -> dict[str, str]:
        """Special tokens by the names of chat templates, where no file gives others."""
        return {"bos_token": START, "eos_token": PAD, "pad_token": PAD}

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; tokens that the file declares special are left out."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        name = None if token in self._hidden else self.token_name(token)
        if name is None:
            return b""
        return name.encode() if name in self.special else bytes_of(name)

    def token_name(self, token: int) -> str | None:
        name: str | None = self._whole.id_to_token(token) if 0 <= token < self._size else None
        return name

    def save(self, folder: Path) -> None:
        """Copy the file into a checkpoint folder."""
        shutil.copyfile(self.path, folder / self.file_name)
