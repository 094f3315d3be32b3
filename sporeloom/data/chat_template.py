# SPDX-License-Identifier: Apache-2.0
"""Chat templates: how a conversation is formatted for a model, from the files of its folder.

Source: transformers' `apply_chat_template`, whose templates these are: `messages`, `add_generation_prompt`, special tokens by
name (`bos_token`), `tools`, `documents` (None), and variables of the caller (`enable_thinking`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sporeloom.core.bounded_process import BoundedProcess
from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import check_file
from sporeloom.core.reader import parse_json
from sporeloom.data.documents import decode_text
from sporeloom.data.special_tokens import Span, SpecialTokens, joined

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
"""File name in a model folder."""
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Names that variables must not have."""
RENDERER = BoundedProcess("sporeloom.data.template_worker", "to render")
"""The renderer of this process."""
_CODE = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class ChatTemplateError(ConfigError):
    """A template refuses a conversation, or takes too much time. `reason`: without the name of the file, which
    clients need not know."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.reason = reason


class ChatTemplate:
    """A valid chat template.

    Args:
        path: where it stands.
        text: of the template, where the file holds more; without it, the file is the template.
        special: special tokens it may write, by the names templates call them; a list of them is `additional_special_tokens`.

    Raises:
        ConfigError: the file is missing or no template.
    """

    def __init__(self, path: Path, text: str | None = None, special: Mapping[str, Any] | None = None):
        self.path, self.text, self.special = path, decode_text(path) if text is None else text, dict(special or {})
        self._ask()

    def reads(self, name: str) -> bool:
        """Whether the template's expressions name a variable."""
        return any(re.search(rf"(?<![.\w]){name}\b", _LITERAL.sub("''", code)) for code in _CODE.findall(self.text))

    def prompt(self, messages: Sequence[Any], variables: Mapping[str, Any] | None = None) -> str:
        """Render a conversation (a role and a content each) up to where the assistant's answer begins.

        Raises:
            ConfigError: as `spans`.
        """
        return joined(self.spans(messages, True, variables))

    def spans(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[Span]:
        """A conversation up to the assistant's answer, as spans by author.

        `tools`: functions the assistant may call, in the form of OpenAI's API.

        Raises:
            ChatTemplateError: the template does not take these messages, or takes too long.
            ConfigError: a variable's name is taken.
        """
        if wrong := [name for name in variables or {} if name in RESERVED]:
            raise ConfigError(f"a variable of a chat template cannot be named {wrong[0]}")
        plain = [{"role": each.role, "content": each.content, **(each.more or {})} for each in messages]
        found = self._ask(plain, add_generation_prompt, variables, tools)
        text, at, spans = found["text"], 0, list[Span]()
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ChatTemplateError(self.path, "the text contains half a character (a lone surrogate)")
        for place, length in enumerate(found["runs"]):
            spans += [Span(text[at : at + length], bool(place % 2))] if length else []
            at += length
        return spans

    def _ask(
        self,
        messages: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        try:
            return RENDERER.ask(
                template=self.text,
                messages=messages,
                special=self.special,
                variables=dict(variables or {}),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except ConfigError as error:
            kind = "no chat template" if messages is None else "chat template"
            raise ChatTemplateError(self.path, f"{kind}: {error.problems[0]}") from None


class TemplatedTokenizer(SpecialTokens):
    """A tokenizer of a chat model, with its template.

    Raises:
        ConfigError: the template writes a special token that the tokenizer does not have, though a file of its folder
            names it.
    """

    benchmark_form = "chat"
    template: ChatTemplate

    def __init__(self, tokenizer: Any, template: ChatTemplate):
        self._tokenizer, self.template = tokenizer, template
        self.special, self.prefix, self.infill = tokenizer.template_tokens, tokenizer.prefix, tokenizer.infill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def chat(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[Span]:
        return self.template.spans(messages, add_generation_prompt, variables, tools)

    @property
    def token_names(self) -> dict[int, str]:
        names: dict[int, str] = self._tokenizer.token_names
        return names

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_text(text)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_continuation(text)
        return ids

    def encode_prompt(self, spans: Sequence[Span]) -> list[int]:
        """Token ids of a rendered template, preceded by the prefix, if the template does not write it itself."""
        names = self.token_names
        own = "".join(names.get(token, "") for token in self.prefix)
        spans = list(spans)
        if own and spans and spans[0].is_template and spans[0].text.startswith(own):
            return [*self.prefix, *self.encode_spans([Span(spans[0].text[len(own) :], True), *spans[1:]])]
        ids = self.encode_spans(spans)
        return ids if set(self.prefix) & set(ids) else [*self.prefix, *ids]

    def save(self, folder: Path) -> None:
        self._tokenizer.save(folder)
        (folder / TEMPLATE).write_text(self.template.text, encoding="utf-8")
        if self.template.special == self._tokenizer.variables:
            return
        written = folder / TOKENIZER_CONFIG
        values = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
        values |= {name: self.template.special.get(name) for name in VARIABLES}
        values |= {ADDITIONAL: self.template.special.get(ADDITIONAL, [])}
        written.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_variables(flag: str, text: str | None) -> dict[str, Any]:
    """Parse the variables for a chat template that a flag gives as a JSON object.

    Raises:
        ConfigError: something else, or a name that the template has for something else.
    """
    values = {} if text is None else parse_json(text, flag)
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} must be a JSON object, as '{{\"enable_thinking\": false}}', got {text}")
    if wrong := [name for name in values if name in RESERVED]:
        raise ConfigError(f"{flag}: a variable cannot be named {wrong[0]}")
    return values


def with_template(tokenizer: Any, folder: Path, named: Path | None = None) -> Any:
    """Add the chat template of its folder to a tokenizer, or the one that was `named` instead; unchanged if there
    is none.

    As transformers: chat_template.jinja, else `chat_template` of tokenizer_config.json, one or the `default` of several.
    Special tokens by name come from there and from special_tokens_map.json, else from the tokenizer.

    Raises:
        ConfigError: a file that cannot be read.
    """
    for file in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, TEMPLATE):
        check_file(folder / file)
    if named:
        check_file(named)
    config, path = _read(folder / TOKENIZER_CONFIG), folder / TOKENIZER_CONFIG
    text = config.get("chat_template")
    if named or (folder / TEMPLATE).is_file():
        path = named or folder / TEMPLATE
        text = decode_text(path)
    if text is None:
        return tokenizer
    found = TemplatedTokenizer(tokenizer, ChatTemplate(path, _default(path, text), _special(tokenizer, folder, config)))
    _check_added(found, folder, config)
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = parse_json(read_text(path), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return values


def _default(path: Path, value: Any) -> str:
    """Find the template among those of a configuration."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        if not isinstance(named.get("default"), str):
            names = ", ".join(map(str, named)) or "none"
            raise ConfigError(
                f"{path}: chat_template: of several templates the one named default is used; there are {names}; put one into "
                f"{TEMPLATE}, or name it with --chat-template"
            )
        value = named["default"]
    if not isinstance(value, str):
        raise ConfigError(f"{path}: chat_template must be a text, or a list of names and templates")
    return value


def _special(tokenizer: Any, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by the names that templates use."""
    found: dict[str, Any] = dict(tokenizer.variables)
    # As transformers: the older file counts where the newer one does not list the tokens.
    older = {} if "added_tokens_decoder" in config else _read(folder / SPECIAL_TOKENS_MAP)
    for source in (config, older):
        for name in VARIABLES:
            if name in source:
                found[name] = _token_text(source[name])
        if isinstance(source.get(ADDITIONAL), list):
            found[ADDITIONAL] = [_token_text(token) for token in source[ADDITIONAL]]
    return {name: value for name, value in found.items() if value}


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _check_added(tokenizer: TemplatedTokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens that the configuration adds to the vocabulary and that the template writes."""
    added = config.get("added_tokens_decoder")
    written = joined(
        [Span(tokenizer.template.text, True), *(Span(str(v), True) for v in tokenizer.template.special.values())]
    )
    for number, token in added.items() if isinstance(added, dict) else ():
        name = _token_text(token)
        if name and name in written and tokenizer.encode_spans([Span(name, True)]) != [int(number)]:
            raise ConfigError(
                f"{folder / TOKENIZER_CONFIG}: adds {name!r} as token {number}, which the chat template writes, but the "
                "tokenizer has no such token; use the tokenizer the model is made for"
            )
