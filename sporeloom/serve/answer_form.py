# SPDX-License-Identifier: Apache-2.0
"""The form of one request's answers: how they are parsed, where they end, what is enforced."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property

from sporeloom.data.tokenizer import Prompt
from sporeloom.inference.formats import MarkedTokenizer
from sporeloom.inference.parsing import MessageParser, after_first_call
from sporeloom.inference.sampling import Processor
from sporeloom.inference.session import StopConditions
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError
from sporeloom.serve.requests import ChatRequest
from sporeloom.serve.structured import Grammar, answer_grammars
from sporeloom.serve.thinking import ThinkingBudget


class ChatAnswerForm:
    """Form of the answers to a conversation.

    Args:
        stop: conditions that end an answer of plain text.

    Raises:
        RequestError: the model's answers cannot have it.
    """

    def __init__(self, model: ServedModel, asked: ChatRequest, prompt: Prompt, stop: StopConditions):
        self.model, self.asked, self.prompt = model, asked, prompt
        self.form = replace(model.form, calls=model.form.calls if asked.tools.offered else None)
        reasoning, calls = self.form.reasoning, self.form.calls
        if asked.thinking_budget is not None and reasoning is None:
            raise RequestError(
                400, f"{model.name} has no reasoning that thinking_token_budget could limit", "thinking_token_budget"
            )
        self.is_open = reasoning is not None and prompt.text.rstrip().endswith(reasoning.start)
        """Whether the prompt has opened the reasoning."""
        self.grammars: list[Grammar] = answer_grammars(
            model.tokenizer, self.form, prompt.text, asked.structure, asked.tools
        )
        markers = [each for each in (reasoning, calls and calls.markers) if each]
        self._names = [name for each in markers for name in (each.start, each.end)]
        self.stop = replace(stop, tokenizer=self._tokenizer) if markers else stop
        if calls and not asked.tools.is_parallel and not self.grammars:
            self.stop = replace(self.stop, rule=after_first_call(self.form, self.is_open))

    @cached_property
    def _tokenizer(self) -> MarkedTokenizer:
        return MarkedTokenizer(self.model.tokenizer, self._names)

    def parser(self, index: int) -> MessageParser | None:
        """Parser of the choice with this index; None: its text is the message."""
        if not self._names:
            return None
        most = None if self.asked.tools.is_parallel else 1
        return MessageParser(self.form, self.is_open, self._new_id(index), bool(self.grammars), most)

    def _new_id(self, index: int) -> CallIds:
        return CallIds(self.prompt.tokens, self.asked.seed, index)

    def budget(self) -> tuple[Processor, ...]:
        """Processors of one choice that limit its reasoning."""
        if self.asked.thinking_budget is None:
            return ()
        assert self.form.reasoning
        return (ThinkingBudget(self._tokenizer, self.form.reasoning, self.is_open, self.asked.thinking_budget),)


class CallIds:
    """Ids of calls: the same for the same request, as chat templates may write them into the next prompt, and others in
    every turn of a conversation."""

    def __init__(self, prompt: tuple[int, ...], seed: int, choice: int):
        self._key = repr((prompt, seed, choice)).encode()

    def __call__(self, index: int) -> str:
        return f"call_{hashlib.sha256(self._key + str(index).encode()).hexdigest()[:24]}"
