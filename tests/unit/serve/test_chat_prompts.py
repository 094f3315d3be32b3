# SPDX-License-Identifier: Apache-2.0
"""What tokens a server makes of conversations: those of training, off its event loop, with what clients say as text."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from vocabularies import TURNS, glm4_files, sentencepiece_model

from codegeex.tokenizer import open_tokenizer as open_code
from pangu.tokenizer import open_tokenizer as open_pangu
from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import with_template
from sporeloom.data.tokenizer import ChatMessage, chat_prompt, infill_prompt
from sporeloom.serve import prepare
from sporeloom.serve.app import Server, build_app
from sporeloom.serve.config import ServeConfig, ServedModel, ServeJob
from sporeloom.strategy.config import SINGLE_DEVICE

SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ASKED = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi<|assistant|>[unused10][unused9]"}]


@pytest.fixture
def asked(monkeypatch):
    """Prompts that would be answered."""
    prompts = []

    async def answer(self, request, asked, prepared, form):
        prompts.extend(prepared.prompts)
        return await self.models(request)

    monkeypatch.setattr(Server, "_answer", answer)
    return prompts


def client(tokenizer):
    config = ServeConfig(checkpoint=Path("m"), host="m", max_body_kb=100)
    models = (ServedModel("m", tokenizer, (tokenizer.eod_id,)),)
    job = ServeJob(config, "codegeex", SimpleNamespace(seq_len=99), SINGLE_DEVICE, models)
    load = SimpleNamespace(running=0, used_slots=0.0, reused_tokens=0, drafts=0, drafted=0, accepted=0)
    service = SimpleNamespace(job=job, state="ready", load=load, num_waiting=0)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=build_app(service)), base_url="http://m")


def post(tokenizer, path, **body):
    async def work():
        async with client(tokenizer) as http:
            return await http.post(path, json=body)

    return asyncio.run(work())


def tokenizer_of(folder, kind):
    if kind == "openpangu":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(user_defined_symbols=TURNS))
        return open_pangu(folder / "tokenizer.model")
    glm4_files(folder)
    if kind == "template":
        text = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if think %}!{% endif %}"
        (folder / "chat_template.jinja").write_text(text)
    return with_template(open_code(folder / "tokenizer.json"), folder)


@pytest.mark.parametrize("kind", ["openpangu", "glm4", "template"])
def test_a_chat_has_the_tokens_of_training(tmp_path, asked, kind):
    tokenizer = tokenizer_of(tmp_path, kind)
    expected = chat_prompt(tokenizer, [ChatMessage(**message) for message in ASKED])
    assert post(tokenizer, "/v1/chat/completions", messages=ASKED).status_code == 200
    assert asked == [expected.tokens]
    assert post(tokenizer, "/tokenize", messages=ASKED).json()["tokens"] == list(expected.tokens)
    closed = chat_prompt(tokenizer, [ChatMessage(**message) for message in ASKED], False).tokens
    found = post(tokenizer, "/tokenize", messages=ASKED, add_generation_prompt=False).json()["tokens"]
    assert found == list(closed)


def test_a_prompt_is_written_as_a_whole_and_code_around_a_gap_is_text(tmp_path, asked):
    tokenizer = tokenizer_of(tmp_path, "glm4")
    post(tokenizer, "/v1/completions", prompt="a<|user|>b")
    post(tokenizer, "/v1/completions", prompt="a<|user|>b", suffix="<|user|>")
    assert asked == [tuple(tokenizer.encode("a<|user|>b")), infill_prompt(tokenizer, "a<|user|>b", "<|user|>").tokens]
    special = set(tokenizer.token_names)
    assert [sum(token in special for token in prompt) for prompt in asked] == [3, 4]
    assert post(tokenizer, "/tokenize", prompt="a<|user|>b").json()["tokens"] == list(asked[0])


def test_variables_of_a_template_come_with_the_request(tmp_path, asked):
    tokenizer = tokenizer_of(tmp_path, "template")
    post(tokenizer, "/v1/chat/completions", messages=ASKED, chat_template_kwargs={"think": True})
    assert tokenizer.decode(list(asked[0])).endswith("[unused9]!")
    refused = post(tokenizer, "/v1/chat/completions", messages=ASKED, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
    other = tokenizer_of(tmp_path, "openpangu")
    refused = post(other, "/v1/chat/completions", messages=ASKED, chat_template_kwargs={"think": True})
    assert (
        refused.json()["error"]["message"] == "OpenPanguTokenizer has no chat template, so no variables for one: think"
    )


def test_a_template_that_takes_long_is_refused_and_stops_nobody_meanwhile(tmp_path):
    glm4_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SLOW)
    tokenizer = with_template(open_code(tmp_path / "tokenizer.json"), tmp_path)

    async def work():
        async with client(tokenizer) as http:
            slow = asyncio.ensure_future(http.post("/v1/chat/completions", json={"messages": ASKED}))
            longest, others = 0.0, 0
            while not slow.done():
                begin = time.monotonic()
                assert (await http.get("/health")).status_code == 200
                await asyncio.sleep(0.001)
                longest, others = max(longest, time.monotonic() - begin), others + 1
            return await slow, longest, others

    answer, longest, others = asyncio.run(work())
    assert answer.status_code == 400 and "takes more than 1 s to render" in answer.json()["error"]["message"]
    assert others > 10 and longest < 0.9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[9].role.upper() }}", "no element 9"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'x.jinja' %}", "chat template: "),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "chat template: "),
        (SLOW, "takes more than 1 s"),
        ("{{ '\\ud800' }}", "half a character"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_a_template_says_names_no_file_of_the_server(tmp_path, text, said, path):
    glm4_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    answer = post(with_template(open_code(tmp_path / "tokenizer.json"), tmp_path), path, messages=ASKED)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text and "jinja" not in answer.text.replace("x.jinja", "")


def test_many_slow_conversations_leave_the_others_their_threads(monkeypatch, tmp_path):
    """As templates are rendered one at a time, each of 100 would hold a thread for as long as all before it take."""
    tokenizer, one_at_a_time = tokenizer_of(tmp_path, "glm4"), threading.Lock()

    def slow(*_):
        with one_at_a_time:
            time.sleep(0.05)
        raise ConfigError("slow")

    monkeypatch.setattr(prepare, "chat_prompt", slow)

    async def work():
        async with client(tokenizer) as http:
            chats = [asyncio.ensure_future(http.post("/tokenize", json={"messages": ASKED})) for _ in range(100)]
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
            took = time.monotonic() - begin
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)
            return took

    assert asyncio.run(work()) < 0.5
