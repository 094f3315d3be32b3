# SPDX-License-Identifier: Apache-2.0
"""A decoding whose logits are a function of the last tokens of a row, with drafts and slots that can be copied."""

from types import MappingProxyType, SimpleNamespace

import numpy as np

from sporeloom.inference.requests import Failure, NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.speculation import cut
from sporeloom.strategy.config import SINGLE_DEVICE

ENGINE = SimpleNamespace(
    strategy=SINGLE_DEVICE, is_log_rank=True, in_last_stage=True, broadcast=lambda array, source: array
)
VOCAB = 12


class Recalling:
    """Chooses by the last two tokens, so that texts repeat themselves; counts steps, and rejects hidden tokens that are seen.

    `bad`: a token after which the logits are NaN.
    """

    cache_bytes, num_replicas = 0, 1

    def __init__(self, num_rows, reusable=1, room=100, bad=None):
        self.num_rows, self.reusable, self.room, self.bad = num_rows, reusable, room, bad
        self.rows = {row: [] for row in range(num_rows)}
        self.steps, self.chunks, self.cleared = 0, [], []

    def logits_after(self, tokens):
        if tokens[-1] == self.bad:
            return np.full(VOCAB, np.nan, np.float32)
        return (3 * np.random.default_rng(tokens[-2:]).normal(size=VOCAB)).astype(np.float32)

    def next_chunks(self, waiting, is_alone):
        row = next(iter(waiting))
        return {row: waiting[row][:8]}

    def cut_drafts(self, chunks, rows, drafts):
        return cut(drafts, self.room)

    def step(self, chunks, tokens, every=False, drafts=MappingProxyType({})):
        self.steps += 1
        self.chunks += [len(ids) for ids in chunks.values()]
        found = {}
        for row, ids in {**chunks, **{row: [token, *drafts.get(row, ())] for row, token in tokens.items()}}.items():
            logits = []
            for token in ids:
                self.rows[row].append(token)
                logits.append(self.logits_after(self.rows[row]))
            found[row] = np.stack(logits) if row in drafts or (every and row in chunks) else logits[-1]
        return found

    def trim(self, row, length):
        assert length <= len(self.rows[row])
        del self.rows[row][length:]

    def clear(self, row, length=0):
        self.trim(row, length)
        self.cleared.append((row, length))

    def use_adapter(self, row, adapter):
        pass

    def read_slots(self, row, start, stop):
        assert stop <= len(self.rows[row])
        return [np.asarray(self.rows[row][start:stop])]

    def restore(self, row, start, count, blocks):
        self.trim(row, start)
        for (block,) in blocks:
            assert len(block) == count
            self.rows[row] += block.tolist()


def request(prompt, most=20, sampling=None, first=(), end=None, **more):
    sampler = Sampler(sampling or SamplingConfig(), (), None, first)
    return Request(prompt, most, sampler, lambda tokens: tokens[-1] == end, **more)


def answers(scheduler, requests):
    """What each request gets: (token, log-probability, why it ended, alternatives) of each token, or its failure."""
    numbers = [scheduler.submit(each) for each in requests]
    found = {number: [] for number in numbers}
    while not scheduler.is_idle:
        for event in scheduler.step():
            if isinstance(event, NewToken):
                told = event.token, event.log_probability, event.finish_reason, event.top
                found[event.request].append(told)
            elif isinstance(event, Failure):
                found[event.request].append(type(event.error).__name__)
    return [found[number] for number in numbers]


def alone(decoding, each):
    return answers(Scheduler(decoding, ENGINE), [each])[0]
