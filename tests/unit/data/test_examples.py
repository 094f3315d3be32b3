# SPDX-License-Identifier: Apache-2.0
"""What is learned of conversations, completions and pairs; packing; what is wrong with lines."""

import json
from pathlib import Path

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer
from sporeloom.data.examples import (
    Example,
    LineTokenizer,
    Pair,
    ended_batch,
    example_batch,
    fitted,
    fitted_pairs,
    packed,
    read_lines,
)
from sporeloom.data.special_tokens import SpecialTokens
from sporeloom.data.tokenizer import ChatMessage

EOD = 3
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


class Letters(SpecialTokens):
    """A character a token, by its code point."""

    eod_id = EOD

    def encode_text(self, text):
        return [ord(letter) for letter in text]


@pytest.fixture
def reading():
    return LineTokenizer(TemplatedTokenizer(Letters(), ChatTemplate(Path("chat.jinja"), TEMPLATE)), stop_ids=[ord("|")])


def lines(write, *values):
    return read_lines(
        write("lines.jsonl", "".join(json.dumps(value) + "\n" for value in values)), (("messages",), ("prompt",))
    )


def shown(example):
    """Tokens as text, what is learned in capitals; the end of the document is $."""
    letters = ["$" if token == EOD else chr(token) for token in example.tokens]
    return "".join(a.upper() if learned else a for a, learned in zip(letters, example.learned, strict=True))


def say(role, text):
    return {"role": role, "content": text}


def test_a_completion_is_learned_and_its_end(reading, write):
    (example,) = reading.examples(lines(write, {"prompt": "hi ", "completion": "you"}))
    assert shown(example) == "hi YOU$" and example.learned[-1]


def test_of_a_conversation_what_the_assistant_says_and_where_it_stops(reading, write):
    talk = [say("user", "x"), say("assistant", "yes"), say("user", "z"), say("assistant", "no")]
    (example,) = reading.examples(lines(write, {"messages": talk}))
    assert shown(example) == "u:x|a:YES|u:z|a:NO|"
    stop = example.tokens.index(ord("s")) + 1
    assert example.learned[stop] and not example.learned[stop + 1]  # the template's own end of an answer


def test_what_generation_does_not_stop_at_is_learned_as_no_stop(reading, write):
    reading.stop_ids = {EOD}
    talk = [say("user", "x"), say("assistant", "yes"), say("user", "z"), say("assistant", "no")]
    (example,) = reading.examples(lines(write, {"messages": talk}))
    assert shown(example) == "u:x|a:YES|u:z|a:NO$"
    assert not example.learned[example.tokens.index(ord("s")) + 1]


def test_answers_that_the_template_writes_anew_are_examples_of_their_own(write):
    text = "{% for m in messages %}{{ m.role[0] }}:{{ m.content.split('/')[-1] }}|{% endfor %}a:"
    reading = LineTokenizer(TemplatedTokenizer(Letters(), ChatTemplate(Path("chat.jinja"), text)))
    talk = [say("user", "x"), say("assistant", "think/yes"), say("user", "z"), say("assistant", "hm/no")]
    found = reading.examples(lines(write, {"messages": talk}))
    assert [shown(each) for each in found] == ["u:x|a:THINK/YES$", "u:x|a:yes|u:z|a:HM/NO$"]


def test_of_a_completion_in_messages_what_the_prompt_holds_is_not_learned(reading, write):
    line = {
        "prompt": [say("user", "x"), say("assistant", "yes"), say("user", "z")],
        "completion": [say("assistant", "no"), say("user", "w"), say("assistant", "ok")],
    }
    (example,) = reading.examples(lines(write, line))
    assert shown(example) == "u:x|a:yes|u:z|a:NO|u:w|a:OK|"


def test_of_pairs_only_the_last_answer_is_learned(reading, write):
    talk = [say("user", "x"), say("assistant", "yes"), say("user", "z")]
    line = {"prompt": talk, "chosen": [say("assistant", "good")], "rejected": [say("assistant", "bad")], "margin": 2}
    (pair,) = reading.pairs(lines(write, line))
    assert shown(pair.chosen) == "u:x|a:yes|u:z|a:GOOD|" and shown(pair.rejected) == "u:x|a:yes|u:z|a:BAD|"
    assert pair.margin == 2.0


def test_everything_is_learned_on_demand(reading, write):
    reading.learn_all = True
    (example,) = reading.examples(lines(write, {"prompt": "hi ", "completion": "you"}))
    assert shown(example) == "HI YOU$"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"messages": [say("user", "x")]}, "the last message is from user; it must be the assistant's"),
        ({"messages": [say("robot", "x")]}, "messages[0].role must be one of system, user, assistant, got 'robot'"),
        ({"messages": []}, "messages must be a list of messages"),
        (
            {"prompt": "x", "completion": [say("assistant", "y")]},
            "prompt and completion must both be texts, or both messages",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0] must have a role and a content, both texts"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(reading, write, line, told):
    with pytest.raises(ConfigError) as error:
        reading.examples(lines(write, line))
    assert error.value.problems[0].endswith(f"lines.jsonl:1: {told}") or told in error.value.problems[0]
    assert ":1: " in error.value.problems[0]


