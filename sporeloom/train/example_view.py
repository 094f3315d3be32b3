# SPDX-License-Identifier: Apache-2.0
"""Show examples as a model gets them: text, special tokens and ids, with the trained tokens in colour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sporeloom.data.examples import Example, FittingExamples, fitted, fitted_pairs
from sporeloom.data.tokenizer import Tokenizer, token_text
from sporeloom.data.tool_turns import ToolTurns
from sporeloom.train.config import Run
from sporeloom.train.policy import GRPOConfig, PolicyConfig
from sporeloom.train.tuning import ExamplesConfig, PairConfig, open_reading, open_tokenizer

COLOUR, PLAIN = ("\x1b[1;32m", "\x1b[0m"), ("[[", "]]")
"""Marks before and after trained tokens: on a terminal, and elsewhere."""


def view(run: Run, count: int, in_colour: bool) -> Iterator[str]:
    """Format the first examples of a run's data as lines.

    Raises:
        ConfigError: lines that cannot be read as the task needs them.
    """
    config: Any = run.config
    tokenizer = open_tokenizer(run)
    reading = open_reading(run, tokenizer, isinstance(config, ExamplesConfig) and config.train_on == "everything")
    marks = COLOUR if in_colour else PLAIN
    if isinstance(config, GRPOConfig) and config.tools:
        reading.tools = ToolTurns(tokenizer, config.offered_tools(), config.template_variables()).tools
    if isinstance(config, PolicyConfig):
        prompts = reading.prompts(run.data)
        yield f"{config.data}: {len(prompts):,} prompts"
        for number, prompt in enumerate(prompts[:count], 1):
            shown = Example(prompt.tokens, (False,) * len(prompt.tokens))
            yield f"\n{number}: {len(prompt.tokens)} tokens\n{marked(shown, tokenizer, marks)}\n{marked_ids(shown, marks)}"
        return
    if isinstance(config, PairConfig):
        found = fitted_pairs(reading.pairs(run.data), run.seq_len, config.trains_values)
        both = ("chosen", "rejected")
        texts = [(f"{n}, {name}", getattr(pair, name)) for n, pair in _numbered(found, count) for name in both]
        kind = "pairs"
    else:
        found = fitted(reading.examples(run.data), run.seq_len)
        texts = [(str(number), example) for number, example in _numbered(found, count)]
        kind = "examples"
    yield f"{config.data}: {found.describe(kind)}; {marks[0]}learned{marks[1]}"
    for name, example in texts:
        learned = sum(example.learned[1:])
        yield f"\n{name}: {len(example.tokens)} tokens, {learned} learned\n{marked(example, tokenizer, marks)}"
        yield marked_ids(example, marks)


def marked(example: Example, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """Format the text of an example, with marks around trained tokens, and special tokens by their names, in marks
    of their own."""
    text = ""
    for is_learned, tokens in _runs(example):
        piece = "".join(
            "".join(token_text(tokenizer, token) for token in group) if is_special else tokenizer.decode(list(group))
            for is_special, group in groupby(tokens, key=tokenizer.token_names.__contains__)
        )
        text += f"{marks[0]}{piece}{marks[1]}" if is_learned else piece
    return text


def marked_ids(example: Example, marks: tuple[str, str]) -> str:
    """Format the token ids of an example, with the same marks."""
    runs = [(is_learned, " ".join(map(str, tokens))) for is_learned, tokens in _runs(example)]
    return "ids: " + " ".join(f"{marks[0]}{ids}{marks[1]}" if is_learned else ids for is_learned, ids in runs)


def _runs(example: Example) -> Iterator[tuple[bool, list[int]]]:
    for is_learned, group in groupby(zip(example.tokens, example.learned, strict=True), key=lambda pair: pair[1]):
        yield is_learned, [token for token, _ in group]


def _numbered(found: FittingExamples, count: int) -> list[tuple[int, Any]]:
    return list(enumerate(found.examples[:count], 1))
