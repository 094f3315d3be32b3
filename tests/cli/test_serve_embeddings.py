# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings and /rerank: the states of the model itself, the same to the bit in whatever company, for stock clients."""

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from conftest import call
from serving import TEXT, mixed_requests, serving

pytestmark = pytest.mark.slow

TEXTS = [TEXT[start : start + length].strip() for start, length in ((0, 2), (31, 9), (80, 17), (160, 40), (300, 60))]


@pytest.fixture(scope="module")
def states(checkpoint):
    return [np.asarray(rows) for rows in call("tests/serving_worker.py", "head_inputs", str(checkpoint), TEXTS)]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = ("--served-model-name", "town", "--prefill-chunk", 16, "--embeddings", "mean", "--max-num-seqs", 4)
    with serving(log, checkpoint, *flags) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.said()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def unit(vector):
    return vector / np.sqrt((vector**2).sum())


def vectors(client, texts, **more):
    return [each.embedding for each in client.embeddings.create(model="town", input=texts, **more).data]


def test_an_embedding_is_the_pooled_state_of_the_model(client, states):
    expected = [unit(rows.mean(0)) for rows in states]
    np.testing.assert_allclose(vectors(client, TEXTS), expected, rtol=0, atol=1e-5)


def test_whoever_else_is_served_an_embedding_is_the_same_to_the_bit(server, client):
    alone = [vectors(client, text)[0] for text in TEXTS]
    with ThreadPoolExecutor(32) as pool:
        others = [pool.submit(server.complete, **body) for body in mixed_requests(16)]
        single = [pool.submit(vectors, client, text) for text in TEXTS * 2]
        several = pool.submit(vectors, client, TEXTS[::-1] * 4)
        assert [each.result()[0] for each in single] == alone * 2
        assert several.result() == alone[::-1] * 4
        assert all(other.result()["choices"] for other in others)
    assert server.metric("num_requests_waiting") == 0


def test_inputs_and_encodings_of_the_openai_client(server, client):
    ids = [server.client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    plain = client.embeddings.create(model="town", input=TEXTS, encoding_format="float", dimensions=128)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
    floats = [each.embedding for each in plain.data]
    assert [each.index for each in plain.data] == list(range(len(TEXTS)))
    assert vectors(client, ids) == floats and vectors(client, ids[0]) == floats[:1]
    assert vectors(client, TEXTS) == floats  # the client asks for base64
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    told = server.client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(told), "<f4").tolist() == floats[0]


def test_documents_are_ranked_by_their_cosine(server, client):
    query, *documents = vectors(client, TEXTS)
    cosines = np.asarray(documents) @ np.asarray(query)
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, *TEXTS[3:], TEXTS[0]]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = server.client.post(path, json=body).json()
        results = answer["results"]
        assert [each["index"] for each in results] == [4, *np.argsort(-cosines, kind="stable")]
        assert [each["document"]["text"] for each in results] == [[*TEXTS[1:], TEXTS[0]][r["index"]] for r in results]
        np.testing.assert_allclose(
            [each["relevance_score"] for each in results], [1, *sorted(cosines)[::-1]], atol=1e-6
        )
    two = server.client.post("/rerank", json={**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert two == [{key: each[key] for key in ("index", "relevance_score")} for each in results[:2]]


@pytest.mark.parametrize(
    ("path", "body", "said", "param"),
    [
        ("/v1/embeddings", {}, "input is missing", "input"),
        ("/v1/embeddings", {"input": []}, "from 1 to 2048", "input"),
        ("/v1/embeddings", {"input": ""}, "texts of 1 to 128 tokens", "input"),
        ("/v1/embeddings", {"input": [[1] * 129]}, "got one of 129", "input"),
        ("/v1/embeddings", {"input": [10**6]}, "1000000 is not a token id", "input"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input must be a string, got 3", "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "must be float or base64", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 64}, "vectors of this model have 128", "dimensions"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "vectors have length 1", "normalize"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 4}, "not shortened", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"messages": []}, "send texts or token ids", "messages"),
        ("/v1/embeddings", {"input": "a", "model": "x"}, "there is no model 'x'", "model"),
        ("/rerank", {"query": "a"}, "documents is missing", "documents"),
        ("/rerank", {"documents": ["a"]}, "query is missing", "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "nothing but text", "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n must be from 0", "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "not shortened", "max_tokens_per_doc"),
    ],
)  # fmt: skip
def test_what_cannot_be_embedded_is_refused_with_the_fields_name(server, path, body, said, param):
    status, message, field = server.refused(path, **body)
    assert (status, field) == (404 if param == "model" else 400, param) and said in message
