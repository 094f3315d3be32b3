# SPDX-License-Identifier: Apache-2.0
"""Limits of a model's reasoning: the variables of its chat template, and a maximum number of tokens."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.formats import Markers, thinking_variable
from sporeloom.inference.sampling import History, Logits
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError

MAX_CHARACTER = 3
"""Tokens that may complete a character, of up to four bytes."""


def template_variables(model: ServedModel, variables: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Variables of a request, with its `reasoning_effort` as the model's chat template knows it.

    Raises:
        RequestError: the template does not know it.
    """
    if effort is None:
        return variables
    template, switch = model.tokenizer.template, thinking_variable(model.tokenizer)
    if template is not None and template.reads("reasoning_effort"):
        return {"reasoning_effort": effort, **variables}
    if switch:
        return {switch: effort != "none", **variables}
    raise RequestError(
        400,
        f"the chat template of {model.name} reads neither reasoning_effort nor a variable that switches reasoning off; leave "
        "reasoning_effort out",
        "reasoning_effort",
    )


def can_switch(model: ServedModel) -> bool:
    """Whether requests can switch the model's reasoning on and off."""
    template = model.tokenizer.template
    return template is not None and (
        template.reads("reasoning_effort") or thinking_variable(model.tokenizer) is not None
    )


class ThinkingBudget:
    """A processor of logits that ends the reasoning of one text after `budget` tokens: it allows the end marker only. A
    character of several tokens is completed first.

    Args:
        tokenizer: which shows the markers as text.
        is_open: whether the prompt has opened the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Markers, is_open: bool, budget: int):
        self._tokenizer, self._budget = tokenizer, budget
        self._start, self._end = markers.start.encode(), markers.end.encode()
        ids = {name: token for token, name in tokenizer.token_names.items()}
        special = ids.get(markers.end)
        self._end_ids = tokenizer.encode_continuation(markers.end) if special is None else [special]
        self._first: int | None = 0 if is_open else None  # token of the reasoning
        self._forced: int | None = None  # first token of the end marker
        self._bytes, self._num_read, self._is_over = b"", 0, False

    def __call__(self, logits: Logits, history: History) -> Logits:
        self._read(history)
        if self._is_over or self._first is None:
            return logits
        count = len(history.generated)
        if self._forced is None and self._is_due(count - self._first - self._budget):
            self._forced = count
        if self._forced is None:
            return logits
        place = count - self._forced
        if place >= len(self._end_ids):
            self._is_over = True
            return logits
        changed = np.full_like(logits, -np.inf)
        changed[self._end_ids[place]] = 0.0
        return changed

    def _is_due(self, excess: int) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._bytes[-MAX_CHARACTER - 1 :])
        return excess >= 0 and (not decoder.getstate()[0] or excess >= MAX_CHARACTER)

    def _read(self, history: History) -> None:
        for token in history.generated[self._num_read :]:
            self._bytes += self._tokenizer.token_bytes(token)
            self._num_read += 1
            if self._first is None and self._bytes.lstrip().startswith(self._start):
                self._first, self._bytes = self._num_read, self._bytes.lstrip()[len(self._start) :]
            if self._first is not None and self._end in self._bytes:
                self._is_over = True
        if self._first is None and not self._start.startswith(self._bytes.lstrip()[: len(self._start)]):
            self._is_over = True
