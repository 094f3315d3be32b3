# SPDX-License-Identifier: Apache-2.0
"""Answers of /v1/responses: a response with items of output, or the events of a stream in their published order."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.data.tokenizer import ChatMessage
from sporeloom.serve.answers import Answer, Choice, usage
from sporeloom.serve.blocks import Block, Blocks, Step, reasoning_tokens
from sporeloom.serve.config import ServedModel
from sporeloom.serve.fields import RequestError
from sporeloom.serve.messages import read_message
from sporeloom.serve.responses.request import ResponsesRequest
from sporeloom.serve.responses.store import ResponseStore, StoredResponse

Event = dict[str, Any]
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
CONTENT = {"reasoning": "reasoning_text", "text": "output_text"}
DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponsesAnswer(Answer):
    """Formats a response."""

    asked: ResponsesRequest
    end = ""

    def __init__(self, model: ServedModel, asked: ResponsesRequest, store: ResponseStore):
        super().__init__(model, asked)
        self._store, self._blocks, self._numbers = store, Blocks(), itertools.count()
        self._key = uuid.uuid4().hex
        self._head = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "seed": asked.seed,
            "temperature": asked.sampling.temperature,
            "top_p": asked.sampling.top_p,
            "store": asked.is_stored,
            "background": False,
            "truncation": "disabled",
            **asked.echoed,
        }

    def whole(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> dict[str, Any]:
        (choice,) = choices
        for _ in self._blocks.add(choice, choice.text):
            pass
        return self._ended(prompts, choice)

    def opening(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def parts(self, choice: Choice, text: str) -> Iterator[Event]:
        for step in self._blocks.add(choice, text):
            if step.phase == "start":
                yield from self._started(step)
            elif step.phase == "delta":
                yield self._event(
                    f"{DELTAS[step.block.kind]}.delta", **self._place(step), delta=step.text, **_extra(step)
                )
            else:
                is_cut = step.is_last and choice.finish_reason == "length"
                yield from self._finished(step, "incomplete" if is_cut else "completed")

    def closing(self, prompts: list[tuple[int, ...]], choices: list[Choice]) -> Iterator[Event]:
        response = self._ended(prompts, choices[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> Iterable[Event]:
        code = "invalid_prompt" if error.status < 500 else "server_error"
        response = self._response("failed", error={"code": code, "message": error.message})
        return [self._event("response.failed", response=response)]

    def event(self, value: Event) -> str:
        return f"event: {value['type']}\ndata: {json_text(value)}\n\n"

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _started(self, step: Step) -> Iterator[Event]:
        item = self._item(step.place, step.block, "in_progress")
        yield self._event("response.output_item.added", output_index=step.place, item=item)
        if step.block.kind != "call":
            yield self._event("response.content_part.added", **self._place(step), part=_content(step.block))

    def _finished(self, step: Step, status: str) -> Iterator[Event]:
        block, place = step.block, self._place(step)
        if block.kind == "call":
            yield self._event(f"{DELTAS['call']}.done", **place, name=block.name, arguments=block.text)
        else:
            yield self._event(f"{DELTAS[block.kind]}.done", **place, text=block.text, **_extra(step))
            yield self._event("response.content_part.done", **place, part=_content(block))
        item = self._item(step.place, block, status)
        yield self._event("response.output_item.done", output_index=step.place, item=item)

    def _place(self, step: Step) -> dict[str, Any]:
        place = {"item_id": self._item_id(step.place, step.block), "output_index": step.place}
        return place if step.block.kind == "call" else {**place, "content_index": 0}

    def _item_id(self, index: int, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._key}_{index}"

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        known: dict[str, Any] = {"id": self._item_id(index, block), "status": status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **known, **called}
        content = [_content(block)] if block.text else []
        if block.kind == "reasoning":
            return {"type": "reasoning", **known, "summary": [], "content": content}
        return {"type": "message", **known, "role": "assistant", "content": content}

    def _ended(self, prompts: list[tuple[int, ...]], choice: Choice) -> dict[str, Any]:
        """The response with its usage; kept where the request says so."""
        is_cut, counted = choice.finish_reason == "length", usage(prompts, [choice])
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        response = self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens(choice)},
                "total_tokens": counted["total_tokens"],
            },
        )
        if self.asked.is_stored:
            conversation = (*self.asked.conversation, *self._message())
            self._store.put(StoredResponse(response, conversation, self.asked.client))
        return response

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """`status`: of the response; all blocks but the last are complete, and that one unless it was cut."""
        blocks = self._blocks.all if status in ("completed", "incomplete") else []
        states = ["completed"] * (len(blocks) - 1) + [status]
        output = [self._item(i, block, state) for (i, block), state in zip(enumerate(blocks), states, strict=False)]
        unset = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **unset, **more}

    def _message(self) -> Iterator[ChatMessage]:
        """The answer as a message of the next request, without a call that was cut."""
        by_kind = {kind: "".join(b.text for b in self._blocks.all if b.kind == kind) for kind in ("reasoning", "text")}
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in self._blocks.all
            if block.kind == "call" and block.arguments is not None
        ]
        turn = {"role": "assistant", "content": by_kind["text"], "tool_calls": calls or None}
        yield read_message({**turn, "reasoning_content": by_kind["reasoning"] or None}, "output")


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": CONTENT[block.kind], "text": block.text}
    return {"type": CONTENT[block.kind], "text": block.text, "annotations": [], "logprobs": []}


def _extra(step: Step) -> dict[str, Any]:
    return {"logprobs": []} if step.block.kind == "text" else {}
