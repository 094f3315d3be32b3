# SPDX-License-Identifier: Apache-2.0
"""Examples as a model will be given them, what is learned in colour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sporeloom.data.examples import Example, Fitted, Reading, fitted, fitted_pairs
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.train.config import Run
from sporeloom.train.tuning import PairConfig, PolicyConfig, open_tokenizer

COLOUR, PLAIN = ("\x1b[1;32m", "\x1b[0m"), ("[[", "]]")
"""Before and behind what is learned: on a terminal, and elsewhere."""


def view(run: Run, count: int, in_colour: bool) -> Iterator[str]:
    """Lines about the first examples of a run's data.

    Raises:
        ConfigError: lines that cannot be read as the task wants them.
    """
    config: Any = run.config
    tokenizer = open_tokenizer(run)
    reading = Reading(tokenizer, getattr(config, "train_on", "") == "everything")
    marks = COLOUR if in_colour else PLAIN
    if isinstance(config, PolicyConfig):
        prompts = reading.prompts(run.data)
        yield f"{config.data}: {len(prompts):,} prompts"
        for number, prompt in enumerate(prompts[:count], 1):
            yield f"\n{number}: {len(prompt.tokens)} tokens\n{prompt.text}"
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


def marked(example: Example, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of an example, with marks around what is learned; the end of a document is shown as its token."""
    text = ""
    for is_learned, group in groupby(zip(example.tokens, example.learned, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in group]
        ends = tokens[-1] == tokenizer.eod_id
        piece = tokenizer.decode(tokens[:-1] if ends else tokens) + ("<end of document>" if ends else "")
        text += f"{marks[0]}{piece}{marks[1]}" if is_learned else piece
    return text


def _numbered(found: Fitted, count: int) -> list[tuple[int, Any]]:
    return list(enumerate(found.examples[:count], 1))
