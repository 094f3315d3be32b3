# SPDX-License-Identifier: Apache-2.0
"""`sporeloom batch`: the answers of a server, and an interrupted run that continues."""

import json

import pytest
from conftest import tool

pytestmark = pytest.mark.slow

PROMPT = "小镇的早晨"


def test_an_interrupted_batch_ends_as_one_that_was_not(checkpoint, tmp_path):
    bodies = [{"prompt": PROMPT, "max_tokens": 6, "seed": seed, "logprobs": 0, "n": 2} for seed in range(3)]
    bodies.insert(2, {"prompt": PROMPT, "top_p": 0})
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": b} for i, b in enumerate(bodies)
    ]
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))

    def run(code):
        outcome = tool("tools/batch.py", checkpoint, requests, answers)
        assert outcome.code == code, outcome.output
        text = answers.read_text(encoding="utf-8")
        told = [json.loads(each) for each in text.splitlines()]
        assert [each["custom_id"] for each in told] == [f"r{i}" for i in range(4)]
        assert [each["response"]["status_code"] for each in told] == [200, 200, 400, 200]
        return text, [each["response"]["body"].get("choices") for each in told]

    text, choices = run(1)  # one request cannot be answered
    kept = "".join(text.splitlines(keepends=True)[:3])
    answers.write_text(kept + text[len(kept) : len(kept) + 40], encoding="utf-8")
    again, continued = run(0)
    assert again.startswith(kept) and continued == choices
    assert len({str(each) for each in choices if each}) == 3
    outcome = tool("tools/batch.py", checkpoint, requests, answers)
    assert outcome.code == 0 and "complete, 4 answers" in outcome.output


def test_vectors_and_texts_share_a_batch(checkpoint, tmp_path):
    asked = {
        "vector": ("/v1/embeddings", {"input": PROMPT}),
        "text": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        "order": ("/rerank", {"query": PROMPT, "documents": ["春天", PROMPT]}),
    }
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": name, "url": url, "body": body} for name, (url, body) in asked.items()]
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))
    refused = tool("tools/batch.py", checkpoint, requests, answers)
    assert refused.code == 2 and "has requests for /v1/embeddings; give --embeddings last, or mean" in refused.output
    outcome = tool("tools/batch.py", checkpoint, requests, answers, "--embeddings", "last")
    assert outcome.code == 0, outcome.output
    told = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers.open(encoding="utf-8"))}
    assert list(told) == list(asked) and told["text"]["usage"]["completion_tokens"] == 2
    assert sum(x * x for x in told["vector"]["data"][0]["embedding"]) == pytest.approx(1.0, abs=1e-5)
    first = told["order"]["results"][0]
    assert first["index"] == 1 and first["relevance_score"] == pytest.approx(1.0, abs=1e-6)
