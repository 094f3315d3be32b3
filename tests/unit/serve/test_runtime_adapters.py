# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters that meet each other, full slots or a server that stops. Files: tests/cli/test_serve_adapters.py."""

import asyncio
from types import SimpleNamespace

import pytest

from sporeloom.serve.adapter_slots import BUSY
from sporeloom.serve.config import ServeConfig, ServedModel
from sporeloom.serve.fields import Fields, RequestError
from sporeloom.serve.runtime_adapters import RuntimeAdapters

TOKENIZER = SimpleNamespace(vocab_size=8)


class Service:
    """Answers each load with the next of its outcomes, from another moment."""

    state, failure, progress = "ready", "", ""

    def __init__(self, folder, outcomes, num_reserved=1):
        config = ServeConfig(checkpoint=folder, runtime_lora_folder=folder)
        base = ServedModel("town", TOKENIZER, (0,))
        self.job = SimpleNamespace(config=config, models=(base,), num_reserved=num_reserved, max_lora_rank=16)
        self.outcomes, self.loaded, self.unloaded = list(outcomes), [], []

    def load_adapter(self, load):
        self.loaded.append(load.number)
        load.notify(self.outcomes.pop(0))

    def unload_adapter(self, number):
        self.unloaded.append(number)


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    (tmp_path / "poet").mkdir()

    def read(self, name, path, folder):
        return ServedModel(name, TOKENIZER, (0,), next(self._numbers)), None

    monkeypatch.setattr(RuntimeAdapters, "_read", read)
    return lambda *outcomes, **more: RuntimeAdapters(Service(tmp_path, outcomes, **more))


def asked(name):
    return Fields({"lora_name": name, "lora_path": "poet"})


def outcome(work):
    """The answer, or status and header of a refusal."""

    async def told():
        try:
            return await work
        except RequestError as error:
            return error.status, error.headers.get("Retry-After")

    return told()


def test_of_two_loads_of_a_name_at_once_one_is_refused_and_numbers_are_never_used_again(adapters):
    made = adapters(None, None, None, num_reserved=2)

    async def scenario():
        first = await asyncio.gather(outcome(made.load(asked("poet"))), outcome(made.load(asked("poet"))))
        await made.unload(asked("poet"))
        return first, await outcome(made.load(asked("poet")))

    (first, second), again = asyncio.run(scenario())
    assert "successfully" in first and second == (400, None) and "successfully" in again
    service = made._service
    assert service.loaded == [1, 2] and service.unloaded == [1]
    assert [(model.name, model.adapter) for model in made.models] == [("town", 0), ("poet", 2)]


@pytest.mark.parametrize(("reason", "expected"), [(BUSY, (409, "1")), ("rank 1 is gone", (503, None))])
def test_a_load_that_the_service_refuses_adds_no_name(adapters, reason, expected):
    made = adapters(reason)
    assert asyncio.run(outcome(made.load(asked("poet")))) == expected
    assert [model.name for model in made.models] == ["town"]


def test_no_more_than_the_reserved_slots_are_named(adapters):
    made = adapters(None)

    async def scenario():
        return [await outcome(made.load(asked(name))) for name in ("poet", "clerk")]

    first, second = asyncio.run(scenario())
    assert "successfully" in first and second == (400, None) and made._service.loaded == [1]
