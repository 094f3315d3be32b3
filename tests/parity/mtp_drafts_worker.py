# SPDX-License-Identifier: Apache-2.0
"""Requests in one process of a job, with and without drafts by layers of multi-token prediction, for test_mtp_drafts."""

from pathlib import Path
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.draft_model import open_speculation
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import load_model
from sporeloom.inference.prefix_cache import prefix_cache
from sporeloom.inference.requests import NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.speculation import NgramDrafter, Speculation
from sporeloom.inference.speculation_config import SpeculationFlags
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

ROWS, SLOTS, CHUNK = 8, 96, 16


def requests(config, count=4):
    """Prompts of several lengths, two of which begin alike; every other one is sampled."""
    draw = np.random.default_rng(5)
    beginning = draw.integers(1, config.vocab_size, 40).tolist()
    for number in range(count):
        prompt = draw.integers(1, config.vocab_size, (3, 9, 26, 45)[number % 4]).tolist()
        prompt = [*beginning, *prompt[:7]] if number % 3 == 0 else prompt
        sampling = SamplingConfig(temperature=0.0 if number % 2 else 0.7, seed=number)
        yield Request(prompt, 12, Sampler(sampling, (), config.vocab_size), lambda tokens: False, number, num_top=2)


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
    of = Path(checkpoint), family, config, engine.strategy, (ROWS, SLOTS)
    net = load_model(*of, weights, num_drafts=num_tokens, drafts=num_tokens > 0)
    decoding = cached(engine, net, config, ROWS, SLOTS, CHUNK, num_tokens)
    return engine, config, decoding, open_speculation(flags, None, engine, decoding)


class Notes:
    """The texts that a drafter drafts after, and the logits of each drafted token."""

    def __init__(self, drafter):
        self.drafter, self.engine, self.of_drafts, self._spans = drafter, drafter._engine, [], []
        self._run, self._propose = drafter._run, drafter.propose
        drafter._run, drafter.propose = self.run, self.propose

    def run(self, depth, spans, rows, length):
        outputs, inner = [], self.engine.run
        with patch.object(self.engine, "run", lambda *of: outputs.append(inner(*of)) or outputs[0]):
            tokens = self._run(depth, spans, rows, length)
        if self.engine.is_log_rank:
            self._spans += [
                (row, logits) for row, logits in zip(rows, outputs[0].asnumpy(), strict=True) if row in spans
            ]
        return tokens

    def propose(self, counts):
        self._spans.clear()
        texts = {row: list(state.text) for row, state in self.drafter._rows.items()}
        drafts = self._propose(counts)
        for row, draft in drafts.items():
            logits = [each for place, each in self._spans if place == row][-len(draft) :]
            self.of_drafts.append((texts[row], draft, logits))
        return drafts


class Oracle(NgramDrafter):
    """Drafts the tokens of known texts, every third draft with a wrong one at its end."""

    def __init__(self, texts, vocab_size):
        super().__init__()
        self.texts, self.vocab_size, self.number = texts, vocab_size, 0

    def propose(self, counts):
        drafts = {}
        for row, count in counts.items():
            text = self._rows[row]._tokens
            (whole,) = [each for each in self.texts if each[: len(text)] == text]
            draft = whole[len(text) : len(text) + count]
            self.number += 1
            if self.number % 3 == 0:
                draft[-1] = (draft[-1] + 1) % self.vocab_size
            drafts[row] = draft
        return drafts


class States(nn.Cell):
    """Logits of all depths, and the states that the last one reads, as training computes them."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, tokens, positions, later):
        model = self.model
        logits, _ = model.logits_of_depths(tokens, positions, later)
        x, _, masks, angles = model.stream(tokens, positions)
        x = model.final_norm(x) if model.mtp_reads_normed else x
        for depth in range(model.config.num_mtp_layers - 1):
            bias = masks[model.mask_of_layer[model.config.num_layers + depth]] if model.has_windows else masks[0]
            x, _ = model.mtp[depth](
                x, model.embedding(model.known_token(later[depth], 0), positions), bias, angles, tokens
            )
            x = model.mtp[depth].head_norm(x) if model.mtp_reads_normed else x
        return logits[1:], x


class Last(nn.Cell):
    """Logits and states of the last depth, without a cache, from the states that it reads."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, x, positions, later):
        model, layer = self.model, self.model.mtp[-1]
        masks, angles = model.biases(positions), model.angles(positions)
        angles = model.with_conv(angles, positions, None) if model.has_conv else angles
        bias = masks[model.mask_of_layer[-1]] if model.has_windows else masks[0]
        x, _ = layer(x, model.embedding(model.known_token(later, 0), positions), bias, angles, later)
        normed = layer.head_norm(x)
        return model.head(normed, model.embedding.word.weight), normed if model.mtp_reads_normed else x


