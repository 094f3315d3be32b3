# SPDX-License-Identifier: Apache-2.0
"""Requests in one process of a job, with and without drafts by layers of multi-token prediction, for test_mtp_drafts."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
from mindspore import Tensor

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.draft_model import open_speculation
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import load_model
from sporeloom.inference.mtp_drafter import MTPDrafter
from sporeloom.inference.prefix_cache import prefix_cache
from sporeloom.inference.requests import NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.speculation_config import SpeculationFlags
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

ROWS, SLOTS, CHUNK = 8, 96, 16


def requests(config, count=8):
    """Prompts of several lengths, two of which begin alike; every other one is sampled."""
    draw = np.random.default_rng(5)
    beginning = draw.integers(1, config.vocab_size, 40).tolist()
    for number in range(count):
        prompt = draw.integers(1, config.vocab_size, (3, 9, 26, 45)[number % 4]).tolist()
        prompt = [*beginning, *prompt[:7]] if number % 3 == 0 else prompt
        sampling = SamplingConfig(temperature=0.0 if number % 2 else 0.7, seed=number)
        yield Request(prompt, 18, Sampler(sampling, (), config.vocab_size), lambda tokens: False, number, num_top=2)


def answers(scheduler, asked):
    numbers = [scheduler.submit(each) for each in asked]
    told = {number: [] for number in numbers}
    while not scheduler.is_idle:
        for event in scheduler.step():
            assert isinstance(event, NewToken), event
            told[event.request].append((event.token, event.log_probability, event.top))
    return list(told.values())


def in_pairs(scheduler, asked):
    """Answers of two at a time, so that drafts have places in the steps."""
    return [answer for first in range(0, len(asked), 2) for answer in answers(scheduler, asked[first : first + 2])]


def opened(checkpoint, strategy, num_tokens, weights="float32"):
    engine = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE)
    family, config = load_config(Path(checkpoint))
    flags = SpeculationFlags(speculate="mtp" if num_tokens else "off", num_speculative_tokens=num_tokens or 1)
    shape, has_drafts = (ROWS, SLOTS), num_tokens > 0
    net = load_model(
        Path(checkpoint), family, config, engine.strategy, shape, weights, num_drafts=num_tokens, drafts=has_drafts
    )
    decoding = cached(engine, net, config, *shape, CHUNK, num_tokens)
    return engine, config, decoding, open_speculation(flags, None, engine, decoding)


class Teacher:
    """Notes the logits of drafts, and the texts that they continue."""

    def __init__(self, drafter):
        self.drafter, self.noted, self.inner = drafter, [], drafter._run
        drafter._run = self.run

    def run(self, depth, spans, rows, length):
        engine, found = self.drafter._engine, []
        inner = engine.run
        with patch.object(engine, "run", lambda *of: found.append(inner(*of)) or found[-1]):
            tokens = self.inner(depth, spans, rows, length)
        if engine.is_log_rank:
            for row, logits in zip(rows, found[0].asnumpy(), strict=True):
                if row in spans:
                    self.noted.append((row, depth, spans[row], logits))
        return tokens


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)  # the drafts do not depend on times
def compared(checkpoint, strategy=None, num_tokens=4, weights="float32"):
    """Answers without and with drafts, alone and together and from a warm prefix cache; and counts."""
    engine, config, plain, _ = opened(checkpoint, strategy, 0, weights)
    *_, decoding, speculation = opened(checkpoint, strategy, num_tokens, weights)
    asked = list(requests(config))
    names = [each.name for each in plain.net.get_parameters()]
    found = {"plain": in_pairs(Scheduler(plain, engine), asked)}
    for row in range(ROWS):
        plain.trim(row, 0)
    found["plain together"] = answers(Scheduler(plain, engine), asked)
    cache = prefix_cache(decoding, decoding.cache_bytes // (ROWS * SLOTS), 2**26)
    scheduler = Scheduler(decoding, engine, cache, speculation)
    found["drafts"] = in_pairs(scheduler, asked)
    counts = speculation.drafted, speculation.accepted
    found["together"] = answers(scheduler, asked)
    before = scheduler.reused_tokens
    found["warm"] = in_pairs(scheduler, asked)
    held = sum(each.nbytes for each in decoding.net.get_parameters() if ".cache." in each.name)
    return {
        **found,
        "counts": counts,
        "reused": scheduler.reused_tokens - before,
        "names": names,
        "cache_bytes": (decoding.cache_bytes, held),
        "kind": type(decoding).__name__,
    } if engine.is_log_rank else None


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)
def teacher_forced(checkpoint, num_tokens, strategy=None):
    """For each drafted token of each depth: its logits, and the tokens that it was drafted after with those drafted."""
    engine, config, decoding, speculation = opened(checkpoint, strategy, num_tokens)
    assert isinstance(speculation.drafter, MTPDrafter)
    teacher, noted, inner = Teacher(speculation.drafter), [], speculation.drafter.propose

    def propose(counts):
        teacher.noted.clear()
        texts = {row: list(speculation.drafter._rows[row].text) for row in counts if row in speculation.drafter._rows}
        drafts = inner(counts)
        by_row = {row: [each for each in teacher.noted if each[0] == row] for row in drafts}
        for row, draft in drafts.items():
            for place, (_, depth, span, logits) in enumerate(by_row[row][-len(draft) :]):
                position = span.start + len(span.tokens) - 1
                noted.append((texts[row] + draft[:place], depth, position, logits.tolist(), draft[place]))
        return drafts

    speculation.drafter.propose = propose
    in_pairs(Scheduler(decoding, engine, None, speculation), list(requests(config)))
    return noted if engine.is_log_rank else None
