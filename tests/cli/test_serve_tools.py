# SPDX-License-Identifier: Apache-2.0
"""`sporeloom serve` with tools, reasoning and schemas: alone and together, in a stream and in one piece."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from conftest import TWO_LAYERS
from serving import chatting_checkpoint, serving

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{- '[unused9]' + message.role + '：' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{- '[unused10]' }}{% endfor %}
{{- '[unused9]助手：' + ('<think>' if enable_thinking else '<think></think>') }}"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("meet", "leave")]
ASKED = {"model": "talker", "messages": [{"role": "user", "content": "小镇"}], "max_completion_tokens": 160, "seed": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(TWO_LAYERS.read_text()), "seq_len": 1024}))
    checkpoint = chatting_checkpoint(folder, config)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with serving(folder / "log", checkpoint, "--served-model-name", "talker") as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.said()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def bodies(count):
    """Requests of all kinds."""
    kinds = [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"structured_outputs": {"regex": "[a-z]{5,20}"}, "logprobs": True, "top_logprobs": 2},
        {"reasoning_effort": "high", "thinking_token_budget": 9, "structured_outputs": {"choice": ["good", "bad"]}},
        {"reasoning_effort": "low", "thinking_token_budget": 4, "tools": TOOLS, "tool_choice": "required"},
    ]
    for seed in range(count):
        told = {"temperature": random.Random(seed).choice([0, 0.8, 1.2]), "seed": seed}
        yield {**ASKED, **told, **kinds[seed % len(kinds)]}


def ask(server, body):
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [
        {key: choice[key] for key in ("message", "finish_reason", "logprobs")} for choice in answer.json()["choices"]
    ]


def test_an_answer_with_tools_schemas_and_reasoning_is_the_same_alone_and_together(server):
    requests = list(bodies(12))
    alone = [ask(server, body) for body in requests]
    order = random.Random(1).sample(range(len(requests)), len(requests))
    with ThreadPoolExecutor(len(requests)) as pool:
        together = dict(zip(order, pool.map(lambda place: ask(server, requests[place]), order), strict=True))
    assert [together[place] for place in range(len(requests))] == alone
    for body, choices in zip(requests, alone, strict=True):
        for choice in choices:
            check(body, choice)
    assert {choice["finish_reason"] for choices in alone for choice in choices} == {"stop", "length", "tool_calls"}


def check(body, choice):
    """An answer that ended by itself is of the demanded form."""
    if choice["finish_reason"] == "length":
        return
    message = choice["message"]
    if body.get("tool_choice") == "required":
        assert choice["finish_reason"] == "tool_calls" and message["content"] is None
        for call in message["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    if "response_format" in body:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    if "choice" in body.get("structured_outputs", {}):
        assert message["content"] in ("good", "bad") and message["reasoning_content"]


FORMED = [
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "leave"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"reasoning_effort": "high", "extra_body": {"thinking_token_budget": 9, "guided_choice": ["good", "bad"]}},
]


@pytest.mark.parametrize("more", FORMED, ids=["required", "named", "schema", "reasoning"])
def test_the_openai_client_gets_a_stream_that_adds_up_to_the_answer(client, more):
    whole = client.chat.completions.create(**ASKED, **more).choices[0]
    with client.chat.completions.stream(**ASKED, **more) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion().choices[0]
    told = [choice.message.model_dump(exclude_none=True) for choice in (whole, streamed)]
    for message in told:
        message["content"] = message.get("content") or None  # a stream begins with an empty text
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    assert told[0] == told[1] and whole.finish_reason == streamed.finish_reason != "length"
    if "tools" in more:
        assert "tool_calls.function.arguments.done" in kinds
        (call,) = whole.message.tool_calls
        assert call.function.name in (["leave"] if more["tool_choice"] != "required" else ["meet", "leave"])


def test_a_conversation_with_a_call_and_its_result_continues(client):
    tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    first = client.chat.completions.create(**ASKED, **tools).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    messages = [*ASKED["messages"], first.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**{**ASKED, "messages": messages}, **tools).choices[0].message
    assert second.tool_calls[0].id != first.tool_calls[0].id
    again = client.chat.completions.create(**ASKED, **tools).choices[0].message
    assert again == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"tool_choice": "required"}, "goes with tools"),
        ({"extra_body": {"guided_regex": "["}}, "unclosed character class"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}}, "not"),
        ({"reasoning_effort": "most"}, "reasoning_effort must be one of"),
    ],
)
def test_what_cannot_be_done_is_refused_with_400(client, change, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{**ASKED, **change})
