# SPDX-License-Identifier: Apache-2.0
"""The inputs of a parallel network: Tensors with equal values on every rank."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.runtime.calls import Arguments, UnknownArgumentError
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import Strategy

Arg = TypeVar("Arg")

_agreed: dict[Any, Any] = {}


def inputs_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine
) -> tuple[Tensor, ...]:
    """Arguments in the order of the parameters of `function`. Ranks compare the values at the first call of `owner` and
    at the first call with these shapes.

    Raises:
        ConfigError: an argument is not a Tensor, the batch cannot be sharded, or the values differ between ranks.
    """
    return _agreed_on(owner, function, engine, lambda: _in_order(function, args, kwargs, engine), lambda inputs: inputs)


def arguments_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine, has_batch: bool
) -> Arguments:
    """Arguments, compared in the same way, for a graph compiled for one device: they may also be numbers, texts or
    None, or nest Tensors.

    Args:
        has_batch: whether the arguments include the batch.

    Raises:
        ConfigError: a graph does not accept an argument, the batch cannot be sharded, or the values differ between ranks.
    """

    def flattened() -> Arguments:
        try:
            arguments = Arguments.of(args, kwargs)
        except UnknownArgumentError as error:
            raise ConfigError(
                f"{function.__qualname__}: {error}; a parallel network takes Tensors, numbers and texts, and lists, tuples "
                "and dicts of these: give anything else to its __init__"
            ) from None
        if has_batch:
            _check_rows(arguments.tensors, engine.strategy)
        return arguments

    return _agreed_on(owner, function, engine, flattened, lambda arguments: arguments.tensors)


def _check_rows(tensors: Sequence[Tensor], strategy: Strategy) -> None:
    batches = [x.shape[0] for x in tensors if x.ndim]
    if batches and all(rows % strategy.mesh.dp for rows in batches):
        raise ConfigError(
            f"{strategy.at('mesh.dp')}: a batch of {batches[0]} rows is not divisible by dp {strategy.mesh.dp}"
        )


def _agreed_on(
    owner: Any, function: Any, engine: Engine, make: Callable[[], Arg], tensors: Callable[[Arg], Sequence[Tensor]]
) -> Arg:
    problems, is_new = Problems(), is_first(owner, (), _agreed)
    given = problems.of(make)
    inputs = () if given is None else tensors(given)
    if not is_new:
        problems.tell()  # the others have passed their first call and do not wait for this rank
    if is_new or is_first(owner, inputs, _agreed):
        engine.backend.agree(problems)
        sums = [_checksum(x) for x in inputs] + ([given.source] if isinstance(given, Arguments) else [])
        pairs = itertools.zip_longest(sums, engine.share(sums, 0))
        other = [str(place) for place, (mine, first) in enumerate(pairs, 1) if mine != first]
        problem = (
            f"{function.__qualname__}: rank {engine.rank} was given other values than rank 0 as argument {', '.join(other)}: "
            "every rank takes the same, full batch, of which the graph takes its rows; read the dataset without "
            "num_shards, and shuffle by one seed"
        )
        engine.backend.agree([problem] if other else [])
    assert given is not None  # or it had problems
    return given


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
