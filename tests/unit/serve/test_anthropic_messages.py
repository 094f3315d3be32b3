# SPDX-License-Identifier: Apache-2.0
"""/v1/messages: the same prompts as a chat's, content blocks, events in the published order, errors in Anthropic's form."""

import asyncio
import json

import pytest
from scripted_service import Service

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "mill"}}\n</tool_call>'
SAID = f"<think>Where is it?</think>\n\nI shall look.{CALL}{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
TOOL = {"name": "look", "description": "look", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
ASKED = {"model": "town", "max_tokens": 999, "messages": [{"role": "user", "content": "hi"}], "seed": 3}


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path, SAID)


def post(service, path="/v1/messages", headers=None, **body):
    async def work():
        async with service.http() as http:
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(work())


def events_of(text):
    found = [part.split("\n") for part in text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def test_reasoning_text_and_calls_are_blocks(service):
    told = post(service, **ASKED, tools=[TOOL]).json()
    assert told["content"][:2] == [
        {"type": "thinking", "thinking": "Where is it?", "signature": ""},
        {"type": "text", "text": "I shall look."},
    ]
    calls = told["content"][2:]
    assert [(each["type"], each["name"], each["input"]) for each in calls] == [("tool_use", "look", {"at": "mill"})] * 2
    assert len({each["id"] for each in calls}) == 2
    assert (told["type"], told["role"], told["stop_reason"], told["stop_sequence"]) == (
        *("message", "assistant", "tool_use", None),
    )
    assert told["usage"]["input_tokens"] == len(service.wanted[0].prompt)
    assert told["usage"]["output_tokens"] == len(SAID) + 1


def accumulated(events):
    """The message that events add up to, by the published rules."""
    message, texts = None, {}
    for name, data in events:
        assert name == data["type"]
        if name == "message_start":
            message = {**data["message"]}
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(dict(data["content_block"]))
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                delta["type"]
            ]
            if kind == "partial_json":
                texts[data["index"]] = texts.get(data["index"], "") + delta[kind]
                block["input"] = texts[data["index"]]
            else:
                block[kind] += delta[kind]
        elif name == "content_block_stop":
            block = message["content"][data["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] = {**message["usage"], **data["usage"]}
    return message


def test_a_stream_adds_up_to_the_message_in_the_published_order(service):
    whole = post(service, **ASKED, tools=[TOOL]).json()
    events = events_of(post(service, **ASKED, tools=[TOOL], stream=True).text)
    names = [name for name, _ in events]
    runs = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block * 4, "message_delta", "message_stop"]
    found = accumulated(events)
    assert {**found, "id": whole["id"]} == whole and found["id"] != whole["id"]


def test_why_a_message_ends(service):
    cases = [
        ({}, "Done.", ("end_turn", None)),
        ({"stop_sequences": ["END", "e."]}, "Done. END", ("stop_sequence", "e.")),
        ({"max_tokens": 3}, "Done.", ("max_tokens", None)),
        ({"tools": [TOOL]}, CALL, ("tool_use", None)),
    ]
    for more, says, expected in cases:
        service.says = says
        told = post(service, **{**ASKED, **more}).json()
        assert (told["stop_reason"], told["stop_sequence"]) == expected


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "where "}, {"type": "text", "text": "is it"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "wait"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "mill"}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {"at": "pond"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "a mill"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "a pond"}]},
            {"type": "text", "text": "so?"},
        ],
    },
]
CALLED = [
    {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": at})}}
    for name, at in (("c1", "mill"), ("c2", "pond"))
]
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "where is it"},
    {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "c1", "content": "a mill"},
    {"role": "tool", "tool_call_id": "c2", "content": "a pond"},
    {"role": "user", "content": "so?"},
]
"""The same conversation in the form of /v1/chat/completions."""


