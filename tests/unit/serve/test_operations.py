# SPDX-License-Identifier: Apache-2.0
"""Probes, structured logs and the dashboard of a server."""

import asyncio
import json
import re
import runpy

import pytest
from conftest import ROOT
from scripted_service import Service


def get(service, path):
    async def work():
        async with service.http() as http:
            return await http.get(path)

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [("loading", 200, 503), ("ready", 200, 200), ("draining", 200, 503), ("failed", 503, 503)],
)
def test_a_process_is_alive_while_it_loads_and_ready_afterwards(tmp_path, state, live, ready):
    service = Service(tmp_path, api_key="secret")
    service.state = state
    assert [get(service, path).status_code for path in ("/live", "/ready", "/health")] == [live, ready, ready]


def test_each_request_is_a_line_of_json_without_what_it_says(tmp_path, capsys):
    service = Service(tmp_path, "Hush", log_format="json")

    async def work():
        async with service.http() as http:
            body = {"prompt": "quiet", "max_tokens": 3, "seed": 7, "n": 2}
            await http.post("/v1/completions", json=body)
            await http.post("/v1/completions", json={**body, "stream": True})
            await http.post("/v1/completions", json={})
            await http.get("/ready")
            await http.get("/nothing" + "/x" * 200)

    asyncio.run(work())
    said = capsys.readouterr().out
    told = [json.loads(line) for line in said.splitlines()]
    assert [(each["method"], each["status"]) for each in told] == [
        ("POST", 200),
        ("POST", 200),
        ("POST", 400),
        ("GET", 404),
    ]
    whole, streamed = told[:2]
    count = len(service.tokenizer.encode("quiet"))
    for each, is_streamed in ((whole, False), (streamed, True)):
        assert (each["model"], each["seed"], each["stream"]) == ("town", 7, is_streamed)
        assert (each["prompt_tokens"], each["completion_tokens"]) == (count, 6)
        assert each["finish_reasons"] == ["length", "length"]
        assert 0 <= each["time_to_first_token_s"] <= each["seconds"]
    assert "model" not in told[2] and len(told[3]["path"]) == 200
    assert "quiet" not in said and "Hus" not in said


def test_nothing_is_logged_by_default(tmp_path, capsys):
    get(Service(tmp_path, "Hush"), "/v1/models")
    assert capsys.readouterr().out == ""


def test_the_dashboard_shows_metrics_that_the_server_has(tmp_path):
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    text = get(Service(tmp_path), "/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    known = {*kinds, *(f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram")}
    named = {name for query in queries for name in re.findall(r"sporeloom:\w+", query)}
    assert len(named) > 10 and named <= known, named - known
    generated = runpy.run_path(str(ROOT / "docs/generate.py"))["server_metrics"]()
    assert {name.removesuffix("_bucket") for name in named} <= set(re.findall(r"`(sporeloom:\w+)`", generated))
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) and all(each["title"] for each in board["panels"])


def test_the_log_names_routes_errors_and_clients(tmp_path, capsys):
    service = Service(tmp_path, "Hush", log_format="json", file_keys=("one", "two"))

    async def work():
        async with service.http() as http:
            http.headers["Authorization"] = "Bearer two"
            for name in ("resp_1", "v1"):
                await http.get(f"/v1/responses/{name}")
            await http.get("/v1/models", headers={"Authorization": "Bearer three"})
            with pytest.raises(ZeroDivisionError):  # which the server answers with 500
                await http.post("/v1/completions", json={"prompt": "x"})

    service.submit = lambda *_: 1 // 0
    asyncio.run(work())
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(each["path"], each["status"], each["client"]) for each in told] == [
        *[("/v1/responses/{name}", 404, 1)] * 2,
        ("/v1/models", 401, None),
        ("/v1/completions", 500, 1),
    ]
