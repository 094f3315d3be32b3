# SPDX-License-Identifier: Apache-2.0
"""Texts before and after NaN came into the caches of one process of a job, for test_nan_in_caches."""

import dataclasses
from pathlib import Path

import mindspore as ms
import numpy as np

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import CACHE, load_model
from sporeloom.inference.requests import Failure, NewToken, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

ROWS, SLOTS, CHUNK = 2, 64, 16


def before_and_after(checkpoint, prompts, strategy=None, by_operators=True, dtype="float32"):
    """What all prompts get: at first; with NaN in every slot of every row; once those have failed."""
    engine = Engine.start(load_strategy(Path(strategy)) if strategy else SINGLE_DEVICE)
    family, config = load_config(Path(checkpoint))
    config = dataclasses.replace(config, compute_dtype=dtype)
    net = load_model(Path(checkpoint), family, config, engine.strategy, (ROWS, SLOTS))
    if by_operators and not strategy:
        for _, cell in net.cells_and_names():
            cell.has_kernel = False
    decoding = (CachedDecoder if by_operators else cached)(engine, net, config, ROWS, SLOTS, CHUNK)
    told = [_texts(decoding, engine, prompts)]
    for parameter in net.get_parameters():
        if CACHE in parameter.name and engine.held_slice(
            parameter.name, (ROWS, config.kv_heads, SLOTS, config.head_size)
        ):
            parameter = storage(parameter)
            values = np.full_like(parameter.asnumpy(), np.nan)
            parameter.set_data(ms.Tensor(values, dtype=parameter.dtype), slice_shape=parameter.sliced)
    told += [_texts(decoding, engine, prompts) for _ in range(2)]
    return told


def _texts(decoding, engine, prompts):
    """Tokens of each, or what it failed of."""
    scheduler = Scheduler(decoding, engine)
    found = {}
    for prompt in prompts:
        found[scheduler.submit(Request(prompt, 4, Sampler(SamplingConfig()), lambda tokens: False))] = []
    while not scheduler.is_idle:
        for event in scheduler.step():
            if isinstance(event, NewToken):
                found[event.request].append(event.token)
            else:
                assert isinstance(event, Failure)
                found[event.request] = type(event.error).__name__
    return list(found.values())
