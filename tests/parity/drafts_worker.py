# SPDX-License-Identifier: Apache-2.0
"""Mixed requests in one process of a job, alone and together, with drafts and with a warm prefix cache, for test_drafts."""

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from sporeloom.checkpoint.adapters import read_adapter
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.tokenizer import find_tokenizer, folder_tokenizer
from sporeloom.inference.cache import cache_bytes
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.draft_length import DraftLength
from sporeloom.inference.draft_model import open_speculation
from sporeloom.inference.kernels import SWITCH
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import load_model
from sporeloom.inference.prefix_cache import prefix_cache
from sporeloom.inference.requests import NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.session import StopConditions
from sporeloom.inference.speculation import NgramDrafter, Speculation
from sporeloom.inference.speculation_config import SpeculationFlags, read_draft
from sporeloom.runtime.engine import Engine
from sporeloom.serve.constraint import TokenMask
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

ROWS, SLOTS, CHUNK, DRAFTS = 4, 128, 16, 6
GRAMMARS = (
    {"json_schema": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3}},
    {"lark_grammar": "start: /[a-c ]{9,30}/"},
)
TEXT = "老人坐在河边钓鱼,孩子们在桥上跑来跑去。"


def requests(tokenizer, end_ids, count, num_adapters):
    """The requests, each with a grammar of its own."""
    draw = np.random.default_rng(4)
    for number in range(count):
        prompt = tokenizer.encode(TEXT * int(draw.integers(1, 4)) + str(number // 3))
        greedy = number % 3 == 0
        sampling = SamplingConfig(
            temperature=0.0 if greedy else float(draw.choice([0.3, 1.0])),
            seed=number,
            top_p=float(draw.choice([1, 0.9])),
            frequency_penalty=0.4 if number % 5 == 4 else 0.0,
            repetition_penalty=1.2 if number % 7 == 6 else 1.0,
        )
        first = [TokenMask(tokenizer, end_ids, [GRAMMARS[number % 2]])] if number % 4 == 1 else []
        stop = StopConditions(tokenizer, end_ids, ("。",) if number % 6 == 5 else ())
        yield Request(
            prompt,
            int(draw.integers(4, 28)),
            Sampler(sampling, end_ids, tokenizer.vocab_size, first),
            stop.watch(),
            stream=number % 2,
            num_top=number % 3,
            adapter=number % (num_adapters + 1),
        )


def answers(scheduler, asked):
    numbers = [scheduler.submit(each) for each in asked]
    told = {number: [] for number in numbers}
    while not scheduler.is_idle:
        for event in scheduler.step():
            assert isinstance(event, NewToken), event
            told[event.request].append((event.token, event.log_probability, event.finish_reason, event.top))
    return list(told.values())


def opened(decoding, engine, *more):
    """A scheduler whose rows hold nothing."""
    for row in range(decoding.num_rows):
        decoding.trim(row, 0)
    return Scheduler(decoding, engine, *more)


def mixed(checkpoint, strategy=None, modules=(), weights="float32", count=9):
    """{way: answers} of each way, and what was drafted, accepted and reused."""
    engine = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE)
    folder = Path(checkpoint)
    family, config = load_config(folder)
    tokenizer = folder_tokenizer(family, folder, config)
    adapters = [read_adapter(Path(module), family, config) for module in modules]

    def decoding(num_drafts):
        net = load_model(folder, family, config, engine.strategy, (ROWS, SLOTS), weights, adapters, num_drafts)
        return cached(engine, net, config, ROWS, SLOTS, CHUNK, num_drafts)

    def asked():
        return list(requests(tokenizer, config.end_ids, count, len(adapters)))

    plain, drafting = decoding(0), decoding(DRAFTS)
    found = {"alone": [answers(opened(plain, engine), [each])[0] for each in asked()]}
    found["together"] = answers(opened(plain, engine), asked())
    speculation = Speculation(NgramDrafter(), DRAFTS)
    found["drafts"] = answers(opened(drafting, engine, None, speculation), asked())
    some = asked()[: count // 2]
    found["drafts alone"] = [answers(opened(drafting, engine, None, speculation), [each])[0] for each in some]
    cache = prefix_cache(drafting, cache_bytes(config, 1, 1), 2**26)
    warm = opened(drafting, engine, cache, Speculation(NgramDrafter(), DRAFTS))
    answers(warm, asked()[::-1])
    before = warm.reused_tokens
    found["warm"] = answers(warm, asked())
    counts = {"drafted": speculation.drafted, "accepted": speculation.accepted, "reused": warm.reused_tokens - before}
    return {**found, **counts, "kind": type(plain).__name__} if engine.is_log_rank else None


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)  # the drafts do not depend on times
def by_models(checkpoint, drafts, strategy=None, num_rows=ROWS, count=7):
    """Answers together without drafts, and with those of each of some models, from a warm prefix cache the second time; and
    what was drafted, accepted and reused."""
    engine = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE)
    folder = Path(checkpoint)
    family, config = load_config(folder)
    shape = num_rows, SLOTS
    tokenizer, file = folder_tokenizer(family, folder, config), find_tokenizer(family, folder)

    def decoding(num_drafts):
        net = load_model(folder, family, config, engine.strategy, shape, num_drafts=num_drafts)
        return cached(engine, net, config, *shape, CHUNK, num_drafts)

    def asked():
        return list(requests(tokenizer, config.end_ids, count, 0))

    def greedy():
        sampler = Sampler(SamplingConfig(), config.end_ids, tokenizer.vocab_size)
        return [replace(each, sampler=sampler, max_new_tokens=20) for each in asked()]

    plain, drafting = opened(decoding(0), engine), decoding(DRAFTS)
    found = {"mixed": answers(plain, asked()), "greedy": answers(plain, greedy())}
    for place in drafts:
        flags = SpeculationFlags(speculate="model", draft_model=Path(place), num_speculative_tokens=DRAFTS)
        draft = read_draft(flags, (family, config), file, None, "float32")
        speculation = open_speculation(flags, draft, engine, drafting)
        scheduler = opened(drafting, engine, prefix_cache(drafting, cache_bytes(config, 1, 1), 2**26), speculation)
        told, counts = {}, {}
        for name, ask in (("mixed", asked), ("warm", asked), ("greedy", greedy)):
            speculation.drafted = speculation.accepted = scheduler.reused_tokens = 0
            told[name] = answers(scheduler, ask())
            counts[name] = (speculation.drafted, speculation.accepted, scheduler.reused_tokens)
        found[Path(place).name] = {"answers": told, "counts": counts}
    return found if engine.is_log_rank else None


