# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer is to the rest of the project."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sporeloom.data.chat_template import TEMPLATE, ChatTemplate, TemplatedTokenizer
from sporeloom.errors import ConfigError
from sporeloom.models.adapters import base_folder, is_adapter_folder
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module


class ChatMessage(NamedTuple):
    """What one side of a conversation said."""

    role: str
    """system, user or assistant."""
    content: str


class Tokenizer(Protocol):
    """Text to token ids and back. One that knows how its model was taught to talk has `chat(messages) -> str` besides, and
    one that knows how it was taught to fill gaps `infill(before, after) -> str`: the prompts, to be encoded.
    """

    file_name: str
    """Of the tokenizer in a checkpoint folder."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int:
        """Closes every document."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_document(self, text: str) -> list[int]:
        """As `encode`, but a name of a special token in the text is text like any other where the vocabulary allows it."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the UTF-8 text in whose middle it stands, of which it may be half a character; nothing where
        `decode` leaves it out."""
        ...

    def token_name(self, token: int) -> str | None:
        """What the vocabulary calls a token."""
        ...

    def save(self, folder: Path) -> None:
        """Write `file_name` into a folder, from which such a tokenizer is loaded, and what else readers expect beside it."""


def open_tokenizer(family: str, path: Path) -> Tokenizer:
    """The tokenizer of a family at `path`, by itself.

    Raises:
        ConfigError: there is none, or it is another kind.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such tokenizer; name one with --tokenizer")
    tokenizer: Tokenizer = family_module(family, "tokenizer").open_tokenizer(path)
    return tokenizer


def folder_tokenizer(family: str, folder: Path, model: ModelConfig, named: Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint folder, or of one with token files; or the one that was `named` instead.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    return load_tokenizer(family, named or find_tokenizer(family, folder), model)


def load_tokenizer(family: str, path: Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer of a family at `path`, with the chat template beside it.

    Raises:
        ConfigError: there is none, it is another kind, or it has more pieces than the model has rows.
    """
    tokenizer = open_tokenizer(family, path)
    template = (path if path.is_dir() else path.parent) / TEMPLATE
    if template.is_file():
        tokenizer = TemplatedTokenizer(tokenizer, ChatTemplate(template))
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{path}: {tokenizer.vocab_size} pieces do not fit the model's vocab_size {model.vocab_size}; "
            "use the tokenizer the model is made for, or another vocab_size"
        )
    return tokenizer


def find_tokenizer(family: str, folder: Path) -> Path:
    """The tokenizer in a checkpoint folder, or in one of token files; where it would be, if there is none. Adapters have
    that of their model."""
    names: tuple[str, ...] = family_module(family, "tokenizer").FILE_NAMES
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and is_adapter_folder(folder):
        return find_tokenizer(family, base_folder(folder))
    return found or folder / names[0]


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> str:
    """What an assistant's answer to `messages` continues.

    Raises:
        ConfigError: the tokenizer's model was not taught to talk.
    """
    return _own_form(tokenizer, "chat", "--chat", messages)


def infill_prompt(tokenizer: Tokenizer, before: str, after: str) -> str:
    """What the text between `before` and `after` continues.

    Raises:
        ConfigError: the tokenizer's model was not taught to fill gaps.
    """
    return _own_form(tokenizer, "infill", "--suffix", before, after)


def _own_form(tokenizer: Tokenizer, name: str, flag: str, *arguments: object) -> str:
    form = getattr(tokenizer, name, None)
    if form is None:
        raise ConfigError(
            f"{flag}: {type(tokenizer).__name__} is of a model that continues text and was taught nothing else"
        )
    prompt: str = form(*arguments)
    return prompt


def content_hash(path: Path) -> str:
    """Of a tokenizer's file, or of the files in its folder."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def special_token(family: str, path: Path, name: str) -> int:
    """Id of a token that is given by its id or its name.

    Raises:
        ConfigError: there is no such tokenizer or token.
    """
    tokenizer = open_tokenizer(family, path)
    found = [int(name)] if name.isdigit() else tokenizer.encode(name)
    if len(found) != 1 or found[0] >= tokenizer.vocab_size or found[0] == tokenizer.eod_id:
        raise ConfigError(
            f"{path}: {name} is not one special token of {tokenizer.vocab_size} other than the end of documents"
        )
    return found[0]
