# SPDX-License-Identifier: Apache-2.0
"""The loop behind the server, on a model that breaks for some requests: it goes on for the others."""

import contextlib
import queue
import threading
import time
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from sporeloom.inference.cache import SlotTable
from sporeloom.inference.requests import Failure, InternalError, NewToken
from sporeloom.inference.sampling import BadLogitsError, NoTokenError, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.serve.adapter_slots import BUSY, AdapterLoad, AdapterSlots, ModelGoneError
from sporeloom.serve.generation import GenerationRequest, broadcast_form
from sporeloom.serve.service import Service, ServiceFailure
from sporeloom.strategy.config import SINGLE_DEVICE

VOCAB, OVERFLOWS = 8, 7


class Decoding:
    """Rows whose logits are NaN once they have seen OVERFLOWS."""

    num_rows, reusable = 2, 1

    def __init__(self):
        self.slot_table = SlotTable(2, 1, 64, SINGLE_DEVICE.mesh)
        self.rows = {0: [], 1: []}

    def next_chunks(self, waiting, num_decoded):
        return dict(waiting)

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        assert not drafts
        found = {}
        for row, ids in {**chunks, **{row: [token] for row, token in tokens.items()}}.items():
            self.rows[row] += ids
            logits = np.arange(VOCAB, dtype=np.float32) * (np.nan if OVERFLOWS in self.rows[row] else -1)
            found[row] = np.stack([logits] * len(ids)) if every and row in chunks else logits
        return found

    def trim(self, row, length):
        del self.rows[row][length:]

    def clear(self, row):
        self.trim(row, 0)

    def use_adapter(self, row, adapter):
        pass


def wanted(prompt=(1,), is_finished=lambda tokens: False, **more):
    values = {"adapter": 0, "max_new_tokens": 3, "sampling": SamplingConfig(), "stream": 0, "stop_ids": ()}
    values |= {"logit_bias": {}, "num_top": 0, "score_prompt": False}
    return GenerationRequest(prompt=prompt, is_finished=is_finished, **{**values, **more})


@contextlib.contextmanager
def running(made):
    """Run the loop of a service."""
    loop = threading.Thread(target=made.run, daemon=True)
    loop.start()
    yield made
    made.stop(5.0)
    loop.join(10)
    assert not loop.is_alive()


@pytest.fixture
def stopped():
    """A service whose loop does not run."""
    model = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=VOCAB))
    made = Service(SimpleNamespace(models=[model], num_reserved=0, strategy=SINGLE_DEVICE))
    made.engine = SimpleNamespace(
        strategy=SINGLE_DEVICE,
        is_log_rank=True,
        in_last_stage=True,
        broadcast=lambda array, source: array,
        broadcast_value=lambda value, source: value,
    )
    made.decoding = Decoding()
    made.scheduler = Scheduler(made.decoding, made.engine)
    made.state = "ready"
    return made


@pytest.fixture
def service(stopped):
    with running(stopped) as made:
        yield made


def events_of(came):
    """What a request got, to its last event."""
    found = []
    while not found or (isinstance(found[-1], NewToken) and not found[-1].finish_reason):
        found.append(came.get(timeout=10))
    return found


FAILING = [
    (wanted(stop_ids=tuple(range(VOCAB)), sampling=SamplingConfig(min_new_tokens=1)), NoTokenError),
    (wanted((1, OVERFLOWS)), BadLogitsError),
    (wanted((OVERFLOWS,), sampling=SamplingConfig(temperature=1.0), num_top=3), BadLogitsError),
    (wanted((1, OVERFLOWS, 2), score_prompt=True, max_new_tokens=0), BadLogitsError),
    (wanted(is_finished=lambda tokens: tokens[5]), InternalError),
    (wanted(logit_bias={"no number": 1.0}), InternalError),
    (wanted(sampling=SamplingConfig(), logit_bias={VOCAB + 3: 1.0}), InternalError),
    (wanted(()), InternalError),
]


def test_a_request_that_breaks_is_told_so_and_the_loop_goes_on(service):
    for failing, kind in FAILING:
        mine, others = queue.Queue(), queue.Queue()
        service.submit(wanted((1, 2), max_new_tokens=20), others.put)
        service.submit(failing, mine.put)
        last = events_of(mine)[-1]
        assert isinstance(last, Failure) and type(last.error) is kind, last
        events = events_of(others)
        assert [event.token for event in events] == [0] * 20 and events[-1].finish_reason == "length"
        assert (service.num_waiting, service.state, service.scheduler.num_running) == (0, "ready", 0)
    assert not service._open and not service._numbers
    after = queue.Queue()
    service.submit(wanted(), after.put)
    assert [type(event) for event in events_of(after)] == [NewToken] * 3
    assert not isinstance(after, ServiceFailure)


