# SPDX-License-Identifier: Apache-2.0
"""The longest prompts that are sampled from, and the longest texts that are written: none loses its end."""

from types import SimpleNamespace

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.examples import PromptLine, ended_batch, example_batch
from sporeloom.data.tokenizer import Prompt
from sporeloom.inference.config import prompt_problems
from sporeloom.tasks.grpo import GRPO
from sporeloom.tasks.rollouts import SampledText

CONTEXT, NEW, END = 16, 6, 3


@pytest.mark.parametrize("over", [-1, 0, 1, 2])
def test_a_prompt_fits_with_the_longest_text_behind_it_or_is_dropped_and_counted(over):
    length = CONTEXT - NEW + over
    prompts = [PromptLine(tuple(range(10, 10 + n)), "", {}) for n in (3, length)]
    task = SimpleNamespace(
        config=SimpleNamespace(reward=(), max_completion_length=NEW, data="prompts.jsonl"),
        run=SimpleNamespace(seq_len=CONTEXT, data=None),
        reading=lambda: SimpleNamespace(prompts=lambda _: prompts),
    )
    GRPO.open_data(task)
    assert task.num_samples == (2 if over <= 0 else 1)
    assert task.text == ("2 prompts" if over <= 0 else "1 prompts, 1 dropped, too long")
    if over > 0:
        return
    text = SampledText(1, [*range(40, 39 + NEW), END], [0.0] * NEW, True).example(prompts)
    learned, scored = example_batch([[text]], CONTEXT), ended_batch([text], CONTEXT)
    assert learned.loss_weights.sum() == NEW and learned.labels[0][learned.loss_weights[0] > 0][-1] == END
    assert scored.tokens[0, scored.loss_weights[0].argmax()] == END


@pytest.mark.parametrize(
    ("length", "new", "told"),
    [
        (CONTEXT - NEW - 1, NEW, None),
        (CONTEXT - NEW, NEW, None),
        (CONTEXT - NEW + 1, NEW, f"use at most --max-new-tokens {NEW - 1}"),
        (CONTEXT - 1, 1, None),
        (CONTEXT - 1, 2, "use at most --max-new-tokens 1"),
        (CONTEXT, 1, "fill"),
    ],
)
def test_a_prompt_and_what_is_written_fill_the_context_to_the_last_token(length, new, told):
    found = prompt_problems("--prompt", Prompt("", tuple(range(length))), SimpleNamespace(seq_len=CONTEXT), new)
    assert (not found) if told is None else (len(found) == 1 and told in found[0])


def test_no_prompt_that_fits_is_an_error():
    prompts = [PromptLine(tuple(range(CONTEXT)), "", {})]
    task = SimpleNamespace(
        config=SimpleNamespace(reward=(), max_completion_length=NEW, data="prompts.jsonl"),
        run=SimpleNamespace(seq_len=CONTEXT, data=None),
        reading=lambda: SimpleNamespace(prompts=lambda _: prompts),
    )
    with pytest.raises(ConfigError, match="all prompts are longer than the 10 tokens that --seq-len 16 leaves"):
        GRPO.open_data(task)
