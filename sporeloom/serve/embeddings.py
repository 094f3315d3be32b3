# SPDX-License-Identifier: Apache-2.0
"""Embeddings in the shapes of OpenAI's API, and reranking by them in those of Jina's and Cohere's, as vLLM serves both.

A vector is the state from which the model predicts the next token (`sporeloom.inference.pooling`). It depends on its text
alone, to the bit, as generated tokens do.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.inference.requests import Event, PromptEmbedding
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.fields import Fields, RequestError, shown, text_of, token_ids
from sporeloom.serve.generation import GenerationRequest
from sporeloom.serve.metrics import Metrics, Timing
from sporeloom.serve.service import Service, ServiceFailure
from sporeloom.serve.texts import failed, notify_on

MAX_INPUTS = 2048
Vectors = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Embedded(ABC):
    """A request that is answered with what the embeddings of its texts say."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each text."""
    priority: int

    @abstractmethod
    def answer(self, model: str, vectors: Vectors) -> dict[str, Any]:
        """The body of the answer."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class EmbeddingRequest(Embedded):
    """Body of /v1/embeddings."""

    is_base64: bool

    def answer(self, model: str, vectors: Vectors) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, self.is_base64)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}


@dataclass(frozen=True)
class RerankRequest(Embedded):
    """Body of /rerank: the first of `prompts` is the query."""

    documents: tuple[str, ...]
    num_kept: int
    with_documents: bool

    def answer(self, model: str, vectors: Vectors) -> dict[str, Any]:
        query, *others = (vector.astype(np.float64) for vector in vectors)
        scores = [float(np.clip((query * other).sum(), -1.0, 1.0)) for other in others]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self.num_kept]
        results = []
        for index in order:
            document = {"document": {"text": self.documents[index]}} if self.with_documents else {}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        usage = {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "usage": usage, "results": results}


def read_embeddings(fields: Fields, model: ServedModel, job: ServeJob) -> EmbeddingRequest:
    """Raises:
    RequestError: a field that cannot be used, or embeddings are not served.
    """
    _check_served(job)
    fields.refuse("messages", "send texts or token ids as input")
    given = fields.take("input", (str, list))
    if given is None:
        raise RequestError(400, "input is missing", "input")
    dimensions = fields.integer("dimensions", 1, 2**31 - 1, None)
    if dimensions not in (None, job.model.hidden_size):
        raise RequestError(
            400,
            f"dimensions: vectors of this model have {job.model.hidden_size}, and it was not trained for the first "
            f"{dimensions} of them to mean anything",
            "dimensions",
        )
    encoding = fields.take("encoding_format", str, "float")
    if encoding not in ("float", "base64"):
        raise RequestError(400, f"encoding_format must be float or base64, got {shown(encoding)}", "encoding_format")
    fields.refuse("truncate_prompt_tokens", "texts are not shortened; send those that fit")
    fields.refuse("normalize", "vectors have length 1", True)
    fields.refuse("add_special_tokens", "texts are tokenized as prompts of completions are; send token ids", True)
    fields.refuse("embed_dtype", "vectors are float32", "float32")
    prompts = tuple(_tokens(each, "input", model, job) for each in _inputs(given))
    return EmbeddingRequest(prompts, _common(fields), encoding == "base64")


def read_rerank(fields: Fields, model: ServedModel, job: ServeJob) -> RerankRequest:
    """Raises:
    RequestError: a field that cannot be used, or embeddings are not served.
    """
    _check_served(job)
    query, given = fields.take("query", str), fields.take("documents", list)
    for name, value in (("query", query), ("documents", given)):
        if value is None:
            raise RequestError(400, f"{name} is missing", name)
    if not 0 < len(given) < MAX_INPUTS:
        raise RequestError(
            400, f"documents must have from 1 to {MAX_INPUTS - 1} entries, got {len(given)}", "documents"
        )
    documents = tuple(_document(each) for each in given)
    for name in ("max_tokens_per_doc", "max_chunks_per_doc", "truncate_prompt_tokens"):
        fields.refuse(name, "documents are not shortened; send those that fit")
    fields.refuse("rank_fields", "documents are texts, or objects with text", ["text"])
    kept = fields.integer("top_n", 0, 2**31 - 1, 0) or len(documents)  # 0 keeps all, as in vLLM
    with_documents = fields.take("return_documents", bool, True)
    prompts = (_tokens(query, "query", model, job), *(_tokens(each, "documents", model, job) for each in documents))
    return RerankRequest(prompts, _common(fields), documents, kept, with_documents)


def _check_served(job: ServeJob) -> None:
    if job.config.embeddings is None:
        raise RequestError(400, "this server gives no embeddings; start it with --embeddings last, or mean")


def _common(fields: Fields) -> int:
    """Read the other fields of both requests. Returns the priority."""
    fields.take("user", str)
    priority: int = fields.integer("priority", -(2**31), 2**31 - 1, 0)
    return priority


def _inputs(given: Any) -> list[Any]:
    """The texts of a request, or their token ids."""
    if isinstance(given, str) or (given and all(isinstance(each, int) for each in given)):
        return [given]
    if not 0 < len(given) <= MAX_INPUTS:
        raise RequestError(400, f"input must have from 1 to {MAX_INPUTS} entries, got {len(given)}", "input")
    return list(given)


def _document(value: Any) -> str:
    if isinstance(value, dict):
        if set(value) != {"text"}:
            raise RequestError(400, "documents: texts, or objects with nothing but text", "documents")
        value = value["text"]
    return text_of(value, "documents")


def _tokens(value: Any, name: str, model: ServedModel, job: ServeJob) -> tuple[int, ...]:
    """Token ids of a text that fits the context.

    Raises:
        RequestError: it is not a text or a list of token ids, is empty, or too long.
    """
    if isinstance(value, list):
        tokens = token_ids(value, name, model.tokenizer.vocab_size)
    else:
        tokens = tuple(model.tokenizer.encode(text_of(value, name)))
    if not 0 < len(tokens) <= job.max_model_len:
        raise RequestError(
            400, f"{name}: texts of 1 to {job.max_model_len} tokens, the context, got one of {len(tokens)}", name
        )
    return tokens


async def embed(
    service: Service, metrics: Metrics, model: ServedModel, asked: Embedded, client: int, num_at_once: int
) -> Vectors:
    """The embeddings of the texts of a request, a few of which wait or run at once: a long list takes the place of no other
    request.

    Raises:
        RequestError: one has failed, or not all are done in time.
    """
    came: asyncio.Queue[tuple[int, Event | ServiceFailure] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    notify = partial(notify_on, loop, came)
    found: dict[int, NDArray[np.float32]] = {}
    tickets: dict[int, int] = {}
    timings: dict[int, Timing] = {}
    todo = iter(enumerate(asked.prompts))
    timeout_s, reason = service.job.config.request_timeout, "abort"
    too_late = loop.call_later(timeout_s, came.put_nowait, None)
    try:
        while len(found) < len(asked.prompts):
            while len(tickets) < num_at_once and (nxt := next(todo, None)):
                index, prompt = nxt
                metrics.embedded(len(prompt))
                timings[index] = Timing()
                wanted = _wanted(service.job, model, prompt, asked.priority, client)
                tickets[index] = service.submit(wanted, partial(notify, index))
            if (news := await came.get()) is None:
                raise RequestError(504, f"not done within {timeout_s:g} s")
            index, event = news
            del tickets[index]
            if not isinstance(event, PromptEmbedding):
                metrics.end(timings[index], "error")
                raise failed(event)
            found[index] = event.vector
            metrics.end(timings[index], "stop")
    except RequestError:
        reason = "error"
        raise
    finally:
        too_late.cancel()
        for index, ticket in tickets.items():
            service.cancel(ticket)
            metrics.end(timings[index], reason)
    return [found[index] for index in range(len(asked.prompts))]


def _wanted(
    job: ServeJob, model: ServedModel, prompt: tuple[int, ...], priority: int, client: int
) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        adapter=model.adapter,
        max_new_tokens=0,
        sampling=SamplingConfig(),
        stream=0,
        stop_ids=(),
        logit_bias={},
        num_top=0,
        score_prompt=False,
        is_finished=lambda tokens: False,
        pooling=job.config.embeddings,
        priority=priority,
        client=client,
    )


def _written(vector: NDArray[np.float32], is_base64: bool) -> str | list[float]:
    if is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
