# SPDX-License-Identifier: Apache-2.0
"""Formats of answers found from chat templates and special tokens, and conversations with tools in tokens."""

import json
from types import SimpleNamespace

import pytest
from vocabularies import glm4_files, glm4_json, sentencepiece_model, write_config

from codegeex.tokenizer import open_tokenizer as open_code
from pangu.tokenizer import open_tokenizer as open_pangu
from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer, with_template
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.inference.formats import CALLS, PLAIN, REASONING, ChatFormat, MarkedTokenizer, chat_format
from sporeloom.serve.fields import Fields, RequestError
from sporeloom.serve.messages import NO_TOOLS, read_messages, read_tools
from sporeloom.serve.prepare import chat_tokens

WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of <|user|>"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<|user|>"}'}}


def templated(folder, text):
    tokenizer = glm4_json(folder)
    return TemplatedTokenizer(tokenizer, ChatTemplate(folder / "chat_template.jinja", text))


@pytest.mark.parametrize(
    ("text", "calls", "reasoning"),
    [
        ("{{ 'a <tool_call>{...}</tool_call>' }}</think>", "hermes", "think"),
        ("<tool_call><function=name>", None, None),
        ("<tool_call><arg_key></think>", None, "think"),
        ("<|message_start|><|tool_call_start|>", "openpangu2", None),
        ("<|im_start|><|tool_call_start|>[f(1)]", None, None),
        ("[unused11]", None, None),
        ("plain", None, None),
    ],
)
def test_a_format_is_found_in_the_chat_template(tmp_path, text, calls, reasoning):
    tokenizer = templated(tmp_path, text)
    assert chat_format(tokenizer) == ChatFormat(REASONING.get(reasoning), CALLS.get(calls))
    assert chat_format(tokenizer, "none", "none") == PLAIN
    assert chat_format(tokenizer, "hermes", "openpangu") == ChatFormat(REASONING["openpangu"], CALLS["hermes"])


def test_openpangu_has_reasoning_and_with_a_template_calls(tmp_path):
    names = [f"[unused{i}]" for i in range(18)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(user_defined_symbols=names))
    tokenizer = open_pangu(tmp_path / "tokenizer.model")
    assert chat_format(tokenizer) == ChatFormat(REASONING["openpangu"], None)
    write_config(tmp_path, chat_template="{{ tools }}[unused9]")
    assert chat_format(with_template(tokenizer, tmp_path)) == ChatFormat(REASONING["openpangu"], CALLS["openpangu"])
    marked, ids = MarkedTokenizer(tokenizer, ["[unused11]"]), tokenizer.encode("小 [unused11] a")[1:]
    assert marked.decode(ids) == tokenizer.decode(ids)


def test_a_format_that_is_not_known_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError) as error:
        chat_format(templated(tmp_path, "x"), "xml", "deep")
    assert error.value.problems == [
        "--tool-call-parser xml: one of auto, none, hermes, openpangu, openpangu2",
        "--reasoning-parser deep: one of auto, none, think, openpangu",
    ]
    assert chat_format(SimpleNamespace(chat=None)) == PLAIN  # of a base model


def test_special_tokens_that_are_markers_are_decoded_and_others_are_not(tmp_path):
    tokenizer = glm4_json(tmp_path)
    names = list(tokenizer.token_names.values())
    marked = MarkedTokenizer(tokenizer, [names[1], "no such token"])
    (other, marker), text = list(tokenizer.token_names)[:2], tokenizer.encode_text("小 x")
    ids = [marker, *text[:2], other, *text[2:], marker]
    assert marked.decode(ids) == f"{names[1]}小 x{names[1]}"
    assert [marked.token_bytes(token) for token in (other, marker, text[0])] == [
        b"",
        names[1].encode(),
        tokenizer.token_bytes(text[0]),
    ]
    assert marked.vocab_size == tokenizer.vocab_size and marked.decode([]) == ""


def served(folder, text, calls="auto"):
    glm4_files(folder)
    (folder / "chat_template.jinja").write_text(text)
    tokenizer = with_template(open_code(folder / "tokenizer.json"), folder)
    return SimpleNamespace(name="m", tokenizer=tokenizer, form=chat_format(tokenizer, calls))


