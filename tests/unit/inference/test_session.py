# SPDX-License-Identifier: Apache-2.0
"""Generation and sessions on a decoding that says what it is told: no model, no MindSpore graph."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from sporeloom.data.tokenizer import text_prompt
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.inference.session import Session, StopConditions
from sporeloom.strategy.config import SINGLE_DEVICE

EOD = 0


class Letters:
    """Token 1 is a, token 2 is b, ...; 0 ends."""

    vocab_size, eod_id, prefix = 27, EOD, ()

    def encode(self, text):
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i - 1) if i else "" for i in ids)

    def token_bytes(self, token):
        return self.decode([token]).encode()


X = text_prompt(Letters(), "x")


class Script:
    """Continues each row's first token with the text the script has for it."""

    cache_bytes, reusable = 0, 0

    def __init__(self, num_rows, texts):
        self.num_rows = num_rows
        self.texts = {key: [*Letters().encode(text), EOD] for key, text in texts.items()}
        self.rows = {}
        self.calls = []

    def prepare(self, prompt_lengths, max_new_tokens):
        self.prepared = (list(prompt_lengths), max_new_tokens)

    def next_chunks(self, waiting, num_decoded):
        return dict(waiting)

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        logits = {}
        fed = {**chunks, **{row: [token] for row, token in tokens.items()}}
        self.calls.append({row: list(ids) for row, ids in fed.items()})
        for row, ids in fed.items():
            self.rows.setdefault(row, []).extend(ids)
            first = Letters().decode(self.rows[row][:1])
            said = len(self.rows[row]) - self.lengths[first]
            logits[row] = np.zeros((len(ids), 27) if every and row in chunks else 27, np.float32)
            logits[row][..., self.texts[first][said]] = 9.0
        return logits

    def trim(self, row, length):
        self.rows[row] = self.rows.get(row, [])[:length]
        if not self.rows[row]:
            del self.rows[row]

    def clear(self, row):
        self.trim(row, 0)

    def use_adapter(self, row, adapter):
        assert adapter == 0


ENGINE = SimpleNamespace(
    strategy=SINGLE_DEVICE, is_log_rank=True, in_last_stage=True, broadcast=lambda array, source: array
)


def session(script, prompts, **arguments):
    script.lengths = {prompt[0]: len(prompt) for prompt in prompts}
    return Session(ENGINE, script, StopConditions(Letters(), [EOD], **arguments))


def complete(script, prompts, max_new_tokens=20, **arguments):
    given = [text_prompt(Letters(), prompt) for prompt in prompts]
    return session(script, prompts, **arguments).complete(given, SamplingConfig(), max_new_tokens)


def test_rows_are_given_to_waiting_prompts_as_they_become_free():
    script = Script(2, {"x": "abc", "y": "d", "z": "ef"})
    done = complete(script, ["xx", "y", "zzz"])
    assert [c.text for c in done] == ["abc", "d", "ef"]
    assert [c.finish_reason for c in done] == ["stop"] * 3
    assert script.prepared == ([2, 1, 3], 20)
    assert script.calls[0] == {0: [24, 24], 1: [25]}
    assert {0: [2], 1: [26, 26, 26]} in script.calls  # the third prompt took the second one's row


def test_a_finished_row_is_fed_no_more():
    script = Script(2, {"x": "abcdef", "y": "d"})
    complete(script, ["x", "y"])
    assert [len(call) for call in script.calls] == [2, 2, 1, 1, 1, 1, 1]


def test_the_length_limit_ends_a_text():
    (done,) = complete(Script(1, {"x": "abcdef"}), ["x"], max_new_tokens=3)
    assert (done.text, done.finish_reason, len(done.tokens)) == ("abc", "length", 3)
    assert len(done.log_probabilities) == 3
    assert done.time_per_token_s is not None


def test_stop_texts_end_it_and_are_not_part_of_it():
    (done,) = complete(Script(1, {"x": "abcdef"}), ["x"], stop_texts=["zz", "cd"])
    assert (done.text, done.finish_reason) == ("ab", "stop")
    assert Letters().decode(done.tokens) == "abcd"


def test_a_stop_texts_beginning_is_held_back_until_it_is_none():
    pieces = list(session(Script(1, {"x": "abcab"}), ["x"], stop_texts=["abd"]).stream([X], SamplingConfig(), 9))
    assert [piece.text for piece in pieces] == ["", "", "abc", "", "", "ab"]
    assert pieces[-1].completion.text == "abcab"


def test_another_rule_can_end_a_text():
    (done,) = complete(Script(1, {"x": "abcdef"}), ["x"], rule=lambda text, known=0: 2 if len(text) > 3 else None)
    assert (done.text, done.finish_reason, len(done.tokens)) == ("ab", "stop", 4)


def test_a_caller_who_leaves_early_leaves_empty_rows():
    script = Script(1, {"x": "abcdef"})
    script.lengths = {"x": 1}
    tokens = generate(script, ENGINE, [Request([24], 9, Sampler(SamplingConfig()), lambda tokens: False, 0)])
    assert next(tokens).token == 1
    assert script.rows
    tokens.close()
    assert script.rows == {}


@pytest.mark.parametrize("minimum", [2, 5])
def test_min_new_tokens_keeps_the_end_away(minimum):
    script = Script(1, {"x": "a"})
    script.texts["x"] = [1, EOD, EOD, EOD, EOD, EOD, EOD]
    (done,) = session(script, ["x"]).complete([X], SamplingConfig(min_new_tokens=minimum), 20)
    assert len(done.tokens) == max(minimum, 1) + 1
    assert done.tokens[-1] == EOD
    assert EOD not in done.tokens[:-1]
