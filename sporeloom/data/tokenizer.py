# SPDX-License-Identifier: Apache-2.0
"""The tokenizer interface that the rest of the project uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes
from sporeloom.core.hashes import HASHES, check_file
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer, with_template
from sporeloom.data.special_tokens import Span, joined
from sporeloom.models.adapters import base_folder, is_adapter_folder
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module


class ChatMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    more: Mapping[str, Any] | None = None
    """Further fields, for chat templates: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`."""


class Prompt(NamedTuple):
    """A prompt for a model to continue."""

    text: str
    """Text for messages: special tokens in it cannot be distinguished from their names."""
    tokens: tuple[int, ...]


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    file_name: str
    """File name of the tokenizer in a checkpoint folder."""
    prefix: Sequence[int]
    """Tokens that every text begins with."""
    template: ChatTemplate | None
    """The chat template; None where the form of a chat is built in, or there is none."""
    benchmark_form: Literal["chat"] | None
    """Prompt form of HumanEval-X for the model; None: that of its family."""

    @property
    def chat(self) -> Callable[..., list[Span]] | None:
        """For a chat model: the prompt of `(messages, add_generation_prompt)`, as spans."""
        ...

    @property
    def infill(self) -> Callable[..., list[Span]] | None:
        """For a model that was trained to fill in the middle: the prompt of `(before, after)`, as spans."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int:
        """Token that ends every document."""
        ...

    @property
    def token_names(self) -> dict[int, str]:
        """Names of the special tokens, for messages."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a complete prompt: names of special tokens in it become these tokens."""
        ...

    def encode_document(self, text: str) -> list[int]:
        """Like `encode`, but a name of a special token in the text is text like any other."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Like `encode_document`, without the prefix."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """Encode plain text that continues other text: the tokens that a model has to generate for it."""
        ...

    def encode_prompt(self, spans: Sequence[Span]) -> list[int]:
        """Encode a conversation, or another form of prompt."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to the UTF-8 text around it, of which they may be half a character; empty where
        `decode` leaves it out."""
        ...

    def token_name(self, token: int) -> str | None:
        """Name of a token in the vocabulary."""
        ...

    def save(self, folder: Path) -> None:
        """Write `file_name` into a folder, from which such a tokenizer is loaded, and further files that other
        readers expect."""


def open_tokenizer(family: str, path: Path) -> Tokenizer:
    """Open the tokenizer of a family at `path`, without a chat template.

    Raises:
        ConfigError: there is none, or it is another kind.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such tokenizer; name one with --tokenizer")
    check_file(path)
    tokenizer: Tokenizer = family_module(family, "tokenizer").open_tokenizer(path)
    return tokenizer


def folder_tokenizer(
    family: str, folder: Path, model: ModelConfig, named: Path | None = None, chat_template: Path | None = None
) -> Tokenizer:
    """Open the tokenizer of a checkpoint folder, or of one with token files; or the one that was `named` instead.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    return load_tokenizer(family, named or find_tokenizer(family, folder), model, chat_template)


def load_tokenizer(family: str, path: Path, model: ModelConfig, chat_template: Path | None = None) -> Tokenizer:
    """Open the tokenizer of a family at `path`, with the chat template next to it, or with another.

    Raises:
        ConfigError: there is none, it is another kind, it has more pieces than the model has rows, or it ends documents with
            another token.
    """
    tokenizer: Tokenizer = with_template(
        open_tokenizer(family, path), path if path.is_dir() else path.parent, chat_template
    )
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{path}: {tokenizer.vocab_size} pieces do not fit the model's vocab_size {model.vocab_size}; "
            "use the tokenizer the model is made for, or another vocab_size"
        )
    if tokenizer.eod_id != model.eod_id:
        raise ConfigError(
            f"{path}: this tokenizer ends documents with token {tokenizer.eod_id}, the model with eod_id {model.eod_id}; use "
            "the tokenizer the model is made for; for a new model set eod_id and loss_ignore_id in --config"
        )
    return tokenizer


def find_tokenizer(family: str, folder: Path) -> Path:
    """Path of the tokenizer in a checkpoint folder, or in one of token files; where it would be, if there is none.
    Adapters have that of their model."""
    names: tuple[str, ...] = family_module(family, "tokenizer").FILE_NAMES
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and is_adapter_folder(folder):
        return find_tokenizer(family, base_folder(folder))
    return found or folder / names[0]


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """Encode the prompt for an assistant's answer to `messages`: the same tokens in training and in inference.

    `variables`: of the chat template, besides transformers' own. `tools`: functions in the form of OpenAI's API.

    Raises:
        ConfigError: the tokenizer's model is a base model, or has another chat format.
    """
    form = _own_form(tokenizer, tokenizer.chat, "--chat")
    if isinstance(tokenizer, TemplatedTokenizer):
        return _prompt(tokenizer, form(messages, add_generation_prompt, variables, tools))
    kind = type(tokenizer).__name__
    if variables:
        raise ConfigError(f"{kind} has no chat template, so no variables for one: {', '.join(variables)}")
    if tools or any(message.more or message.role == "tool" for message in messages):
        raise ConfigError(f"{kind} has no chat template, which would say how tools and their results are written")
    return _prompt(tokenizer, form(messages, add_generation_prompt))


def infill_prompt(tokenizer: Tokenizer, before: str, after: str) -> Prompt:
    """Encode a prompt to fill the gap between `before` and `after`.

    Raises:
        ConfigError: the tokenizer's model was not trained to fill in the middle.
    """
    return _prompt(tokenizer, _own_form(tokenizer, tokenizer.infill, "--suffix")(before, after))


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Encode a complete prompt: names of special tokens in it become these tokens."""
    return Prompt(text, tuple(tokenizer.encode(text)))


def _own_form(tokenizer: Tokenizer, form: Callable[..., list[Span]] | None, flag: str) -> Callable[..., list[Span]]:
    if form is None:
        raise ConfigError(
            f"{flag}: {type(tokenizer).__name__} belongs to a base model, which was trained on plain text only"
        )
    return form


def _prompt(tokenizer: Tokenizer, spans: Sequence[Span]) -> Prompt:
    return Prompt(joined(spans), tuple(tokenizer.encode_prompt(spans)))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Format a token for messages: a special one by its name, in marks that distinguish it from text."""
    name = tokenizer.token_names.get(token)
    return tokenizer.decode([token]) if name is None else f"«{name}»"


def content_hash(path: Path) -> str:
    """Hash of a tokenizer's file, or of the files in its folder."""
    files = sorted(f for f in path.iterdir() if f.is_file() and f.name != HASHES) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(hashlib.sha256(read_bytes(file)).digest() for file in files)).hexdigest()


def special_token(family: str, path: Path, name: str) -> int:
    """Id of a token that is given by its id or its name.

    Raises:
        ConfigError: there is no such tokenizer or token.
    """
    tokenizer = open_tokenizer(family, path)
    names = {text: token for token, text in tokenizer.token_names.items()}
    found = [int(name)] if name.isdigit() else [names[name]] if name in names else tokenizer.encode_text(name)
    if len(found) != 1 or found[0] >= tokenizer.vocab_size or found[0] == tokenizer.eod_id:
        raise ConfigError(
            f"{path}: {name} is not one special token of {tokenizer.vocab_size} other than the end of documents"
        )
    return found[0]
