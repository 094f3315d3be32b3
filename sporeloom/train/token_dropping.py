# SPDX-License-Identifier: Apache-2.0
"""Checks of random layerwise token dropping against the model and the strategy of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sporeloom.data.random_ltd import RandomLTD
from sporeloom.data.sample_order import Sizes
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.checks import batch_problems
from sporeloom.strategy.config import Strategy

MAX_LENGTHS = 16
"""Maximum number of sequence lengths with random-LTD: each is a graph to compile."""


def random_ltd_problems(
    config: Any, dropping: RandomLTD, model: ModelConfig, sizes: Sizes, strategy: Strategy
) -> Iterator[str]:
    """List what the layers that drop tokens cannot be combined with."""
    if config.certificate:
        yield f"--certificate {config.certificate}: it covers layers that process all tokens, not random-LTD"
    plain = sum(path.startswith("layers.") for path in model.layers)
    if outside := [layer for layer in dropping.layers if layer >= plain]:
        yield f"--random-ltd-layers: layer {outside[0]} is outside 0 .. {plain - 1}, the layers that can drop tokens"
    if not dropping.layers:
        yield f"--random-ltd-min-value: {model.num_layers} layers have none between the first and the last"
    if model.experts:
        yield "--random-ltd-min-value: expert capacity is counted in full sequences; leave it out"
    yield from strategy.axis_problems("random-LTD")
    least, most, growth = dropping.min_value, dropping.max_value, dropping.seq_per_step
    if least > most:
        yield f"--random-ltd-min-value {least} is outside 1 .. {most}, the tokens of a sequence"
    elif least % growth:
        yield f"--random-ltd-min-value {least} is not a multiple of --random-ltd-seq-per-step {growth}"
    elif len(lengths := dropping.lengths(sizes, config.steps)) > MAX_LENGTHS:
        enough = math.ceil((most - least) / (MAX_LENGTHS - 1))
        yield (
            f"--random-ltd-seq-per-step {growth}: each of the {len(lengths)} lengths is a graph to compile; "
            f"{enough} or more makes at most {MAX_LENGTHS}"
        )
    else:
        for batch, length in sizes.shapes():
            known = batch_problems(strategy, batch, length, config.accumulate)
            for kept in lengths:
                yield from (p for p in batch_problems(strategy, batch, kept, config.accumulate) if p not in known)