def test_a_request_is_the_chat_request_that_says_the_same(service):
    both = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "max_tokens": 50}
    system = [{"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "kind"}]
    told = post(
        service,
        system=system,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 9},
        stop_sequences=["END"],
        **both,
    )
    function = {"name": "look", "description": "look", "parameters": SCHEMA}
    theirs = post(
        service,
        "/v1/chat/completions",
        messages=CHAT,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="medium",
        thinking_token_budget=9,
        stop=["END"],
        **both,
    )
    assert (told.status_code, theirs.status_code) == (200, 200)
    ours, theirs = service.wanted
    for name in ("prompt", "sampling", "max_new_tokens", "stop_ids", "logit_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [type(each) for each in ours.processors] == [type(each) for each in theirs.processors]
    assert len(ours.processors) == 2 and "think" in service.prompt()


@pytest.mark.parametrize(("thinking", "word"), [("disabled", "quick"), ("adaptive", ""), (None, "")])
def test_thinking_is_switched_by_the_chat_template(service, thinking, word):
    post(service, **ASKED, **({"thinking": {"type": thinking}} if thinking else {}))
    assert service.prompt().endswith("<assistant>" + word)


def test_the_tokens_of_a_request_are_counted_without_an_answer(service):
    body = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    counted = post(service, "/v1/messages/count_tokens", **body, tools=[TOOL])
    told = post(service, **ASKED, tools=[TOOL]).json()
    assert counted.json() == {"input_tokens": told["usage"]["input_tokens"]} and len(service.wanted) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages is missing"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: only text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages: the last one must be the user's"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a string"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0].type: only custom"),
        ({"tools": [{"name": "s"}]}, "tools[0].input_schema must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be"),
        ({"tool_choice": {"type": "any"}}, "goes with tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 999}}, "must be below max_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type must be"),
        ({"output_config": {"effort": "most"}}, "output_config.effort must be one of"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema must be"),
        ({"stop_sequences": [""]}, "stop_sequences: up to 16 texts"),
        ({"max_tokens": 10**6}, "this model's context"),
        ({"stop": ["x"]}, "stop: /v1/messages does not have it; send stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: "),
        ({"container": "x"}, "container: "),
        ({"n": 2}, "n: /v1/messages does not"),
    ],
)
def test_what_is_not_supported_is_refused_in_anthropics_form(service, change, said):
    refused = post(service, **{**ASKED, **change})
    told = refused.json()
    assert refused.status_code == 400 and (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert said in told["error"]["message"], told


def test_errors_have_anthropics_types_and_its_key_is_taken(tmp_path):
    service = Service(tmp_path, "m", api_key="secret")
    refused = post(service, **ASKED)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    key = {"x-api-key": "secret"}
    assert post(service, **ASKED, headers=key).status_code == 200
    other = post(service, **{**ASKED, "model": "village"}, headers=key)
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    assert post(service, **ASKED, headers={"x-api-key": "wrong"}).status_code == 401


def test_anthropics_own_client_reads_messages_streams_and_errors(service):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    httpx2 = pytest.importorskip("httpx2")

    async def work():
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=service.app), base_url="http://m")
        async with anthropic.AsyncAnthropic(
            base_url="http://m", api_key="k", http_client=http, max_retries=0
        ) as client:
            asked = {"model": "town", "max_tokens": 999, "messages": ASKED["messages"], "tools": [TOOL]}
            whole = await client.messages.create(**asked, extra_body={"seed": 3})
            async with client.messages.stream(**asked, extra_body={"seed": 3}) as stream:
                streamed = await stream.get_final_message()
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
                await client.messages.create(**asked, stop_sequences=[""])
            counted = await client.messages.count_tokens(model="town", messages=ASKED["messages"], tools=[TOOL])
            return whole, streamed, counted

    whole, streamed, counted = asyncio.run(work())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    told = [
        [(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in m.content] for m in (whole, streamed)
    ]
    assert told[0] == told[1] and whole.stop_reason == streamed.stop_reason == "tool_use"
    assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"tool_choice": {"type": []}}, "tool_choice.type must be"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type must be"),
        ({"tool_choice": {}}, "tool_choice.type must be"),
    ],
)
def test_what_has_no_meaning_is_refused(service, change, said):
    refused = post(service, **{**ASKED, **change})
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_arguments_that_no_utf8_can_hold_are_answered(service):
    service.says = '<tool_call>\n{"name": "look", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    told = post(service, **ASKED, tools=tools)
    assert told.status_code == 200 and told.json()["content"][-1]["input"] == {"a": "\ud800"}
