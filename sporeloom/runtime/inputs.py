# SPDX-License-Identifier: Apache-2.0
"""What a parallel network is called with: Tensors, the same on every rank."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from sporeloom.errors import ConfigError, Problems
from sporeloom.runtime.engine import Engine

_agreed: dict[Any, Any] = {}


def inputs_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine
) -> tuple[Tensor, ...]:
    """The arguments in the order of the parameters of `function`. At the first call of `owner`, and at the first with inputs
    of these shapes, all ranks hold theirs against each other.

    Raises:
        ConfigError: one is no Tensor, the batch cannot be sharded, or another rank was given other values.
    """
    problems, is_new = Problems(), is_first(owner, (), _agreed)
    inputs = problems.of(_in_order, function, args, kwargs, engine)
    if not is_new:
        problems.tell()  # the others are beyond their first call, and do not wait for this one
    if is_new or is_first(owner, inputs or (), _agreed):
        engine.backend.agree(problems)
        sums = [_checksum(x) for x in inputs or ()]
        pairs = itertools.zip_longest(sums, engine.share(sums, 0))
        other = [str(place) for place, (mine, first) in enumerate(pairs, 1) if mine != first]
        problem = (
            f"{function.__qualname__}: rank {engine.rank} was given other values than rank 0 as argument {', '.join(other)}: "
            "every rank takes the same, whole batch, of which the graph takes its rows; read the dataset without "
            "num_shards, and shuffle by one seed"
        )
        engine.backend.agree([problem] if other else [])
    assert inputs is not None
    return inputs


def is_first(owner: Any, inputs: Sequence[Tensor], seen: dict[Any, Any]) -> bool:
    """Whether `seen` has no call of `owner` with inputs like these; from now on it has."""
    key = id(owner), getattr(owner, "training", False), *((x.shape, x.dtype) for x in inputs)
    if key in seen:
        return False
    seen[key] = owner  # what is kept here keeps its id
    return True


def _checksum(x: Tensor) -> list[Any]:
    array = (x.astype(mstype.float32) if x.dtype == mstype.bfloat16 else x).asnumpy()
    return [list(x.shape), str(x.dtype), zlib.crc32(np.ascontiguousarray(array).tobytes())]


def _in_order(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine) -> tuple[Tensor, ...]:
    if kwargs:
        bound = inspect.signature(function).bind(*args, **kwargs)
        args = bound.args
    for place, value in enumerate(args):
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{function.__qualname__}: argument {place + 1} is {value!r:.40}; a parallel network takes Tensors: give "
                "numbers and options to its __init__"
            )
    strategy = engine.strategy
    parts = strategy.mesh.dp * strategy.num_microbatches()
    if args and args[0].ndim and args[0].shape[0] % parts:
        raise ConfigError(
            f"{strategy.at('mesh.dp')}: a batch of {args[0].shape[0]} rows is not divisible by dp {strategy.mesh.dp}"
            + (f" x {parts // strategy.mesh.dp} microbatches = {parts}" if parts > strategy.mesh.dp else "")
        )
    return args
