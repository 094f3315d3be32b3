# SPDX-License-Identifier: Apache-2.0
"""Texts of one process of a job whose rows go through adapters of their own, for test_multi_lora."""

from pathlib import Path

from sporeloom.checkpoint.adapters import read_adapter
from sporeloom.checkpoint.model_folder import load_config
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.model import load_model
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

NEW_TOKENS, CHUNK, ROWS, SLOTS = 6, 16, 4, 128


def open_scheduler(engine, folder, modules=(), weights="float32"):
    family, config = load_config(folder)
    adapters = [read_adapter(Path(module), family, config) for module in modules]
    net = load_model(folder, family, config, engine.strategy, (ROWS, SLOTS), weights, adapters)
    return Scheduler(CachedDecoder(engine, net, config, ROWS, SLOTS, CHUNK), engine)


def texts(scheduler, requests):
    """Tokens and their log-probabilities of each (prompt, adapter), all worked on together."""
    sampler = Sampler(SamplingConfig(temperature=0.0), (), 10**6)
    told = {}
    for prompt, adapter in requests:
        number = scheduler.submit(Request(prompt, NEW_TOKENS, sampler, lambda tokens: False, adapter=adapter))
        told[number] = ([], [])
    while not scheduler.is_idle:
        for event in scheduler.step():
            told[event.request][0].append(event.token)
            told[event.request][1].append(event.log_probability)
    return list(told.values())


def together(checkpoint, modules, requests, strategy=None, weights="float32"):
    """Requests that share the rows; and each again, alone."""
    engine = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE)
    scheduler = open_scheduler(engine, Path(checkpoint), modules, weights)
    found = {"together": texts(scheduler, requests)}
    if not strategy:
        found |= {"alone": [texts(scheduler, [each])[0] for each in requests], "reused": scheduler.reused_tokens}
    return found if engine.is_log_rank else None


def merged(folders, prompts, weights="float32"):
    """Of each checkpoint folder, adapters' among them, the texts of all prompts."""
    engine = Engine.start(SINGLE_DEVICE)
    return [
        texts(open_scheduler(engine, Path(folder), (), weights), [(each, 0) for each in prompts]) for folder in folders
    ]
