# SPDX-License-Identifier: Apache-2.0
"""Batch files: what is a request, the order of the answers, and where an output is continued."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from scripted_service import Service

from sporeloom.core.errors import ConfigError
from sporeloom.serve.batch import BatchJob, BatchRequest, finished_ids, read_requests
from sporeloom.serve.batch_run import Writer, app_asker


def line(name, url="/v1/completions", **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def job(folder, count, num_rows=2):
    requests = [BatchRequest(f"r{i}", "/v1/completions", {"prompt": str(i)}) for i in range(count)]
    return BatchJob(SimpleNamespace(num_rows=num_rows), folder / "out.jsonl", requests, 0)


def test_answers_are_in_the_order_of_the_requests_whichever_comes_first(tmp_path):
    running, most = 0, 0

    async def ask(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (10 - int(request.body["prompt"])))
        running -= 1
        return (400 if request.custom_id == "r3" else 200), {"said": request.custom_id}

    writer = Writer(job(tmp_path, 9), ask)
    asyncio.run(writer.run())
    told = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in told] == [f"r{i}" for i in range(9)]
    assert [each["response"]["body"]["said"] for each in told] == [f"r{i}" for i in range(9)]
    assert [each["response"]["status_code"] for each in told] == [200] * 3 + [400] + [200] * 5
    assert most == 4 and (writer.num_written, writer.num_failed) == (9, 1)


def test_requests_without_room_are_sent_again_and_those_after_the_end_are_not_written(tmp_path):
    tries = {}

    async def ask(request):
        tries[request.custom_id] = tries.get(request.custom_id, 0) + 1
        if request.custom_id == "r1" and tries["r1"] < 3:
            return 429, {}
        return (503 if request.custom_id == "r2" else 200), {}

    writer = Writer(job(tmp_path, 4), ask)
    asyncio.run(writer.run())
    assert tries["r1"] == 3 and finished_ids(tmp_path / "out.jsonl") == ["r0", "r1"]


def test_an_output_is_continued_behind_its_last_complete_line(tmp_path):
    output = tmp_path / "out.jsonl"
    assert finished_ids(output) == []
    complete = '{"custom_id": "a"}\n{"custom_id": "小"}\n'
    output.write_text(complete + '{"custom_id": "c", "resp', encoding="utf-8")
    assert finished_ids(output) == ["a", "小"] and output.read_text(encoding="utf-8") == complete
    output.write_text('{"custom_id": "c')
    assert finished_ids(output) == [] and output.read_text() == ""
    output.write_text("notes\n")
    with pytest.raises(ConfigError, match="line 1 is not an answer of a batch"):
        finished_ids(output)


def test_all_wrong_lines_are_told_at_once(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [
        *(line("a", prompt="x"), "{", "[]", line("", prompt="x"), line("b", url="/v1/files"), line("a", prompt="y")),
        *(
            line("c", stream=True),
            json.dumps({"custom_id": "d", "method": "GET", "url": "/v1/completions", "body": {}}),
        ),
        json.dumps({"custom_id": "e", "url": "/v1/completions", "body": "x"}),
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as raised:
        read_requests(path)
    said = [
        *("line 2: not JSON", "line 3: an object", "line 4: custom_id must", "line 5: url must be one of"),
        *("line 6: custom_id 'a' is that of line 1", "line 7: body.stream", "line 8: method must be POST"),
        "line 9: body must be an object",
    ]
    assert len(raised.value.problems) == len(said)
    for expected, problem in zip(said, raised.value.problems, strict=True):
        assert expected in problem
    path.write_text("\n" + line("a", prompt="x") + "\n\n" + line("b", url="/v1/messages") + "\n")
    assert [(each.custom_id, each.url) for each in read_requests(path)] == [
        ("a", "/v1/completions"),
        ("b", "/v1/messages"),
    ]


def test_every_api_is_asked_within_the_process(tmp_path):
    service = Service(tmp_path, "Hello")
    service.job.config.__dict__["host"] = "127.0.0.1"
    ask, turn = app_asker(service), [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": turn},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": turn, "max_tokens": 9},
    }

    async def work():
        found = [await ask(BatchRequest("x", url, body)) for url, body in bodies.items()]
        return found, await ask(BatchRequest("x", "/v1/completions", {}))

    found, refused = asyncio.run(work())
    assert [status for status, _ in found] == [200] * 4
    assert all("Hello" in json.dumps(body) for _, body in found)
    assert refused[0] == 400 and refused[1]["error"]["param"] == "prompt"


def test_an_output_cut_within_a_character_is_continued_and_one_of_another_kind_is_left_alone(tmp_path):
    output, complete = tmp_path / "out.jsonl", '{"custom_id": "小"}\n'.encode()
    output.write_bytes(complete + '{"custom_id": "镇'.encode()[:-1])
    assert finished_ids(output) == ["小"] and output.read_bytes() == complete
    output.write_bytes(b"\xff\xfe notes\nmore")
    with pytest.raises(ConfigError, match="line 1 is not an answer of a batch"):
        finished_ids(output)
    assert output.read_bytes() == b"\xff\xfe notes\nmore"


def test_half_a_character_in_an_id_or_an_answer_stops_no_batch(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("\ud800", prompt="x"), line("b", prompt="y")]))
    requests = read_requests(path)

    async def ask(request):
        return 200, {"said": "\udc00"}

    made = BatchJob(SimpleNamespace(num_rows=2), tmp_path / "out.jsonl", requests, 0)
    asyncio.run(Writer(made, ask).run())
    assert finished_ids(made.output) == ["\ud800", "b"]
