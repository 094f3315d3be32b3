# SPDX-License-Identifier: Apache-2.0
"""Requests that make no sense to any API: refused or answered, never an error of the server."""

import asyncio
import json
import random

import pytest
from scripted_service import Service

TURN = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "input_schema": {"type": "object"}}
VALUES = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        7,
        2**70,
        0.5,
        float("inf"),
        "",
        "x",
        "auto",
        "小镇",
        [],
        {},
        [1],
        ["a", 1],
        [[]],
        [{}],
    ),
    *(
        [TURN],
        [TURN, CALL],
        [CALL],
        [{**CALL, "arguments": "["}],
        [{"role": "assistant", "content": None}],
        [TOOL],
        TOOL,
    ),
    *({"type": []}, {"type": {}}, [{"role": "user", "content": []}], [{**TOOL, "description": "\ud800"}]),
    *([{**TOOL, "x": float("nan")}], {"format": {"type": "text", "x": float("inf")}}, "\ud800", ["\ud800"]),
    *({"type": "text"}, {"type": "enabled", "budget_tokens": 3}, {"type": "tool", "name": "f"}, {"type": "any"}),
    *({"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}, {"type": "function", "name": "f"}),
    *([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 3}]}], [{"type": "text", "text": 5}]),
    [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}],
]
NAMES = {
    "/v1/responses": [
        *("input", "instructions", "previous_response_id", "store", "metadata", "max_output_tokens", "tools", "stream"),
        *(
            "tool_choice",
            "reasoning",
            "text",
            "include",
            "stream_options",
            "truncation",
            "seed",
            "stop",
            "n",
            "priority",
        ),
    ],
    "/v1/messages": [
        *("messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"),
        *("metadata", "stream", "temperature", "top_k", "seed", "service_tier", "priority", "container"),
    ],
}
GOOD = {"/v1/responses": {"input": "hi"}, "/v1/messages": {"messages": [TURN], "max_tokens": 5}}


@pytest.mark.parametrize("path", NAMES)
def test_no_request_breaks_the_server(tmp_path, path):
    service, draw = Service(tmp_path, "<think>a</think>b"), random.Random(5)

    async def work():
        statuses = []
        async with service.http() as http:  # an exception within the server is raised here
            for _ in range(400):
                names = draw.sample(NAMES[path], draw.randint(0, 2))
                body = {**(GOOD[path] if draw.random() < 0.8 else {}), **{name: draw.choice(VALUES) for name in names}}
                answer = await http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
                told = answer.text if answer.headers["content-type"].startswith("text/event") else answer.json()
                assert told
                statuses.append(answer.status_code)
        return statuses

    statuses = asyncio.run(work())
    assert set(statuses) <= {200, 400, 404} and min(statuses.count(200), statuses.count(400)) > 20
