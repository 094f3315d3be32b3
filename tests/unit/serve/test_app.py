# SPDX-License-Identifier: Apache-2.0
"""Answers over a service that makes no text by itself: what is given up is cancelled, whenever that happens."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from sporeloom.inference.requests import Failure, InternalError, NewToken
from sporeloom.inference.sampling import BadLogitsError, GrammarError, NoTokenError, SamplingConfig
from sporeloom.inference.session import Completion, StopConditions
from sporeloom.serve.answers import Choice, CompletionAnswer
from sporeloom.serve.fields import Fields, RequestError
from sporeloom.serve.metrics import Metrics
from sporeloom.serve.prepare import stop_conditions
from sporeloom.serve.requests import CompletionRequest, read_completion
from sporeloom.serve.texts import Events, RequestStream, stream, whole

TOKENIZER = SimpleNamespace(
    **{"vocab_size": 4, "eod_id": 0, "prefix": (), "token_bytes": lambda token: b"a"},
    **{"encode": lambda text: [1], "decode": lambda ids: "a" * len(ids)},
)
MODEL = SimpleNamespace(name="town", tokenizer=TOKENIZER, adapter=0)


class Service:
    """Tells a token when the test says so."""

    def __init__(self, timeout_s=60.0):
        self.load = SimpleNamespace(running=0, used_slots=0.0, reused_tokens=0, drafts=0, drafted=0, accepted=0)
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

    def fail(self, error):
        self.notify(Failure(0, error))


def texts_of(service):
    asked = CompletionRequest(
        **{"sampling": SamplingConfig(), "seed": 0, "max_tokens": 9, "num_choices": 1, "stop": (), "stop_ids": ()},
        **{"ignore_eos": True, "num_top": None, "logit_bias": {}, "stream": True, "with_usage": False},
        **{"prompts": ("a",), "suffix": None, "echo": False},
    )
    choice = Choice(0, [1], StopConditions(TOKENIZER, (), ()), Completion("a"))
    return RequestStream(service, Metrics(service, "town"), MODEL, asked, [choice], [9])


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


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NoTokenError(), 400, "invalid_request_error"),
        (GrammarError(), 400, "invalid_request_error"),
        (BadLogitsError(), 500, "server_error"),
        (InternalError(), 500, "server_error"),
    ],
)
def test_a_request_that_failed_is_told_why_in_an_answer_and_in_a_stream(error, status, kind):
    async def scenario():
        service = Service()
        answer = asyncio.ensure_future(whole(texts_of(service)))
        await turns(3)
        service.tell()
        service.fail(error)
        with pytest.raises(RequestError, match=str(error)) as raised:
            await answer
        assert raised.value.status == status
        texts = texts_of(service)
        events = stream(texts, CompletionAnswer(MODEL, texts.asked), [(1,)])
        first = asyncio.ensure_future(anext(events))
        await turns(3)
        service.tell()
        service.fail(error)
        told = [json.loads((await first).removeprefix("data: "))]
        told += [json.loads(event.removeprefix("data: ")) async for event in events if "[DONE]" not in event]
        assert told[0]["choices"][0]["text"] == "a"
        assert told[1:] == [{"error": {"message": str(error), "type": kind, "param": None, "code": status}}]

    asyncio.run(scenario())


@pytest.mark.parametrize(("sent", "used"), [(0, 0), (-5, 2**64 - 5), (2**53 + 1, 2**53 + 1), (2**64 - 1, 2**64 - 1)])
def test_a_seed_is_told_as_it_was_sent(sent, used):
    asked = read_completion(Fields({"prompt": "a", "seed": sent}), 4)
    assert (CompletionAnswer(MODEL, asked).head["seed"], asked.sampling.seed) == (sent, used)


def test_a_seed_that_is_drawn_is_a_number_of_javascript():
    seeds = [CompletionAnswer(MODEL, read_completion(Fields({"prompt": "a"}), 4)).head["seed"] for _ in range(2000)]
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)
    assert max(seeds) > 2**52 and len(set(seeds)) == 2000
    for seed in seeds[:50]:  # which the page sends again as it read it
        again = read_completion(Fields(json.loads(json.dumps({"prompt": "a", "seed": int(float(seed))}))), 4)
        assert again.sampling.seed == seed


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"min_tokens": 1, "stop_token_ids": [1, 2, 3]}, True),  # token 0 ends texts anyway
        ({"min_tokens": 1, "stop_token_ids": [0, 1, 2, 3], "ignore_eos": True}, True),
        ({"min_tokens": 1, "stop_token_ids": [1, 2, 3], "ignore_eos": True}, False),
        ({"min_tokens": 1, "stop_token_ids": [1, 2]}, False),
        ({"min_tokens": 0, "stop_token_ids": [0, 1, 2, 3]}, False),
    ],
)
def test_what_leaves_no_token_to_choose_is_refused_at_once(body, is_refused):
    asked = read_completion(Fields({"prompt": "a", "max_tokens": 3, **body}), 4)
    model = SimpleNamespace(tokenizer=TOKENIZER, stop_ids=(0,))
    if not is_refused:
        assert set(stop_conditions(model, asked).stop_ids) >= set(body["stop_token_ids"])
        return
    with pytest.raises(RequestError, match="leave no token to choose") as raised:
        stop_conditions(model, asked)
    assert (raised.value.status, raised.value.param) == (400, "min_tokens")


def test_drafts_are_counted_in_the_metrics():
    service = Service()
    metrics = Metrics(service, "town")
    for drafts, drafted, accepted in ((2, 8, 4), (3, 16, 8)):
        service.load = SimpleNamespace(
            running=0, used_slots=0.0, reused_tokens=0, drafts=drafts, drafted=drafted, accepted=accepted
        )
        text = metrics.text().decode()
        counts = [drafts, drafted, accepted]
        for name, count in zip(("drafts", "draft_tokens", "accepted_tokens"), counts, strict=True):
            assert f'spec_decode_num_{name}_total{{engine="0",model_name="town"}} {count}.0' in text
        assert 'spec_decode_draft_acceptance_rate{engine="0",model_name="town"} 0.5' in text
