# SPDX-License-Identifier: Apache-2.0
"""Servers for tests, each on a port of its own, and what is asked of them."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import sentencepiece
from conftest import ROOT, TWO_LAYERS, tool

from sporeloom.checkpoint.adapters import Adapter, write_adapter
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.models.adapters import LoRAConfig

TEXT = (ROOT / "examples/small_town.txt").read_text(encoding="utf-8")
START_S, END_S = 180, 30


class Server:
    """`sporeloom serve` in processes of its own."""

    def __init__(self, log: Path, *arguments):
        self.log = log
        words = [sys.executable, "-m", "sporeloom", "serve", *map(str, arguments), "--port", "0"]
        with log.open("w") as file:
            self.process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        self.url = self._address()
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if match := re.search(r"is served at (\S+)", self.said()):
                return match[1]
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)
        raise AssertionError(self.said())

    def complete(self, **body):
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path="/v1/completions", **body):
        """Status, message and field of a request that cannot be done."""
        answer = self.client.post(path, json=body)
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        return answer.status_code, error["message"], error["param"]

    def metric(self, name: str) -> float:
        found = re.findall(rf"^sporeloom:{name}\{{.*\}} (\S+)$", self.client.get("/metrics").text, re.M)
        return sum(map(float, found))

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def serving(log: Path, *arguments):
    server = Server(log, *arguments)
    try:
        yield server
    finally:
        server.stop()


def chatting_checkpoint(folder: Path, config: Path = TWO_LAYERS) -> Path:
    """Of openPangu's tiny model, whose tokenizer knows turns; hardly trained."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": iter(TEXT.splitlines()), "model_writer": model, "model_type": "bpe", "vocab_size": 900},
        **{"byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2},
        user_defined_symbols=[f"[unused{i}]" for i in range(4, 11)],  # the last one ends documents: id 9
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    outcome = tool(
        *(
            "tools/train.py",
            "--size",
            "embedded_tiny",
            "--data",
            ROOT / "examples/small_town.txt",
            "--steps",
            2,
            "--seq-len",
            64,
        ),
        *("--tokenizer", folder / "tokenizer.model", "--config", config, "--output-dir", folder / "out"),
    )
    assert outcome.code == 0, outcome.output
    return folder / "out" / "checkpoint"


def adapter_folder(folder: Path, checkpoint: Path, lora: LoRAConfig, seed: int, deviation: float = 0.2) -> Path:
    """Adapters for a checkpoint's model with drawn weights of this standard deviation, as PEFT writes them."""
    (family, model), draw = load_config(checkpoint), np.random.default_rng(seed)
    weights = {name: draw.normal(0, deviation, shape).astype(np.float32) for name, shape in lora.shapes(model).items()}
    write_adapter(folder, Adapter(lora, weights), family, model, checkpoint)
    return folder


def mixed_requests(count: int, seed: int = 7):
    """Prompts, lengths, seeds, temperatures and stops of all kinds."""
    draw = random.Random(seed)
    for _ in range(count):
        start, length = draw.randrange(len(TEXT) - 200), draw.choice([2, 5, 10, 20, 30, 40])
        prompt = (TEXT[:15] if draw.random() < 0.3 else "") + (TEXT[start : start + length].strip() or TEXT[:2])
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 24), "seed": draw.randrange(10**9)}
        body |= {"temperature": draw.choice([0, 0, 0.7, 1.0, 1.3]), "top_p": draw.choice([1, 0.9])}
        body |= {"logprobs": draw.choice([0, 2])}
        body |= {"stop": [draw.choice("。，的")]} if draw.random() < 0.3 else {}
        body |= {"echo": True} if draw.random() < 0.2 else {}
        body |= {"n": 2} if draw.random() < 0.2 else {}
        body |= {"frequency_penalty": 0.5} if draw.random() < 0.2 else {}
        body |= {"structured_outputs": {"regex": "[\u4e00-\u9fff]{4,20}。"}} if draw.random() < 0.2 else {}
        yield body


def answers_alone(server, requests):
    return [_told(server.complete(**body)) for body in requests]


def answers_together(server, requests, within_s: float):
    """Each at a moment of its own, others beside it that are cancelled while they are worked on."""
    draw = random.Random()
    moments = [draw.random() * within_s for _ in requests]

    def ask(body, moment):
        time.sleep(moment)
        return _told(server.complete(**body))

    def leave(body, moment):
        time.sleep(moment)
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 40}, timeout=0.1)

    with ThreadPoolExecutor(2 * len(requests)) as pool:
        asked = [pool.submit(ask, *pair) for pair in zip(requests, moments, strict=True)]
        for body in requests[::4]:
            pool.submit(leave, body, draw.random() * within_s)
        return [future.result() for future in asked]


def _told(answer):
    """(text, why it ended, tokens), and the log-probabilities, of each choice."""
    return [
        ((c["text"], c["finish_reason"], c["logprobs"]["tokens"]), c["logprobs"]["token_logprobs"])
        for c in answer["choices"]
    ]


def broken_requests(count: int, seed: int):
    """(path, body) of requests most of which make no sense."""
    draw = random.Random(seed)
    values = [
        None,
        True,
        -1,
        0,
        1,
        3,
        2**70,
        10**400,
        0.5,
        1e308,
        "",
        "x",
        "\ud800",
        "小镇",
        [],
        [1],
        [[1, 2]],
        ["a", 1],
        {},
    ]
    values += [
        {"5": 1},
        {"x": 1},
        {"include_usage": True},
        [{"role": "user", "content": "hi"}],
        float("nan"),
        [None] * 300,
    ]
    names = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo", "logprobs", "stream"]
    names += ["stream_options", "suffix", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]
    names += ["min_tokens", "ignore_eos", "best_of", "stop_token_ids", "model", "messages", "tools", "response_format"]
    names += ["tool_choice", "structured_outputs", "guided_regex", "guided_json", "guided_grammar", "reasoning_effort"]
    names += ["user", "unknown", "tokens", "prompt_logprobs", "max_completion_tokens", "top_logprobs"]
    paths = ["/v1/completions"] * 4 + ["/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"]
    for _ in range(count):
        body = {"prompt": "小镇", "max_tokens": 2} if draw.random() < 0.7 else {}
        body |= {name: draw.choice(values) for name in draw.sample(names, draw.randint(0, 3))}
        text = json.dumps(body).encode()
        if draw.random() < 0.15:
            text = draw.choice(
                [text[:-1], b"", b"[]", b"\xff\xfe", b"[" * 100000, b'{"prompt": 1e999}', b"null", text * 2]
            )
        yield draw.choice(paths), text