def test_lines_without_the_keys_are_named(write):
    path = write("lines.jsonl", '{"prompt": "a", "completion": "b"}\n{"text": "c"}\n[1]\nnot json\n')
    with pytest.raises(ConfigError) as error:
        read_lines(path, (("messages",), ("prompt", "completion")))
    first, second, third = error.value.problems
    assert first.endswith(":2: has text; expected: messages or prompt, completion")
    assert second.endswith(":3: is not an object; expected: messages or prompt, completion") and ":4" in third


def example(length, learned_from=1):
    return Example(tuple(range(10, 10 + length)), tuple(place >= learned_from for place in range(length)))


def test_what_is_too_long_is_cut_and_what_then_teaches_nothing_is_dropped():
    found = fitted([example(4), example(9), example(9, learned_from=6)], 5)
    assert [len(each.tokens) for each in found.examples] == [4, 6]
    assert (found.num_truncated, found.num_dropped) == (1, 1)
    assert found.describe("examples") == "2 examples, 1 truncated; 1 dropped, too long to learn from"


def test_packing_fills_rows_and_loses_nothing():
    drawn = np.random.default_rng(0)
    examples = [example(int(length)) for length in drawn.integers(2, 34, 200)]
    rows = packed(examples, 32)
    assert sorted(place for row in rows for place in row) == list(range(200))
    used = [sum(len(examples[place].tokens) - 1 for place in row) for row in rows]
    over_half = sum(len(each.tokens) - 1 > 16 for each in examples)  # no two of them share a row
    assert max(used) <= 32 and len(rows) <= 1.06 * max(over_half, sum(used) / 32)


def test_packed_examples_begin_anew_and_none_teaches_the_next_ones_start():
    batch = example_batch([[example(4), example(3)]], 8)
    assert batch.tokens[0].tolist() == [10, 11, 12, 10, 11, 0, 0, 0]
    assert batch.labels[0].tolist() == [11, 12, 13, 11, 12, -1, -1, -1]  # where nothing follows there is padding
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.loss_weights[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_what_is_rewarded_ends_with_its_last_token():
    batch = ended_batch([example(3), example(5)], 5)
    assert batch.tokens.tolist() == [[10, 11, 12, 0, 0], [10, 11, 12, 13, 14]]
    assert batch.loss_weights.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


LONGEST, END = 8, 3


def text_of(length):
    """A text of so many tokens, the last of them its end."""
    return Example((*range(10, 9 + length), END), (False, *(True,) * (length - 1)))


@pytest.mark.parametrize("length", [LONGEST - 1, LONGEST, LONGEST + 1, LONGEST + 2])
def test_the_end_of_a_text_is_learned_or_scored_or_the_text_told_to_be_truncated(length):
    """A label needs no input of its own, so one more token fits where the end is only learned."""
    learned = fitted([text_of(length)], LONGEST)
    batch = example_batch([learned.examples], LONGEST)
    assert learned.num_truncated == (length > LONGEST + 1)
    assert (batch.labels[0][batch.loss_weights[0] > 0][-1] == END) == (length <= LONGEST + 1)
    assert (batch.loss_weights > 0).sum() == min(length - 1, LONGEST)

    pair = Pair(text_of(4), text_of(length), 0.0)
    preferred = fitted_pairs([pair], LONGEST, is_scored=False)  # of DPO
    assert preferred.num_truncated == (length > LONGEST + 1)
    assert preferred.examples[0].rejected == learned.examples[0] and preferred.examples[0].chosen == pair.chosen

    scored = fitted_pairs([pair], LONGEST)  # of a reward model
    assert scored.num_truncated == (length > LONGEST)
    assert scored.describe("pairs") == ("1 pairs, 1 truncated" if length > LONGEST else "1 pairs")
    for each in (scored.examples[0].chosen, scored.examples[0].rejected):
        batch = ended_batch([each], LONGEST)
        assert batch.loss_weights.sum() == 1
        assert (batch.tokens[0, batch.loss_weights[0].argmax()] == END) == (each.tokens[-1] == END)
    assert (scored.examples[0].rejected.tokens[-1] == END) == (length <= LONGEST)


def test_what_is_longer_than_a_row_is_not_scored_somewhere_else():
    with pytest.raises(AssertionError):
        ended_batch([text_of(LONGEST + 1)], LONGEST)


def test_files_of_the_example_can_be_read():
    template = ChatTemplate(Path("examples/assistant/chat_template.jinja"))
    assert template.prompt([ChatMessage("user", "Hi")]) == "user: Hi\nassistant:"