def largest_difference(checkpoint, notes, count):
    """Largest difference between logits of drafts and those of the training graph, over the last `count` drafts."""
    family, config = load_config(Path(checkpoint))
    model = load_model(Path(checkpoint), family, config, SINGLE_DEVICE, drafts=True)
    of_all, of_last, depths = States(model), Last(model), config.num_mtp_layers
    ms.set_context(mode=ms.PYNATIVE_MODE)  # graphs of their own would take longer to compile
    positions, largest = Tensor(np.arange(SLOTS, dtype=np.int32)[None]), 0.0
    for text, draft, logits in notes[-count:]:
        tokens, end = np.zeros((1, SLOTS + depths), np.int32), len(text) - 1
        tokens[0, : len(text) + len(draft)] = [*text, *draft]
        later = [Tensor(tokens[:, depth : depth + SLOTS]) for depth in range(1, depths + 1)]
        expected, states = of_all(Tensor(tokens[:, :SLOTS]), positions, later)
        found = [each.asnumpy()[end - 1] for each in expected][: len(draft)]
        _, own = of_last(states, positions, later[-1])
        states = states.asnumpy().copy()
        for again in range(len(draft) - depths):
            states[end + again] = own.asnumpy()[end + again - 1]
            of_next, own = of_last(Tensor(states), positions, later[-1])
            found.append(of_next.asnumpy()[end + again])
        assert len(found) == len(draft)
        largest = max(largest, *(float(np.abs(a - b).max()) for a, b in zip(found, logits, strict=True)))
    ms.set_context(mode=ms.GRAPH_MODE)
    return largest


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)  # the drafts do not depend on times
def held_as(checkpoint, weights):
    """Answers without and with drafts where matrices have a format, and the number of drafted tokens."""
    engine, config, plain, _ = opened(checkpoint, None, 0, weights)
    *_, decoding, speculation = opened(checkpoint, None, 3, weights)
    asked = list(requests(config))
    found = {"plain": in_pairs(Scheduler(plain, engine), asked)}
    found["drafts"] = in_pairs(Scheduler(decoding, engine, None, speculation), asked)
    return {**found, "drafted": speculation.drafted}


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)  # the drafts do not depend on times
def compared(checkpoint, strategy=None, num_tokens=4, num_checked=0):
    """Answers without and with drafts, apart and together and with a warm prefix cache; counts; and the largest difference
    of logits of some drafts from those of training."""
    engine, config, plain, _ = opened(checkpoint, strategy, 0)
    *_, decoding, speculation = opened(checkpoint, strategy, num_tokens)
    asked, notes = list(requests(config)), Notes(speculation.drafter)
    found = {"plain": in_pairs(Scheduler(plain, engine), asked)}
    cache = prefix_cache(decoding, decoding.cache_bytes // (ROWS * SLOTS), 2**26)
    scheduler = Scheduler(decoding, engine, cache, speculation)
    found["drafts"] = in_pairs(scheduler, asked)
    counts = speculation.drafted, speculation.accepted
    found["warm"] = in_pairs(scheduler, asked)
    reused = scheduler.reused_tokens
    for row in range(ROWS):
        decoding.trim(row, 0)
    texts = [[*each.prompt, *(token for token, *_ in of)] for each, of in zip(asked, found["plain"], strict=True)]
    oracle = Speculation(Oracle(texts, config.vocab_size), num_tokens)
    found["oracle"] = in_pairs(Scheduler(decoding, engine, None, oracle), asked)
    if not engine.is_log_rank:
        return None
    held = {each.name: each.nbytes for each in decoding.net.get_parameters() if ".cache." in each.name}
    return {
        "answers": found,
        "counts": counts,
        "oracle": (oracle.drafted, oracle.accepted),
        "reused": reused,
        "has_mtp": [any(n.name.startswith("mtp.") for n in each.net.get_parameters()) for each in (plain, decoding)],
        "cache_bytes": (decoding.cache_bytes, sum(held.values())),
        "difference": largest_difference(checkpoint, notes.of_drafts, num_checked) if num_checked else None,
        "lengths": sorted({len(draft) for _, draft, _ in notes.of_drafts}),
    }