@patch.object(DraftLength, "best", lambda self, num_rows, most: most)  # the drafts do not depend on times
def combined(checkpoint, kind, weights, modules=(), count=4):
    """Answers without and with drafts of a kind, where matrices have a format, of two requests at a time so that drafts have
    places everywhere; and what was drafted and accepted."""
    engine, folder = Engine.start(SINGLE_DEVICE), Path(checkpoint)
    family, config = load_config(folder)
    tokenizer, file = folder_tokenizer(family, folder, config), find_tokenizer(family, folder)
    adapters = [read_adapter(Path(module), family, config) for module in modules]
    flags = SpeculationFlags(
        speculate=kind, draft_model=folder if kind == "model" else None, num_speculative_tokens=DRAFTS
    )

    def decoding(num_drafts):
        of = folder, family, config, engine.strategy, (ROWS, SLOTS), weights, adapters
        net = load_model(*of, num_drafts=num_drafts, drafts=num_drafts > 0 and flags.has_mtp)
        return cached(engine, net, config, ROWS, SLOTS, CHUNK, num_drafts)

    def in_pairs(scheduler):
        asked = list(requests(tokenizer, config.end_ids, count, len(adapters)))
        return [told for first in range(0, count, 2) for told in answers(scheduler, asked[first : first + 2])]

    found = in_pairs(opened(decoding(0), engine))
    drafting, draft = decoding(DRAFTS), read_draft(flags, (family, config), file, None, weights)
    speculation = open_speculation(flags, draft, engine, drafting)
    drafted = in_pairs(opened(drafting, engine, None, speculation))
    return {"plain": found, "drafts": drafted, "drafted": speculation.drafted, "accepted": speculation.accepted}


def places(checkpoint, formats, strategy=None, modules=(), num_rows=8):
    """For each (weights, KV cache, switch of the kernels): how many different logits each of three tokens gets in all places
    of a batch, also as a draft in other rows' places; and whether the places are computed at once."""
    engine, folder = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE), Path(checkpoint)
    family, config = load_config(folder)
    adapters = [read_adapter(Path(module), family, config) for module in modules]
    ids, told = list(range(40, 59)), []
    for weights, kv, switch in formats:
        of = folder, family, config, engine.strategy, (num_rows, 33), weights, adapters, DRAFTS, kv
        with patch.dict(os.environ, {SWITCH: switch}):
            net = load_model(*of)
        decoding = CachedDecoder(engine, net, config, num_rows, 33, CHUNK)
        for row in range(num_rows):
            decoding.use_adapter(row, len(adapters))
            for start in range(0, len(ids), CHUNK):
                decoding.step({row: ids[start : start + CHUNK]}, {})
        found = [decoding.step({}, dict.fromkeys(range(num_rows), token)) for token in (7, 8, 9)]
        for row in (0, num_rows - 1):
            decoding.trim(row, len(ids))
            found.append(decoding.step({}, {row: 7}, drafts={row: [8, 9]}))
        if engine.is_log_rank:
            at_once = [np.stack([logits[row] for row in range(num_rows)]) for logits in found[:3]]
            drafted = [logits[row] for logits, row in zip(found[3:], (0, num_rows - 1), strict=True)]
            every = [np.concatenate([of_token, [each[n] for each in drafted]]) for n, of_token in enumerate(at_once)]
            told.append(([len({row.tobytes() for row in each}) for each in every], net.places_are_alike))
    return told if engine.is_log_rank else None