def test_waiting_texts_get_rows_by_client_in_turn_and_of_each_by_priority(stopped):
    """Of one token each, and two rows: the order in which they are delivered is that in which they got rows."""
    asked = [("a1", 0, 0), ("a2", 0, 0), ("a3", 0, 0), ("b1", 1, 0), ("late", 0, 5), ("b2", 1, 0), ("first", 2, -1)]
    told, events = [], {}

    def notify(name):
        def take(event):
            told.append(name)
            events[name] = event

        return take

    tickets = {}
    for name, client, priority in asked:
        made = wanted((1, 2), max_new_tokens=1, client=client, priority=priority)
        tickets[name] = stopped.submit(made, notify(name))
    stopped.cancel(tickets["a2"])
    assert stopped.num_waiting == len(asked) and stopped.waiting_clients() == {0: 4, 1: 2, 2: 1}
    with running(stopped):
        end = time.monotonic() + 10
        while len(told) < len(asked) - 1 and time.monotonic() < end:
            time.sleep(0.001)
    assert told == ["a1", "b1", "first", "a3", "b2", "late"]
    assert {(event.token, event.log_probability) for event in events.values()} == {
        (0, events["first"].log_probability)  # the same request, whenever its turn is
    }
    assert (
        stopped.num_waiting == 0 and not stopped.waiting_clients() and not stopped._queued and len(stopped._queue) == 0
    )


def test_texts_in_the_queue_are_told_when_the_service_fails(stopped):
    told = []
    stopped._queued[0] = SimpleNamespace(notify=told.append)
    stopped.fail("rank 1 is gone")
    assert [each.reason for each in told] == ["rank 1 is gone"]


def test_every_rank_knows_the_client_as_owner_of_its_prompt(stopped):
    told = [broadcast_form(wanted(client=client, cache_salt="s")) for client in (0, 1)]
    owners = [stopped._request(each, None).owner for each in told]  # a rank without the server
    assert owners == [(0, 0, 0, "s"), (0, 0, 1, "s")]


class Memory:
    """Slots of adapters, in which the last ones that were written stand."""

    def __init__(self):
        self.slots = {}

    def write(self, slot, ranks, adapter, source):
        self.slots[slot] = adapter


def test_a_slot_is_free_once_the_texts_with_its_unloaded_adapters_are_done(stopped):
    """Of one slot. A text that was prepared before, and submitted after others stand there, gets no answer of theirs."""
    model = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=VOCAB))
    stopped._slots, stopped._adapter_memory = AdapterSlots([model], 1), Memory()
    stopped._patience = lambda: 0.01
    outcomes = []

    def load(number, adapter):
        lora = SimpleNamespace(r_of=lambda path: 2)
        made = SimpleNamespace(lora=lora, weights={"up.lora_a": None, "up.lora_b": None}, name=adapter)
        stopped.load_adapter(AdapterLoad(number, made, VOCAB, outcomes.append))

    def turn():
        commands, opened = stopped._collect()
        for kind, value in commands:
            {"submit": lambda v: stopped._submit(v, opened), "cancel": stopped._cancel}.get(
                kind, lambda v: stopped._load(v, 0)
            )(value)
        for event in stopped.scheduler.step():
            stopped._deliver(event)

    first, late = queue.Queue(), queue.Queue()
    load(1, "first")
    turn()
    stopped.submit(wanted(adapter=1, max_new_tokens=3), first.put)
    stopped.unload_adapter(1)
    load(2, "second")
    turn()
    assert outcomes == [None, BUSY] and stopped._adapter_memory.slots[1].name == "first"
    turn()
    turn()
    assert [type(first.get_nowait()) for _ in range(3)] == [NewToken] * 3
    load(3, "third")
    turn()
    assert outcomes == [None, BUSY, None] and stopped._adapter_memory.slots[1].name == "third"
    load(4, "fourth")
    stopped.submit(wanted(adapter=1), late.put)
    turn()
    assert outcomes[3:] == [BUSY] and isinstance(late.get_nowait().error, ModelGoneError)
    assert stopped.num_waiting == 0


def test_whoever_waits_for_adapters_is_told_of_a_failure(stopped):
    outcomes = []
    stopped.load_adapter(AdapterLoad(1, None, VOCAB, outcomes.append))
    stopped.fail("rank 1 is gone")
    stopped.load_adapter(AdapterLoad(2, None, VOCAB, outcomes.append))
    assert outcomes == ["rank 1 is gone"] * 2
