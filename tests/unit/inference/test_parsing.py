# SPDX-License-Identifier: Apache-2.0
"""Answers taken apart: reasoning, content and calls, the same wherever their text is cut."""

import json
import random

import pytest

from sporeloom.inference.formats import CALLS, REASONING, ChatFormat
from sporeloom.inference.parsing import MessageParser, after_first_call, message_of

HERMES = ChatFormat(REASONING["think"], CALLS["hermes"])
PANGU = ChatFormat(REASONING["openpangu"], CALLS["openpangu"])
F, G = '{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"b": "}\\"]"}, "name": "g"}'


def deltas(form, pieces, in_reasoning=False, **options):
    parser = MessageParser(form, in_reasoning, lambda index: f"id{index}", **options)
    return [delta for piece in pieces for delta in parser.add(piece)] + parser.end(), parser.has_calls


def message(form, text, **options):
    return message_of(deltas(form, [text], **options)[0])


def calls_of(told):
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in told["tool_calls"]]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain \n", None, "plain \n"),
        ("<think>\n a < b \n</think>\n\nhi  there \n", "a < b", "hi  there \n"),
        ("<think>cut short ", "cut short", ""),
        ("<thin", None, "<thin"),
        ("a <think> b </think>", None, "a <think> b </think>"),
        ("<think></think>x", None, "x"),
        ("<think>a<tool_call>b</think>c", "a<tool_call>b", "c"),
    ],
)
def test_reasoning_stands_apart_from_content(text, reasoning, content):
    told = message(HERMES, text)
    assert (told.get("reasoning_content"), told["content"]) == (reasoning, content)
    assert "tool_calls" not in told
    opened = message(HERMES, text.removeprefix("<think>"), in_reasoning=True)
    if text.startswith("<think>"):
        assert opened == told


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"so \n<tool_call>\n{F}\n</tool_call>\n", "so", [("f", '{"a": 1}')]),
        (HERMES, f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>", None, [("f", '{"a": 1}'), ("g", G[14:27])]),
        (HERMES, f"<tool_call>{F}", None, [("f", '{"a": 1}')]),
        (PANGU, f"[unused16]so[unused11][{F}, {G}][unused12]", None, [("f", '{"a": 1}'), ("g", G[14:27])]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>", "y": 1.00000000000000000001}}</tool_call>',
            None,
            [("f", '{"x": "</tool_call>", "y": 1.00000000000000000001}')],
        ),
    ],
)
def test_calls_are_read_as_they_were_written(form, text, content, calls):
    told = message(form, text)
    assert told["content"] == content
    assert calls_of(told) == [(f"id{place}", *call) for place, call in enumerate(calls)]


MALFORMED = [
    "",
    "x",
    "{",
    "[]",
    "null",
    '{"name": "f"}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": {}} x',
    '{"name": "f", "\\u0061rguments": {}}',
    '{"name": "f", "arguments": {}, "a": ' + "[" * 5000,
    '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("form", [HERMES, PANGU], ids=["one", "list"])
def test_a_malformed_call_stays_text(form, body):
    markers = form.calls.markers
    text = f"so {markers.start}{f'[{body}]' if form.calls.is_list and body else body}{markers.end} end"
    told, has_calls = deltas(form, [text])
    assert message_of(told) == {"role": "assistant", "content": text} and not has_calls


TEXTS = [
    (HERMES, f"<think>\nwhy </ not\n</think>\n\nso <tool_call>\n{F}\n</tool_call> \n<tool_call>bad</tool_call> t \n"),
    (HERMES, f" <think>x</think><tool_call>{G}</tool_call>end <tool_call>{F}"),
    (HERMES, "</tool_call> <tool_ca <tool_call> \n"),
    (PANGU, f"[unused16]为什么 [unused1[unused17] 小\n[unused11][{F}, {G}][unused12][unused11]{F}[unused12]"),
    (PANGU, f"[unused16]a \n[unused11][{G}][unused12]"),
]


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("case", range(len(TEXTS)))
def test_a_stream_adds_up_to_the_same_message_wherever_it_is_cut(case, is_certain):
    form, text = TEXTS[case]
    if is_certain:
        text = text.replace("<tool_call>bad</tool_call> t", "").replace(f"[unused11]{F}[unused12]", "")
    for in_reasoning in (False, True):
        expected, has_calls = deltas(form, [text], in_reasoning, is_certain=is_certain)
        for draw in map(random.Random, range(150)):
            cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice([1, 3, 20, len(text)])))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            found, found_calls = deltas(form, pieces, in_reasoning, is_certain=is_certain)
            assert (message_of(found), found_calls) == (message_of(expected), has_calls), pieces


@pytest.mark.parametrize("is_certain", [False, True])
def test_a_call_is_streamed_name_first_and_then_its_arguments(is_certain):
    found, _ = deltas(PANGU, list(f"[unused11][{F}][unused12]"), is_certain=is_certain)
    first, *others = [delta["tool_calls"][0] for delta in found]
    assert first == {"index": 0, "id": "id0", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert [set(other) for other in others] == [{"index", "function"}] * len(others)
    pieces = [other["function"]["arguments"] for other in others]
    assert "".join(pieces) == '{"a": 1}' and len(pieces) == (8 if is_certain else 1)


def test_a_certain_call_that_is_cut_short_has_the_arguments_so_far():
    told, has_calls = deltas(HERMES, ['<tool_call>\n{"name": "f", "arguments": {"a": "x'], is_certain=True)
    assert calls_of(message_of(told)) == [("id0", "f", '{"a": "x')] and not has_calls


def test_only_as_many_calls_as_allowed():
    text = f"[unused11][{F}, {G}][unused12]"
    assert [call[1] for call in calls_of(message(PANGU, text, max_calls=1))] == ["f"]
    ending = after_first_call(HERMES, False)
    first = f"a <tool_call>bad</tool_call> <tool_call>{F}</tool_call>"
    assert ending(first[:-1]) is None and ending(f"{first} more <tool_call>{G}</tool_call>") == len(first)


def test_arguments_are_json_that_others_can_read():
    (call,) = message(HERMES, f"<tool_call>{G}</tool_call>")["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == json.loads(G)["arguments"]
