# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the server share: small models with random weights, servers, and requests of all kinds.

The models are openPangu's tiny one with a chat template, a draft model of a quarter of its width, and two adapters.
"""

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from sporeloom.checkpoint.adapters import Adapter, write_adapter
from sporeloom.checkpoint.model_folder import load_config, save_checkpoint
from sporeloom.core.lines import split_lines
from sporeloom.data.tokenizer import load_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "examples" / "small_town.txt").read_text(encoding="utf-8")
CONTEXT, START_S = 1024, 900
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
ADAPTERS = {
    "poet": LoRAConfig(r=4, target_modules=("*",)),
    "clerk": LoRAConfig(r=8, target_modules=("mlp.up", "attention.query")),
}


def build(folder: Path, num_layers: int = 2) -> None:
    """Write `town` and `small`, the models, and `poet` and `clerk`, adapters of the first, into a folder."""
    tokenizer = folder / "tokenizer.model"
    tokenizer.write_bytes(_vocabulary())
    full = replace(size_config("pangu", "embedded_tiny"), num_layers=num_layers, seq_len=CONTEXT)
    heads = full.num_heads // 4 or 1
    sizes = {"hidden_size": full.hidden_size // 4, "num_heads": heads, "ffn_hidden_size": 96, "num_layers": 1}
    kv = {"num_kv_heads": min(full.num_kv_heads, heads)} if full.num_kv_heads else {}
    for name, config in (("town", full), ("small", replace(full, **sizes, **kv))):
        _write_model(folder / name, config, tokenizer)
    family, model = load_config(folder / "town")
    draw = np.random.default_rng(1)
    for name, lora in ADAPTERS.items():
        # Changes smaller than the matrices: with four times as large adapters, differences of rounding grow forty-fold.
        weights = {path: draw.normal(0, 0.05, shape).astype(np.float32) for path, shape in lora.shapes(model).items()}
        write_adapter(folder / name, Adapter(lora, weights), family, model, folder / "town")


def _vocabulary():
    import sentencepiece  # noqa: PLC0415

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(split_lines(TEXT)), model_writer=model, model_type="bpe", vocab_size=900,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=[f"[unused{i}]" for i in range(4, 11)],  # the last one ends documents: id 9
    )  # fmt: skip
    return model.getvalue()


def _write_model(folder, config, tokenizer):
    """Random weights, large enough in the embedding that some tokens are much more likely than others."""
    draw = np.random.default_rng(0)
    weights = {
        name: draw.standard_normal(shape, np.float32) * (0.2 if "embedding" in name else 0.05)
        + name.endswith("norm.weight")
        for name, shape in parameter_shapes(config).items()
    }
    vocabulary = load_tokenizer("pangu", tokenizer, config)
    save_checkpoint(folder, {n: v.astype(np.float32) for n, v in weights.items()}, "pangu", config, vocabulary.save)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(float(value) for value in re.findall(rf"^sporeloom:{name}\{{.*\}} (\S+)$", text, re.M))


@contextlib.contextmanager
def serving(checkpoint, *flags):
    """`sporeloom serve` in processes of its own, until the block ends."""
    with tempfile.NamedTemporaryFile("w+") as log:
        words = [sys.executable, "-m", "sporeloom", "serve", checkpoint, *flags, "--port", 0, "--max-queue", 1024]
        words += ["--served-model-name", "town"]
        process = subprocess.Popen([*map(str, words)], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"is served at (\S+)", Path(log.name).read_text())):
                assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.1)
            yield Server(found[1], process)
            assert process.poll() is None, Path(log.name).read_text()
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
        said = Path(log.name).read_text()
        assert "Traceback" not in said, said


def mixed(count, seed=0, models=("town",)):
    """(path, body) of requests of all kinds."""
    draw = random.Random(seed)
    kinds = [_completion, _chat, _tools, _schema, _edit, _embedding, _completion, _long, _chat, _rerank]
    for number in range(count):
        path, body = kinds[number % len(kinds)](draw)
        body["model"] = models[(number // len(kinds) + number) % len(models)]
        yield path, body


def _some(draw, most):
    start = draw.randrange(len(TEXT) - 400)
    return TEXT[start : start + draw.randint(2, most)].strip() or TEXT[:2]


def _sampling(draw):
    more = {
        "temperature": draw.choice([0, 0, 0.7, 1.0, 1.3]),
        "top_p": draw.choice([1, 0.9]),
        "seed": draw.randrange(10**9),
    }
    more |= {"frequency_penalty": 0.5} if draw.random() < 0.2 else {}
    return more | ({"stream": True} if draw.random() < 0.4 else {})


def _completion(draw):
    body = {
        "prompt": _some(draw, 60),
        "max_tokens": draw.randint(1, 24),
        "logprobs": draw.choice([0, 2]),
        **_sampling(draw),
    }
    body |= {"stop": [draw.choice("。，的")]} if draw.random() < 0.3 else {}
    body |= {"echo": True} if draw.random() < 0.2 else {}
    body |= {"n": 2} if draw.random() < 0.2 else {}
    body |= {"structured_outputs": {"regex": "[\u4e00-\u9fff]{4,20}。"}} if draw.random() < 0.2 else {}
    return "/v1/completions", body


def _chat(draw):
    messages = [{"role": "user", "content": _some(draw, 40)}]
    body = {"messages": messages, "max_completion_tokens": draw.randint(4, 32), **_sampling(draw)}
    body |= {"logprobs": True, "top_logprobs": draw.choice([0, 2])} if draw.random() < 0.6 else {}
    return "/v1/chat/completions", body | ({"thinking_token_budget": 6} if draw.random() < 0.3 else {})


def _tools(draw):
    choice = draw.choice(["required", "auto", {"type": "function", "function": {"name": "leave"}}])
    more = {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_completion_tokens": 48,
        "parallel_tool_calls": draw.random() < 0.5,
    }
    return "/v1/chat/completions", _chat(draw)[1] | more


def _schema(draw):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    return "/v1/chat/completions", _chat(draw)[1] | {"response_format": form, "max_completion_tokens": 48}


def _edit(draw):
    """A prompt that repeats itself, so that n-grams draft."""
    text = _some(draw, 20) * 3
    return "/v1/completions", {"prompt": text, "max_tokens": 40, "logprobs": 0, "ignore_eos": True, **_sampling(draw)}


def _long(draw):
    """One of a few beginnings, so that the prefix cache has it."""
    beginning = TEXT[(start := 100 * draw.randrange(3)) : start + 150]
    prompt = beginning + _some(draw, 20)
    return "/v1/completions", {"prompt": prompt, "max_tokens": 12, "logprobs": 0, **_sampling(draw)}


def _embedding(draw):
    texts = [_some(draw, 80) for _ in range(draw.randint(1, 3))]
    return "/v1/embeddings", {"input": texts[0] if len(texts) == 1 else texts}


def _rerank(draw):
    return "/rerank", {"query": _some(draw, 20), "documents": [_some(draw, 50) for _ in range(3)]}


class WrongAnswerError(Exception):
    """An answer that is an error, or is not complete."""


def ask(http, path, body):
    """(what was said and why it ended, numbers) of an answer.

    Raises:
        WrongAnswerError: there is none, or a part of one.
    """
    answer = http.post(path, json=body)
    if answer.status_code != 200:
        raise WrongAnswerError(f"{path}: {answer.status_code} {answer.text[:300]}")
    if body.get("stream"):
        return _of_stream(path, answer.text)
    told = answer.json()
    if path == "/v1/embeddings":
        return len(told["data"]), [number for each in told["data"] for number in each["embedding"]]
    if path == "/rerank":
        return [each["index"] for each in told["results"]], [each["relevance_score"] for each in told["results"]]
    said = [[choice.get("text"), choice.get("message"), choice["finish_reason"]] for choice in told["choices"]]
    return said, [number for choice in told["choices"] for number in _numbers(choice["logprobs"])]


def _of_stream(path, text):
    """The same of a stream, whose parts are put together by choice."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]" or '"error"' in text:
        raise WrongAnswerError(f"{path}: a stream that ends with {lines[-1:]}")
    said, numbers = {}, {}
    for event in map(json.loads, lines[:-1]):
        for choice in event["choices"]:
            parts = said.setdefault(choice["index"], [])
            _join(parts, choice.get("delta", {"text": choice.get("text")}))
            if choice["finish_reason"]:
                parts.append(["finish_reason", choice["finish_reason"]])
            numbers.setdefault(choice["index"], []).extend(_numbers(choice.get("logprobs")))
    return [said[index] for index in sorted(said)], [n for index in sorted(numbers) for n in numbers[index]]


def _join(parts, delta):
    """Add a part of a message: how a text is cut may depend on the moment when its tokens came."""
    for name, value in delta.items():
        if name == "role" or not value:
            continue
        if isinstance(value, str) and parts and parts[-1][0] == name:
            parts[-1][1] += value
        elif name == "tool_calls":
            for call in value:
                _join(
                    parts,
                    {
                        f"call {call['index']} name": call["function"].get("name"),
                        f"call {call['index']} id": call.get("id"),
                    },
                )
                _join(parts, {f"call {call['index']} arguments": call["function"].get("arguments")})
        else:
            parts.append([name, value])


def _numbers(logprobs):
    """Log-probabilities of the tokens of a choice, and of the alternatives."""
    if not logprobs:
        return
    for each in logprobs.get("content") or ():
        yield each["logprob"]
        yield from (other["logprob"] for other in each["top_logprobs"])
    yield from (0.0 if number is None else number for number in logprobs.get("token_logprobs") or ())
    for each in logprobs.get("top_logprobs") or ():
        yield from (each or {}).values()
