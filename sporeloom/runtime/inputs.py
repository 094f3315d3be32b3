# SPDX-License-Identifier: Apache-2.0
"""The inputs of a parallel network: Tensors with equal values on every rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.runtime.calls import Arguments, UnknownArgumentError
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import Strategy

_agreed: dict[Any, Any] = {}


def arguments_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine, has_batch: bool
) -> Arguments:
    """Arguments of a call: Tensors, numbers, texts, None, and lists, tuples and dicts of these. Ranks compare the values at
    the first call of `owner` and at the first call with these shapes.

    Args:
        has_batch: whether the arguments include the batch.

    Raises:
        ConfigError: a graph does not accept an argument, the batch cannot be sharded, or the values differ between ranks.
    """
    problems, is_new = Problems(), is_first(owner, (), _agreed)
    given = problems.of(_flattened, function, args, kwargs, engine.strategy if has_batch else None)
    tensors = given.tensors if given is not None else ()
    if not is_new:
        problems.raise_if_any()  # the others have passed their first call and do not wait for this rank
    if is_new or is_first(owner, tensors, _agreed):
        engine.backend.agree(problems)
        assert given is not None  # or it had problems
        sums = [*map(_checksum, tensors), given.source]
        pairs = itertools.zip_longest(sums, engine.broadcast_value(sums, 0))
        other = [str(place) for place, (mine, first) in enumerate(pairs, 1) if mine != first]
        problem = (
            f"{function.__qualname__}: rank {engine.rank} was given other values than rank 0 as argument {', '.join(other)}: "
            "every rank takes the same, full batch, of which the graph takes its rows; read the dataset without "
            "num_shards, and shuffle by one seed"
        )
        engine.backend.agree([problem] if other else [])
    assert given is not None
    return given


def _flattened(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], strategy_of_batch: Strategy | None
) -> Arguments:
    try:
        arguments = Arguments.of(args, kwargs)
    except UnknownArgumentError as error:
        raise ConfigError(
            f"{function.__qualname__}: {error}; a parallel network takes Tensors, numbers and texts, and lists, tuples "
            "and dicts of these: give anything else to its __init__"
        ) from None
    if strategy_of_batch is not None:
        _check_rows(arguments.tensors, strategy_of_batch)
    return arguments


def _check_rows(tensors: Sequence[Tensor], strategy: Strategy) -> None:
    batches = [x.shape[0] for x in tensors if x.ndim]
    if batches and all(rows % strategy.mesh.dp for rows in batches):
        raise ConfigError(
            f"{strategy.at('mesh.dp')}: a batch of {batches[0]} rows is not divisible by dp {strategy.mesh.dp}"
        )


def is_first(owner: Any, inputs: Sequence[Tensor], seen: dict[Any, Any]) -> bool:
    """Whether `seen` has no call of `owner` with inputs of these shapes and types; records the call."""
    key = id(owner), getattr(owner, "training", False), *((x.shape, x.dtype) for x in inputs)
    if key in seen:
        return False
    seen[key] = owner  # the reference keeps the id valid
    return True


def _checksum(x: Tensor) -> list[Any]:
    array = (x.astype(mstype.float32) if x.dtype == mstype.bfloat16 else x).asnumpy()
    return [list(x.shape), str(x.dtype), zlib.crc32(np.ascontiguousarray(array).tobytes())]
