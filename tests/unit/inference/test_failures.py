# SPDX-License-Identifier: Apache-2.0
"""A request that cannot go on ends alone: on every rank, whatever the cause; the others get what they get anyway."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from test_scheduler import ENGINE, VOCAB, Chunked, alone, book, request

from sporeloom.core.errors import ConfigError
from sporeloom.inference.requests import Failure, InternalError, PromptScores, Request
from sporeloom.inference.sampling import BadLogitsError, NoTokenError, Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler, generate
from sporeloom.strategy.config import SINGLE_DEVICE

OVERFLOWS = 49
"""A token after which the model's logits are NaN."""


class Overflowing(Chunked):
    """Where a row has seen OVERFLOWS, all its further logits are NaN."""

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        found = super().step(chunks, tokens, every, drafts)
        return {row: logits * np.nan if OVERFLOWS in self.rows[row] else logits for row, logits in found.items()}


class ElseWhere(Overflowing):
    """The same on a rank that holds no logits."""

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        super().step(chunks, tokens, every, drafts)


def broken(tokens):
    raise ZeroDivisionError("a fault of ours")


NONE_LEFT = Request([3], 4, Sampler(SamplingConfig(min_new_tokens=2), range(VOCAB), VOCAB), lambda tokens: False)
FAILING = {
    "no token is left": (NONE_LEFT, NoTokenError),
    "NaN logits": (request([3, OVERFLOWS, 5], 4), BadLogitsError),
    "NaN logits, sampled": (request([OVERFLOWS], 4, SamplingConfig(temperature=1.0)), BadLogitsError),
    "NaN in a scored prompt": (request([3, OVERFLOWS, 5, 7, 8, 9], 0, score_prompt=True, num_top=2), BadLogitsError),
    "NaN in a scored prompt with tokens": (request([3, OVERFLOWS, 5], 4, score_prompt=True), BadLogitsError),
    "a stop rule that breaks": (Request([3, 4], 4, Sampler(SamplingConfig()), broken), InternalError),
    "a processor that breaks": (
        Request([3], 4, Sampler(SamplingConfig(), (), None, [lambda logits, history: 1 / 0]), lambda tokens: False),
        InternalError,
    ),
}


class Ranks:
    """Two ranks, one after the other: what the one that chooses tells is what the other hears."""

    def __init__(self):
        self.told = []
        self.chooses = SimpleNamespace(
            strategy=SINGLE_DEVICE, is_log_rank=True, in_last_stage=True, broadcast=self._tell
        )
        self.hears = SimpleNamespace(
            strategy=SINGLE_DEVICE,
            is_log_rank=False,
            in_last_stage=False,
            broadcast=lambda array, source: self.told.pop(0),
        )

    def _tell(self, array, source):
        self.told.append(array.copy())
        return array


@pytest.mark.parametrize("cause", FAILING)
@pytest.mark.parametrize("unit", [0, 1, 4])
def test_the_others_go_on_and_the_row_is_free_on_every_rank(cause, unit):
    failing, kind = FAILING[cause]
    ranks = Ranks()
    schedulers = Scheduler(Overflowing(2), ranks.chooses), Scheduler(ElseWhere(2), ranks.hears)
    others = [request([1, 2], 6), request([7, 8, 9], 5), request([3, 4, 5], 3)]
    asked = [others[0], failing, others[1], failing, others[2]]
    for scheduler in schedulers:
        scheduler.decoding.reusable = unit
        for each in asked:
            scheduler.submit(each)
    found, failures = {}, []
    while not schedulers[0].is_idle:
        events, heard = (scheduler.step() for scheduler in schedulers)
        assert [(type(e), e.request) for e in events] == [(type(e), e.request) for e in heard]
        assert schedulers[0].num_running == schedulers[1].num_running
        book(events, found)
        failures += [event for event in events if isinstance(event, Failure)]
        assert not any(isinstance(e, PromptScores) and e.request in (1, 3) for e in events)
    assert schedulers[1].is_idle and not ranks.told
    assert {(f.request, type(f.error)) for f in failures} == {(1, kind), (3, kind)}
    assert len(schedulers[0].decoding.cleared) == len(schedulers[1].decoding.cleared) == 2
    assert [found[number] for number in (0, 2, 4)] == [alone(each) for each in others]


def test_what_a_failed_request_left_is_not_reused():
    decoding = Overflowing(1)
    scheduler = Scheduler(decoding, ENGINE)
    for _ in range(2):
        scheduler.submit(request([1, 2, 3, 4, OVERFLOWS, 5, 6, 7, 8], 4))
        while not scheduler.is_idle:
            scheduler.step()
    assert scheduler.reused_tokens == 0 and decoding.rows[0] == []


@pytest.mark.parametrize(
    ("cause", "said"), [("NaN logits", "NaN or infinite"), ("no token is left", "no token is left")]
)
def test_whoever_wants_all_texts_gets_an_error_to_read(cause, said):
    decoding = Overflowing(2)
    with pytest.raises(ConfigError, match=f"text 2 of 3: .*{said}"):
        list(generate(decoding, ENGINE, [request([1], 3), FAILING[cause][0], request([2], 3)]))
    assert decoding.rows == {0: [], 1: []}


def test_what_is_a_fault_of_ours_is_logged(capsys):
    with pytest.raises(ConfigError, match="text 1 of 1: a bug of sporeloom"):
        list(generate(Chunked(1), ENGINE, [FAILING["a stop rule that breaks"][0]]))
    assert "ZeroDivisionError: a fault of ours" in capsys.readouterr().err
