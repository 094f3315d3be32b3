# SPDX-License-Identifier: Apache-2.0
"""`sporeloom serve`: an answer depends on the request alone, any client is served; nothing breaks it."""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import psutil
import pytest
from conftest import CONFIGS, call, in_process
from safetensors.numpy import load_file, save_file
from serving import adapter_folder, answers_alone, answers_together, broken_requests, mixed_requests, serving

from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import write_hashes
from sporeloom.models.adapters import LoRAConfig
from sporeloom.serve.config import ServeConfig, check
from sporeloom.serve.service import Service

pytestmark = pytest.mark.slow

PROMPT, JSON = "小镇的早晨", {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, checkpoint, "--served-model-name", "town", "--prefill-chunk", 16, "--max-queue", 200) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.said()


@pytest.fixture(scope="module")
def requests():
    return list(mixed_requests(40))


@pytest.fixture(scope="module")
def alone(server, requests):
    return answers_alone(server, requests)


def equal(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert [told for told, _ in one] == [told for told, _ in other]
        for (_, scores), (_, others) in zip(one, other, strict=True):
            np.testing.assert_allclose(np.asarray(scores, float), np.asarray(others, float), rtol=0, atol=tolerance)


def test_whoever_else_is_served_an_answer_is_the_same_to_the_bit(server, requests, alone):
    assert len({str(told) for told in alone}) == len(requests)
    equal(answers_together(server, requests, 2.0), alone, 0.0)
    assert server.metric("request_success_total") >= len(requests)
    assert server.metric("prefix_cache_hits_total") > 0


def test_a_mesh_answers_as_one_device_does(checkpoint, requests, alone, tmp_path):
    strategy = CONFIGS / "pangu_tiny_tp2_pp2.yaml"
    with serving(tmp_path / "log", checkpoint, "--strategy", strategy, "--launch", "--prefill-chunk", 16) as mesh:
        equal(answers_together(mesh, requests, 2.0), alone, 1e-5)
        victim = rank_process(1, mesh.process.pid)
        open_request = httpx.stream(
            "POST",
            f"{mesh.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True},
            timeout=60,
        )
        with open_request as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(victim, signal.SIGKILL)
            said = list(lines)
        assert mesh.process.wait(10) == 1
        assert "rank 1 is gone" in "".join(said)
        assert "rank 1 is gone" in mesh.said()


def rank_process(rank, launcher):
    """The process of a rank that `launcher` has started, in which it serves: a child of the one that was forked first."""
    family = psutil.Process(launcher).children(recursive=True)
    (child,) = [p for p in family if p.name() == p.parent().name() == f"rank {rank}"]
    return child.pid


def test_the_openai_client_is_served(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == "town"
    asked = {"model": "town", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "seed": 5}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == 12
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens and parts[-2].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="base model"):
        client.chat.completions.create(model="town", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.completions.create(**{**asked, "model": "other"})

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as async_client:
            return await async_client.completions.create(**asked, logprobs=2)

    assert asyncio.run(ask()).choices == whole.choices


TASK = """
task: town
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{[first, second]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def test_the_evaluation_harness_scores_as_our_scorer_does(server, checkpoint, tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": tmp_path / "hf"}.items():
        monkeypatch.setenv(name, str(value))
    lm_eval = pytest.importorskip("lm_eval")
    documents = [
        {"text": "小镇的早晨", "first": "很安静", "second": "下雨了"},
        {"text": "老人坐在河边", "first": "钓鱼", "second": "唱歌"},
        {"text": "孩子们在桥上", "first": "跑来跑去", "second": "睡觉"},
    ]
    (tmp_path / "town.jsonl").write_text("".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents))
    (tmp_path / "town.yaml").write_text(TASK.replace("FILE", str(tmp_path / "town.jsonl")))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"model=town,base_url={server.url}/v1/completions,num_concurrent=2,max_length=128",
        tasks=["town"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    theirs = [[float(score[0]) for score in sample["filtered_resps"]] for sample in found["samples"]["town"]]
    pairs = [(d["text"], d[key]) for d in documents for key in ("first", "second")]
    ours = call("tests/serving_worker.py", "likelihoods", checkpoint, pairs)
    np.testing.assert_allclose(np.ravel(theirs), ours, rtol=0, atol=1e-5)


def test_a_client_that_goes_away_frees_its_rows(server):
    body = {"prompt": PROMPT, "max_tokens": 110, "ignore_eos": True, "n": 64}  # one is done within the time-out
    before = server.metric("generation_tokens_total")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.1)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    running, deadline = server.metric("num_requests_running"), time.monotonic() + 60
    while running and time.monotonic() < deadline:
        time.sleep(0.05)
        running = server.metric("num_requests_running")
    assert running == 0
    assert server.metric("generation_tokens_total") - before < 2 * 64 * 110


def test_no_request_breaks_the_server(server):
    statuses = []
    for path, body in broken_requests(250, seed=3):
        statuses.append(server.client.post(path, content=body, headers=JSON).status_code)
    assert set(statuses) <= {200, 400, 404, 413}
    assert {200, 400, 404} <= set(statuses)
    assert server.complete(prompt=PROMPT, max_tokens=2)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": ""}, "no token", "prompt"),
        ({"prompt": PROMPT, "max_tokens": 500}, "context is 128 tokens", "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": 0}, "goes with echo", "max_tokens"),
        ({"prompt": PROMPT, "temperature": "hot"}, "temperature must be a number, got 'hot'", "temperature"),
        ({"prompt": PROMPT, "top_p": 0}, "top_p must be above 0", "top_p"),
        ({"prompt": PROMPT, "best_of": 3, "stream": True}, "best_of does not go with stream", "best_of"),
        ({"prompt": PROMPT, "suffix": "."}, "not trained to fill in the middle", "suffix"),
        ({"prompt": PROMPT, "logit_bias": {"-1": 1}}, "not a token id", "logit_bias"),
        ({"prompt": [10**6]}, "1000000 is not a token id", "prompt"),
        ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, "goes with stream", "stream_options"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_fields_name(server, body, message, param):
    status, said, field = server.refused(**body)
    assert (status, field) == (400, param) and message in said


def test_fields_do_what_they_say(server):
    free = server.complete(prompt=PROMPT, max_tokens=6, temperature=0, logprobs=1)["choices"][0]
    (token,) = server.client.post("/tokenize", json={"prompt": "河"}).json()["tokens"][-1:]
    biased = server.complete(prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 100})["choices"][0]
    said = server.client.post("/detokenize", json={"tokens": [token] * 3}).json()["prompt"]
    assert biased["text"] == said != free["text"]
    ids = server.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    both = server.complete(prompt=[PROMPT, ids], max_tokens=6, temperature=0, logprobs=1)["choices"]
    assert both[0]["text"] == both[1]["text"] == free["text"]
    echo = server.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert echo["text"] == PROMPT and echo["logprobs"]["token_logprobs"][0] is None
    assert len(echo["logprobs"]["tokens"]) == len(ids)
    scored = server.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    told = zip(ids[1:], scored[1:], echo["logprobs"]["token_logprobs"][1:], strict=True)
    assert scored[0] is None and all(entry[str(token)]["logprob"] == value for token, entry, value in told)
    several = server.complete(prompt=PROMPT, max_tokens=8, seed=4, n=3)
    best = server.complete(prompt=PROMPT, max_tokens=8, seed=4, best_of=3, logprobs=0)
    every = server.complete(prompt=PROMPT, max_tokens=8, seed=4, n=3, logprobs=0)["choices"]
    assert best["usage"]["completion_tokens"] == sum(len(each["logprobs"]["tokens"]) for each in every)
    assert best["choices"][0]["text"] == max(every, key=lambda c: np.mean(c["logprobs"]["token_logprobs"]))["text"]
    assert len({choice["text"] for choice in several["choices"]}) == 3
    again = server.complete(prompt=PROMPT, max_tokens=8, seed=several["seed"])
    assert again["choices"][0]["text"] == several["choices"][0]["text"]


def test_health_metrics_and_page_are_there(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert "sporeloom:time_to_first_token_seconds_bucket" in server.client.get("/metrics").text
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text  # nothing from outside
    assert server.client.post("/").json()["error"]["code"] == 405


def test_a_key_is_asked_for_and_long_bodies_and_more_than_may_wait_are_refused(checkpoint, tmp_path):
    flags = ("--api-key", "secret", "--max-body-kb", 4, "--max-num-seqs", 1, "--max-queue", 8)
    with serving(tmp_path / "log", checkpoint, *flags) as server:
        assert server.client.get("/health").status_code == 200
        assert server.refused(prompt=PROMPT)[0] == 401
        assert server.client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert server.client.post("/v1/completions", json={"prompt": PROMPT}, headers=key).status_code == 200
        assert server.client.post("/v1/completions", json={"prompt": PROMPT * 1000}, headers=key).status_code == 413
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "n": 8}
        for _ in range(10):  # on a busy machine the first 8 may be done before the second request is sent
            first = {"json": {**body, "stream": True}, "headers": key, "timeout": 60}
            with httpx.stream("POST", f"{server.url}/v1/completions", **first) as answer:
                next(answer.iter_lines())
                # 9 alone may wait or run: refused however many of the first 8 are done, as long as one still waits.
                more = {**body, "prompt": [PROMPT] * 3, "n": 3}
                refused = server.client.post("/v1/completions", json=more, headers=key)
            if refused.status_code == 429:
                break
            assert refused.status_code == 200
        assert (refused.status_code, refused.headers.get("Retry-After")) == (429, "1")


def test_mistakes_are_told_before_anything_is_loaded(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "keys").write_text("first\n second\n")
        words = ("--max-model-len", 4000, "--api-key", "", "--api-key-file", tmp_path / "keys")
        outcome = in_process("tools/serve.py", checkpoint, "--port", port, *words)
    assert outcome.code == 2
    lines = (f"--port {port}: cannot listen", "--max-model-len 4000 is more", "--api-key must be", "keys: line 2 must")
    for line in lines:
        assert line in outcome.output


@pytest.mark.parametrize("rank", range(4))
def test_the_rank_that_serves_looks_at_the_port_and_no_other(checkpoint, rank):
    """tp 2, pp 2: rank 2 is the first of the last stage. Another rank may look when it listens already."""
    config = ServeConfig(checkpoint=checkpoint, strategy=CONFIGS / "pangu_tiny_tp2_pp2.yaml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = replace(config, port=taken.getsockname()[1])
        if rank != 2:
            assert check(config, 4, rank).config.port == config.port
            return
        for job in ((4, rank), (None, 0)):  # and the process that will launch it
            with pytest.raises(ConfigError, match=f"--port {config.port}: cannot listen there"):
                check(config, *job)


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 65536, "ports end at 65535"),
        ("no.such.host.invalid", 0, "cannot listen"),
        ("192.0.2.1", 0, "cannot"),
    ],
)
def test_where_nobody_can_listen_is_told_in_a_line(checkpoint, host, port, said):
    outcome = in_process("tools/serve.py", checkpoint, "--host", host, "--port", port)
    assert outcome.code == 2 and said in outcome.output and outcome.output.count("\n") == 1, outcome.output


def test_a_folder_for_prompts_that_cannot_be_used_is_told_at_once(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    mesh = CONFIGS / "pangu_tiny_tp2_pp2.yaml"
    for words, said in (
        (("--prefix-cache-dir", tmp_path / "file"), "it is a file; give a folder"),
        (("--prefix-cache-dir", tmp_path / "new", "--prefix-cache-gb", 0), "leave out --prefix-cache-gb 0"),
        (("--prefix-cache-dir", tmp_path / "new", "--strategy", mesh), "for one device, but the strategy has 4"),
        (("--prefix-cache-dir-gb", 3), "is for files; add --prefix-cache-dir FOLDER"),
        (("--prefix-cache-dir", tmp_path / "open"), "other users have access to it (mode 755)"),
        (("--prefix-cache-gb", 1e-7), "--prefix-cache-gb 1e-07: no room for a block of 16 tokens, which takes "),
        (("--prefix-cache-dir", tmp_path / "new", "--prefix-cache-dir-gb", 1e-7), "no room for 2 blocks of 16 tokens"),
    ):
        outcome = in_process("tools/serve.py", checkpoint, "--port", 0, *words)
        assert outcome.code == 2 and said in outcome.output and "loading" not in outcome.output, outcome.output
    assert not (tmp_path / "new").exists()


def test_hosts_and_origins_that_are_none_are_told_at_once(checkpoint):
    words = ("--allowed-hosts", "http://a.b", "--allowed-origins", "a.b", "--port", 0)
    outcome = in_process("tools/serve.py", checkpoint, *words)
    assert outcome.code == 2
    assert "--allowed-hosts 'http://a.b'" in outcome.output and "--allowed-origins 'a.b'" in outcome.output


def test_adapters_that_cannot_be_served_are_told_at_once(checkpoint, tmp_path):
    lora, others = LoRAConfig(target_modules=("mlp.up",)), tmp_path / "others"
    shutil.copytree(checkpoint, others)
    folders = {name: tmp_path / name for name in ("helper", "spoilt", "foreign")}
    for name, folder in folders.items():
        adapter_folder(folder, others if name == "foreign" else checkpoint, lora, 0)
    tensors = load_file(folders["spoilt"] / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, folders["spoilt"] / "adapter_model.safetensors")
    write_hashes(folders["spoilt"])
    words = [f"{name}={folder}" for name, folder in folders.items()]
    words += ["helper", f"empty={tmp_path}", f"helper={folders['helper']}"]
    outcome = in_process("tools/serve.py", checkpoint, "--port", 0, "--lora-modules", *words)
    assert outcome.code == 2
    for line in (
        *("adapter_model.safetensors: not finite: ", f"adapters of {tmp_path}", "base_model_name_or_path"),
        *("helper: write NAME=FOLDER", f"{tmp_path}/adapter_config.json is not there", "helper names two models"),
    ):
        assert line in outcome.output, outcome.output


def test_texts_that_nobody_has_begun_are_told_of_a_failure_too():
    service, told, wanted = Service(SimpleNamespace(models=[], num_reserved=0)), [], SimpleNamespace(client=0)
    service.submit(wanted, told.append)
    service.fail("rank 1 is gone")
    service.submit(wanted, told.append)
    assert [each.reason for each in told] == ["rank 1 is gone"] * 2


def test_a_later_server_finds_the_prompts_of_an_earlier_one_and_answers_as_that_did(checkpoint, tmp_path):
    """With adapters; without, test_serve_prefix_dir."""
    words = checkpoint, "--served-model-name", "town", "--prefill-chunk", 16, "--prefix-cache-dir", tmp_path / "prompts"
    helper, names = tmp_path / "helper", ["town", "helper"]
    adapter_folder(helper, checkpoint, LoRAConfig(target_modules=("mlp.up",)), 0)
    asked, found = {"prompt": PROMPT * 5, "max_tokens": 12, "seed": 5, "logprobs": 2}, []
    for process in range(2):
        with serving(tmp_path / "log", *words, "--lora-modules", f"helper={helper}") as running:
            found.append([running.complete(model=name, **asked) for name in names])
            if process == 0:
                outcome = in_process("tools/serve.py", *words, "--port", 0)
                assert outcome.code == 2 and "writes there since" in outcome.output
            assert running.stop() == 0
    cold, warm = [[each["choices"] for each in answers] for answers in found]
    assert warm == cold and len({str(choices) for choices in cold}) == len(names)
    cached = [[each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers] for answers in found]
    assert cached[0] == [0] * len(names) and min(cached[1]) >= 16