def test_tools_calls_and_results_reach_the_template_and_stay_text(tmp_path):
    model = served(tmp_path, WITH_TOOLS)
    body = {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "why"},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        ],
    }
    messages, tools = read_messages(Fields(body)), read_tools(Fields(body))
    prompt = chat_tokens(model, messages, {}, tools=tools)
    assert prompt.text == (
        f'{json.dumps(WEATHER)}<|user|>hi<|assistant|><think>why</think><tool_call>weather{{"city": "<|user|>"}}'
        "</tool_call><|tool|>rain"
    )
    user = next(token for token, name in model.tokenizer.token_names.items() if name == "<|user|>")
    assert prompt.tokens.count(user) == 1
    assert messages[1].more["tool_calls"][0]["function"]["arguments"] == {"city": "<|user|>"}
    assert messages[2] == ChatMessage("tool", "rain", {"tool_call_id": "call_1"})
    without = chat_tokens(model, messages, {}, tools=read_tools(Fields({**body, "tool_choice": "none"})))
    assert without.text == prompt.text.removeprefix(json.dumps(WEATHER))


@pytest.mark.parametrize(
    ("template", "said"),
    [("{{ messages[0].content }}tools", "has no tools"), ("{{ tools }}", "format of the tool calls of m is not known")],
)
def test_tools_that_a_model_cannot_call_are_refused(tmp_path, template, said):
    tools = read_tools(Fields({"tools": [WEATHER]}))
    with pytest.raises(RequestError, match=said) as error:
        chat_tokens(served(tmp_path, template), [ChatMessage("user", "hi")], {}, tools=tools)
    assert (error.value.status, error.value.param) == (400, "tools")
    named = served(tmp_path, "{{ tools }}", "hermes")
    assert chat_tokens(named, [ChatMessage("user", "hi")], {}, tools=tools).text


def test_a_form_without_a_template_has_no_tools(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece_model(user_defined_symbols=[f"[unused{i}]" for i in range(12)])
    )
    tokenizer = open_pangu(tmp_path / "tokenizer.model")
    model = SimpleNamespace(name="m", tokenizer=tokenizer, form=chat_format(tokenizer))
    with pytest.raises(RequestError, match="no chat template, which would say how tools"):
        chat_tokens(model, [ChatMessage("tool", "rain")], {})
    with pytest.raises(RequestError, match="has no tools"):
        chat_tokens(model, [ChatMessage("user", "x")], {}, tools=read_tools(Fields({"tools": [WEATHER]})))


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": ["x"]}, "tools", r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools", "strict must be"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions are named 'weather'"),
        ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "goes with tools"),
        ({"tool_choice": NAMED}, "tool_choice", "no function in tools is named 'weather'"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "must be"),
        ({"tools": [WEATHER], "tool_choice": 3}, "tool_choice", "must be"),
        ({"functions": [{}]}, "functions", "send tools"),
        ({"function_call": {"name": "f"}}, "function_call", "send tool_choice"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_name(body, param, said):
    with pytest.raises(RequestError, match=said) as error:
        read_tools(Fields(body))
    assert (error.value.status, error.value.param) == (400, param)


def test_a_choice_of_tools_is_read():
    assert read_tools(Fields({})) == read_tools(Fields({"tools": [], "tool_choice": "auto"})) == NO_TOOLS
    assert read_tools(Fields({"tools": [WEATHER]})).choice == "auto"
    named = read_tools(Fields({"tools": [WEATHER], "tool_choice": NAMED}))
    assert (named.choice, named.name, named.is_parallel) == ("required", "weather", False)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant"}, "content must be a string"),
        ({"role": "tool"}, "content must be a string"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [3]}, r"tool_calls\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]\.function\.name must be a string"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "the JSON text of an"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}, "the JSON text of an"),
        ({"role": "assistant", "content": "", "reasoning_content": 3}, "reasoning_content must be a string"),
        ({"role": "tool", "content": "", "tool_call_id": "\ud800"}, "tool_call_id holds half a character"),
        ({"role": "function", "content": ""}, "role must be one of system, user, assistant, tool"),
    ],
)
def test_messages_that_cannot_be_used_are_refused_by_place(message, said):
    with pytest.raises(RequestError, match=said) as error:
        read_messages(Fields({"messages": [message]}))
    assert error.value.status == 400 and str(error.value).startswith("messages[0]")
