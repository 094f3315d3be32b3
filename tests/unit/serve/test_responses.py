# SPDX-License-Identifier: Apache-2.0
"""/v1/responses by OpenAI's own client: the same prompts as a chat's, events in the published order."""

import asyncio
import itertools
import json
import time
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter
from scripted_service import Service

from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.blocks import reasoning_tokens
from sporeloom.serve.fields import RequestError
from sporeloom.serve.responses.store import ResponseStore, StoredResponse

openai = pytest.importorskip("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "mill"}}\n</tool_call>'
SAID = f"<think>Where is it?</think>\n\nI shall look.{CALL}{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
TOOL = {"type": "function", "name": "look", "description": "look", "parameters": SCHEMA, "strict": False}
ASKED = {"model": "town", "input": "hi", "seed": 3}


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path, SAID)


def post(service, path="/v1/responses", **body):
    async def work():
        async with service.http() as http:
            return await http.post(path, json=body)

    return asyncio.run(work())


def raw(service, content, path="/v1/responses"):
    async def work():
        async with service.http() as http:
            return await http.post(path, content=content, headers={"Content-Type": "application/json"})

    return asyncio.run(work())


def events_of(text):
    """(name, data) of each server-sent event."""
    found = [part.split("\n") for part in text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def said(text):
    return {"type": "input_text", "text": text}


def without_ids(value):
    """A response without what differs from one to the next."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "created_at")}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_reasoning_text_and_calls_are_items(service):
    told = post(service, **ASKED, tools=[TOOL]).json()
    Response.model_validate(told)
    kinds = [(item["type"], item["status"]) for item in told["output"]]
    assert kinds == [(kind, "completed") for kind in ("reasoning", "message", "function_call", "function_call")]
    assert told["output"][0]["content"] == [{"type": "reasoning_text", "text": "Where is it?"}]
    assert told["output"][1]["content"][0]["text"] == "I shall look."
    assert json.loads(told["output"][2]["arguments"]) == {"at": "mill"} and told["output"][2]["name"] == "look"
    assert len({item["call_id"] for item in told["output"][2:]}) == 2
    assert told["usage"]["output_tokens"] == len(SAID) + 1
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Where is it?</think>")
    assert told["usage"]["input_tokens"] == len(service.wanted[0].prompt)
    assert (told["status"], told["tools"], told["tool_choice"], told["seed"]) == ("completed", [TOOL], "auto", 3)


def test_a_stream_adds_up_to_the_response_in_the_published_order(service):
    whole = post(service, **ASKED, tools=[TOOL]).json()
    events = events_of(post(service, **ASKED, tools=[TOOL], stream=True).text)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    for _, data in events:
        TypeAdapter(ResponseStreamEvent).validate_python(data)
    names = [name.removeprefix("response.") for name, _ in events]
    runs = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]

    def part(kind):
        return ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]

    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    inner = [part("reasoning_text"), part("output_text"), call, call]
    items = [["output_item.added", *each, "output_item.done"] for each in inner]
    assert runs == ["created", "in_progress", *itertools.chain(*items), "completed"]
    assert without_ids(events[-1][1]["response"]) == without_ids(whole)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    for place, item in enumerate(done):
        deltas = "".join(d["delta"] for _, d in events if d.get("output_index") == place and "delta" in d)
        assert deltas == item.get("arguments", item.get("content", [{}])[0].get("text") if "content" in item else "")


def test_the_openai_client_accumulates_a_stream(service):
    async def work():
        async with service.openai() as client:
            whole = await client.responses.create(model="town", input="hi", extra_body={"seed": 3})
            async with client.responses.stream(model="town", input="hi", extra_body={"seed": 3}) as stream:
                async for _ in stream:
                    pass
                return whole, await stream.get_final_response()

    service.says = "<think>So.</think>The mill."
    whole, streamed = asyncio.run(work())
    assert whole.output_text == streamed.output_text == "The mill."
    assert streamed.usage == whole.usage


def test_a_request_is_the_chat_request_that_says_the_same(service):
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [said("where "), said("is it")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "mill"}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"at": "pond"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a mill"},
        {"type": "function_call_output", "call_id": "c2", "output": [said("a pond")]},
    ]
    called = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": at})}}
        for name, at in (("c1", "mill"), ("c2", "pond"))
    ]
    messages = [
        {"role": "system", "content": "short"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "where is it"},
        {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "a mill"},
        {"role": "tool", "tool_call_id": "c2", "content": "a pond"},
    ]
    both = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "parallel_tool_calls": False, "repetition_penalty": 1.5}
    function = {key: value for key, value in TOOL.items() if key != "type"}
    post(
        service,
        input=items,
        instructions="short",
        max_output_tokens=9,
        reasoning={"effort": "high"},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
        **both,
    )
    chat = post(
        service,
        "/v1/chat/completions",
        messages=messages,
        max_completion_tokens=9,
        reasoning_effort="high",
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "look"}},
        **both,
    )
    assert chat.status_code == 200
    ours, theirs = service.wanted
    for name in ("prompt", "sampling", "max_new_tokens", "stop_ids", "logit_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert "think" in service.prompt() and len(ours.processors) == len(theirs.processors) == 1


def test_a_conversation_continues_from_a_stored_response(service):
    first = post(service, **ASKED, tools=[TOOL], instructions="once").json()
    call = first["output"][2]
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "a mill"}
    second = post(service, input=[answer], previous_response_id=first["id"], tools=[TOOL])
    assert second.status_code == 200 and second.json()["previous_response_id"] == first["id"]
    continued = service.prompt()
    carried = [{"role": "user", "content": "hi"}, *first["output"], answer]
    assert post(service, input=carried, tools=[TOOL]).status_code == 200
    assert service.prompt() == continued and "once" not in continued

    async def keep():
        async with service.http() as http:
            found = await http.get(f"/v1/responses/{first['id']}")
            gone = await http.delete(f"/v1/responses/{first['id']}")
            return found.json(), gone.json(), (await http.get(f"/v1/responses/{first['id']}")).status_code

    found, gone, status = asyncio.run(keep())
    assert found == first and gone["deleted"] and status == 404
    refused = post(service, input="x", previous_response_id=first["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    unkept = post(service, input="x", store=False).json()
    assert post(service, input="x", previous_response_id=unkept["id"]).status_code == 404


def test_the_store_forgets_what_was_used_least_recently(tmp_path):
    def response(name):
        return StoredResponse({"id": name, "text": "x" * 100}, (ChatMessage("user", "h" * 100),))

    size = len(json.dumps(response("a").body)) + len(json.dumps([["user", "h" * 100, None]]))
    store = ResponseStore(3 * size)
    for name in "abc":
        store.put(response(name))
    assert store.get("a") == response("a")
    store.put(response("d"))
    store.put(StoredResponse({"id": "e", "text": "x" * 3 * size}, ()))  # more than there is room for
    for name, is_kept in zip("abcde", (True, False, True, True, False), strict=True):
        if is_kept:
            assert store.get(name).body["id"] == name
        else:
            with pytest.raises(RequestError, match="no longer"):
                store.get(name)
    store.delete("a")
    store.put(response("b"))
    assert store.get("c").body["id"] == "c"
    off = Service(tmp_path, "m", response_store_mb=0)
    assert post(off, input="x").json()["store"] is False
    assert post(off, input="x", store=True).json()["error"]["param"] == "store"


def test_a_response_is_its_clients_alone(tmp_path):
    service = Service(tmp_path, "Yes.", file_keys=("one", "two"))

    async def ask(http, key, method, path, **body):
        headers = {"Authorization": f"Bearer {key}"}
        return await http.request(method, path, headers=headers, **({"json": body} if body else {}))

    async def work():
        async with service.http() as http:
            first = (await ask(http, "one", "POST", "/v1/responses", input="secret")).json()
            path, follow = f"/v1/responses/{first['id']}", {"input": "x", "previous_response_id": first["id"]}
            statuses = []
            for key in ("two", "one"):
                statuses.append([(await ask(http, key, "POST", "/v1/responses", **follow)).status_code])
                statuses[-1] += [(await ask(http, key, method, path)).status_code for method in ("GET", "DELETE")]
            return statuses

    assert asyncio.run(work()) == [[404] * 3, [200] * 3]
    assert "secret" in service.prompt()


def test_what_a_response_repeats_can_always_be_written(service):
    half = {**TOOL, "description": "\ud800"}
    asked = {**ASKED, "tools": [half], "tool_choice": "none"}
    found = [raw(service, json.dumps({**asked, "stream": stream})) for stream in (False, True)]
    assert [each.status_code for each in found] == [200, 200] and found[0].json()["tools"] == [half]
    assert events_of(found[1].text)[-1][1]["response"]["tools"] == [half]
    for name, value in (
        ("tools", [{**TOOL, "x": float("nan")}]),
        ("text", {"format": {"type": "text", "x": float("inf")}}),
        ("tool_choice", {"type": "function", "name": "look", "x": float("-inf")}),
    ):
        refused = raw(service, json.dumps({**ASKED, "tools": [TOOL], name: value}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert "NaN or infinity" in refused.json()["error"]["message"]


def test_reasoning_of_many_tokens_is_counted_in_linear_time(service):
    service.says = " \n<think>" + "<think" * 99 + "</think>The end</think>"
    told = post(service, **ASKED, max_output_tokens=400).json()
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] == 400  # cut within it
    choice = SimpleNamespace(
        parser=SimpleNamespace(form=service.job.models[0].form, began_in_reasoning=False),
        completion=SimpleNamespace(tokens=list(service.says.encode())),
        token_bytes=lambda token: bytes([token]),
    )
    assert reasoning_tokens(choice) == service.says.index("</think>") + len("</think>")
    choice.completion.tokens = list(b"No <think>a</think>")
    assert reasoning_tokens(choice) == 0
    choice.completion.tokens = list(b"<think>" + b"x" * 300_000)
    began = time.process_time()
    assert reasoning_tokens(choice) == 300_007
    assert time.process_time() - began < 5  # copying all of it for each token takes a minute


def test_an_answer_that_is_cut_is_incomplete(service):
    told = post(service, **ASKED, max_output_tokens=30).json()
    assert told["status"] == "incomplete" and told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in told["output"]] == ["completed", "incomplete"]
    events = events_of(post(service, **ASKED, max_output_tokens=30, stream=True).text)
    assert events[-1][0] == "response.incomplete"
    assert without_ids(events[-1][1]["response"]) == without_ids(told)


@pytest.mark.parametrize(
    ("change", "said", "param"),
    [
        ({"input": []}, "input is missing", "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role must be", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference' is not supported", "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "arguments must be", "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "the last one must be", "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: only function", "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name must be", "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice must be", "tool_choice"),
        ({"max_output_tokens": 10**6}, "this model's context", "max_output_tokens"),
        ({"max_tokens": 5}, "/v1/responses does not have it; send max_output_tokens", "max_tokens"),
        ({"background": True}, "background: ", "background"),
        ({"conversation": "conv_1"}, "send previous_response_id", "conversation"),
        ({"truncation": "auto"}, "truncation: ", "truncation"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort must be one of", "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "there are no summaries", "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be", "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be a JSON schema", "text.format"),
        ({"include": ["file_search_call.results"]}, "include: ", "include"),
        ({"metadata": {"a": 1}}, "metadata: ", "metadata"),
        ({"n": 2}, "n: /v1/responses does not", "n"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(service, change, said, param):
    refused = post(service, **{**ASKED, **change})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert said in error["message"] and error["param"] == param, error
