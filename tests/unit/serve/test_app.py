# SPDX-License-Identifier: Apache-2.0
"""Answers over a service that makes no text by itself: what is given up is cancelled, whenever that happens."""

import asyncio
from types import SimpleNamespace

import pytest

from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.scheduler import NewToken
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.answers import Choice, CompletionAnswer
from sporeloom.serve.metrics import Metrics
from sporeloom.serve.requests import CompletionAsked, RequestError
from sporeloom.serve.texts import Events, Texts, stream, whole

TOKENIZER = SimpleNamespace(vocab_size=4, eod_id=0, encode=lambda text: [1], decode=lambda ids: "a" * len(ids))
MODEL = SimpleNamespace(name="town", tokenizer=TOKENIZER, adapter=0)


class Service:
    """Tells a token when the test says so."""

    def __init__(self, timeout_s=60.0):
        self.load = SimpleNamespace(running=0, used_slots=0.0, reused_tokens=0)
        self.num_waiting = 0
        self.job = SimpleNamespace(config=SimpleNamespace(request_timeout=timeout_s))
        self.cancelled = []

    def submit(self, wanted, notify):
        self.notify = notify
        return 7

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def tell(self, finish_reason=None):
        self.notify(NewToken(0, 1, -1.0, 0.01, finish_reason))


def texts_of(service):
    asked = CompletionAsked(
        **{"sampling": SamplingConfig(), "max_tokens": 9, "num_choices": 1, "stop": (), "stop_ids": ()},
        **{"ignore_eos": True, "num_top": None, "logit_bias": {}, "stream": True, "with_usage": False},
        **{"prompts": ("a",), "suffix": None, "echo": False},
    )
    choice = Choice(0, [1], StopConditions(TOKENIZER, (), ()), Completion("a"))
    return Texts(service, Metrics(service, "town"), MODEL, asked, [choice], [9])


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("between", range(6))
def test_a_text_given_up_is_cancelled_also_just_after_a_token_came(between):
    async def scenario():
        service = Service()
        task = asyncio.ensure_future(whole(texts_of(service)))
        await turns(3)
        service.tell()
        await turns(between)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done and task.cancelled()
        assert service.cancelled == [7]

    asyncio.run(scenario())


def test_a_client_lost_between_two_events_ends_what_makes_them():
    async def scenario():
        service = Service()
        texts = texts_of(service)
        response = Events(stream(texts, CompletionAnswer(MODEL, texts.asked), [(1,)]))
        stuck = asyncio.Event()

        async def send(message):
            if message.get("body"):
                stuck.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(response.stream_response(send))
        await turns(3)
        service.tell()
        await asyncio.wait_for(stuck.wait(), 5)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert service.cancelled == [7]  # at once, and not when the last reference to the stream goes

    asyncio.run(scenario())


def test_an_answer_that_takes_too_long_is_given_up():
    async def scenario():
        service = Service(timeout_s=0.05)
        with pytest.raises(RequestError, match=r"not done within 0.05 s"):
            await whole(texts_of(service))
        assert service.cancelled == [7]

    asyncio.run(scenario())
