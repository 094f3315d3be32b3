# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a model folder's chat_template.jinja says how a conversation is written for a model.

Source: transformers' `apply_chat_template`, whose templates these are: `messages`, `add_generation_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sporeloom.data.documents import decode_text
from sporeloom.errors import ConfigError

TEMPLATE = "chat_template.jinja"
"""In a model folder."""


class ChatTemplate:
    """A template that was read and found right.

    Raises:
        ConfigError: the file is missing or no template.
    """

    def __init__(self, path: Path):
        self.path, self.text = path, decode_text(path)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(self.text)
        except TemplateError as error:
            raise ConfigError(f"{path}: no chat template: {error}") from None

    def prompt(self, messages: Sequence[Any]) -> str:
        """What an assistant's answer to `messages` (of a role and a content each) continues.

        Raises:
            ConfigError: the template does not take these messages.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(f"{self.path}: {error}") from None


class TemplatedTokenizer:
    """A tokenizer whose model was taught to talk as a template says."""

    benchmark_form = "chat"
    """How HumanEval-X asks such a model."""

    def __init__(self, tokenizer: Any, template: ChatTemplate):
        self._tokenizer, self._template = tokenizer, template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def chat(self, messages: Sequence[Any]) -> str:
        return self._template.prompt(messages)

    def save(self, folder: Path) -> None:
        self._tokenizer.save(folder)
        (folder / TEMPLATE).write_text(self._template.text, encoding="utf-8")


def _refuse(message: str) -> None:
    raise TemplateError(message)
