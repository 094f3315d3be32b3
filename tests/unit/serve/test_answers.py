# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as clients get them: of tokens that are parts of characters, that look alike, that stand for nothing."""

import json
import math
from types import SimpleNamespace

import pytest
from vocabularies import glm4_json

from sporeloom.inference.requests import NewToken
from sporeloom.inference.sampling import SamplingConfig, TokenScore
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.answers import ChatAnswer, Choice, CompletionAnswer, usage
from sporeloom.serve.requests import ChatRequest, CompletionRequest

TEXT = "é🙂小 x"
ALSO = 0x2F
"""A second token whose text is an x: as a vocabulary with bytes and pieces has some."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = glm4_json(tmp_path_factory.mktemp("glm4"))
    own = tokenizer.token_bytes
    tokenizer.token_bytes = lambda token: b"x" if token == ALSO else own(token)
    return SimpleNamespace(name="town", tokenizer=tokenizer, adapter=0)


def asked(kind, num_top=5, **more):
    common = {"sampling": SamplingConfig(), "seed": 3, "max_tokens": 9, "num_choices": 1, "stop": (), "stop_ids": ()}
    common |= {"ignore_eos": True, "num_top": num_top, "logit_bias": {}, "stream": False, "with_usage": False}
    if kind is ChatRequest:
        return ChatRequest(**common, messages=(), variables={}, **more)
    return CompletionRequest(**common, prompts=("a",), suffix=None, echo=True, **more)


def choice_of(model, prompt=(1,), echo=None, stop_ids=()):
    return Choice(0, prompt, StopConditions(model.tokenizer, stop_ids), Completion(""), echo)


def tokens_of(model, text=TEXT):
    return model.tokenizer.encode_document(text)[2:]


def score(model, token, *others):
    return TokenScore(token, -1.0, tuple((other, -0.5 - place) for place, other in enumerate(others)))


def generate(choice, tokens, last="length", top=()):
    """Texts of a choice as they come, one a token."""
    for place, token in enumerate(tokens):
        reason = last if place == len(tokens) - 1 else None
        yield choice.add(NewToken(0, token, -1.0 - place, 0.01, reason, top))


def offsets_of(model, tokens, start=0):
    """Where each begins, from the bytes alone: characters whose first byte came before, whole ones."""
    joined, offsets = b"", []
    for token in tokens:
        offsets.append(start + len(joined.decode(errors="ignore")))
        joined += model.tokenizer.token_bytes(token)
    return offsets


def test_bytes_of_a_chat_joined_are_its_text_however_characters_are_split(model):
    choice, tokens = choice_of(model), tokens_of(model)
    assert len(tokens) > len(TEXT)
    list(generate(choice, tokens))
    (told,) = ChatAnswer(model, asked(ChatRequest)).whole([], [choice])["choices"]
    content = told["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [list(model.tokenizer.token_bytes(token)) for token in tokens]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == told["message"]["content"] == TEXT
    assert content[0]["token"] == r"bytes:\xc3" and content[-1]["token"] == "x"


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_stream_tells_the_same_log_probabilities(model, kind):
    form = (ChatAnswer if kind is ChatRequest else CompletionAnswer)(model, asked(kind))
    tokens, top = tokens_of(model), tuple((token, -2.0) for token in (0xC3, 0xA9, 0x41, 0x20, 0xF0))
    whole = choice_of(model)
    list(generate(whole, tokens, top=top))
    (told,) = form.whole([], [whole])["choices"]
    streamed = choice_of(model)
    parts = [form.parts(streamed, text)[0]["choices"][0] for text in generate(streamed, tokens, top=top)]
    if kind is ChatRequest:
        assert [each for part in parts for each in part["logprobs"]["content"]] == told["logprobs"]["content"]
        assert "".join(part["delta"]["content"] for part in parts) == TEXT
    else:
        for name, values in told["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][name]] == values
        assert "".join(part["text"] for part in parts) == told["text"] == TEXT


@pytest.mark.parametrize("start", ["", "é🙂小 x", "小", "  x"])
def test_offsets_count_characters_of_prompt_and_answer(model, start):
    prompt, tokens = model.tokenizer.encode(start), tokens_of(model)
    choice = choice_of(model, prompt, echo=start)
    choice.scores = [None, *(score(model, token) for token in prompt[1:])]
    list(generate(choice, tokens))
    (told,) = CompletionAnswer(model, asked(CompletionRequest)).whole([], [choice])["choices"]
    assert told["text"] == start + TEXT
    found = told["logprobs"]
    assert found["text_offset"] == offsets_of(model, prompt) + offsets_of(model, tokens, len(start))
    assert found["text_offset"][-1] == told["text"].rindex("x") and found["tokens"][-1] == "x"
    assert found["tokens"][:2] == ["[gMASK]", "<sop>"] and found["token_logprobs"][0] is None


@pytest.mark.parametrize(
    ("chosen", "others", "expected"),
    [
        (
            0xC3,
            (0xC3, 0xA9, 0xF0, 0x9F, 0x98),
            [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98"],
        ),
        (0x41, (0xC3, 0xA9, 0xF0), [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xf0", "A"]),
        (0x78, (ALSO, 0x41, 0x78), [f"token_id:{ALSO}", "A", "x"]),
        (ALSO, (0x78, 0x41), ["token_id:120", "A", "x"]),
        (0x41, (0x78, ALSO), ["x", f"token_id:{ALSO}", "A"]),
        (0x41, ("[MASK]", "[gMASK]", "<sop>"), ["[MASK]", "[gMASK]", "<sop>", "A"]),
        (0x41, (500, 501), ["token_id:500", "token_id:501", "A"]),
    ],
)
def test_alternatives_that_look_alike_do_not_collapse(model, chosen, others, expected):
    ids = [model.tokenizer.special.get(other, other) for other in others]
    choice = choice_of(model)
    choice.scores.append(score(model, chosen, *ids))
    (told,) = CompletionAnswer(model, asked(CompletionRequest)).whole([], [choice])["choices"]
    (top,), (token,) = told["logprobs"]["top_logprobs"], told["logprobs"]["tokens"]
    assert list(top) == expected
    assert top[token] == (-0.5 - ids.index(chosen) if chosen in ids else -1.0)
    choice = choice_of(model)
    choice.scores.append(score(model, chosen, *ids))
    (told,) = ChatAnswer(model, asked(ChatRequest)).whole([], [choice])["choices"]
    assert len(told["logprobs"]["content"][0]["top_logprobs"]) == len(others)


def test_a_token_that_ends_the_text_adds_nothing_to_it(model):
    tokenizer = model.tokenizer
    choice, eod = choice_of(model, stop_ids=(tokenizer.eod_id, 0x58)), tokenizer.eod_id
    list(generate(choice, [0x41, 0x58], "stop"))
    (told,) = ChatAnswer(model, asked(ChatRequest)).whole([], [choice])["choices"]
    assert told["message"]["content"] == "A"
    assert [(each["token"], each["bytes"]) for each in told["logprobs"]["content"]] == [("A", [0x41]), ("X", [])]
    assert tokenizer.token_bytes(eod) == b""


@pytest.mark.parametrize("form", [ChatAnswer, CompletionAnswer])
def test_log_probabilities_that_json_cannot_hold_become_openais_number(model, form):
    choice = choice_of(model)
    choice.add(NewToken(0, 0x41, -math.inf, 0.01, "length", ((0x42, 0.0), (0x41, -math.inf))))
    told = form(model, asked(ChatRequest if form is ChatAnswer else CompletionRequest)).whole([], [choice])
    text = json.dumps(told, allow_nan=False)
    assert text.count("-9999.0") == 2


def test_cached_tokens_are_those_of_each_prompts_first_choice():
    choices = [SimpleNamespace(cached_tokens=n, completion=SimpleNamespace(tokens=[1])) for n in (5, 9, 7, 9)]
    told = usage([[0] * 10, [0] * 20], choices)
    assert told["prompt_tokens_details"] == {"cached_tokens": 12} and told["total_tokens"] == 34
