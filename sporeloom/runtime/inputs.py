# SPDX-License-Identifier: Apache-2.0
"""What a parallel network is called with: Tensors, the same on every rank."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from sporeloom.errors import ConfigError, Problems
from sporeloom.runtime.calls import Arguments, UnknownArgumentError
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import Strategy

Given = TypeVar("Given")

_agreed: dict[Any, Any] = {}


def inputs_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine
) -> tuple[Tensor, ...]:
    """The arguments in the order of the parameters of `function`. At the first call of `owner`, and at the first with inputs
    of these shapes, all ranks hold theirs against each other.

    Raises:
        ConfigError: one is no Tensor, the batch cannot be sharded, or another rank was given other values.
    """
    return _agreed_on(owner, function, engine, lambda: _in_order(function, args, kwargs, engine), lambda inputs: inputs)


def arguments_of(
    owner: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], engine: Engine, has_batch: bool
) -> Arguments:
    """The arguments, agreed upon in the same way, of what is compiled for one device: Tensors may be nested in them, and
    numbers, texts and None beside them.

    Args:
        has_batch: whether the batch is among them.

    Raises:
        ConfigError: one is nothing that a graph takes, the batch cannot be sharded, or another rank was given other values.
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
    owner: Any, function: Any, engine: Engine, make: Callable[[], Given], tensors: Callable[[Given], Sequence[Tensor]]
) -> Given:
    problems, is_new = Problems(), is_first(owner, (), _agreed)
    given = problems.of(make)
    inputs = () if given is None else tensors(given)
    if not is_new:
        problems.tell()  # the others are beyond their first call, and do not wait for this one
    if is_new or is_first(owner, inputs, _agreed):
        engine.backend.agree(problems)
        sums = [_checksum(x) for x in inputs] + ([given.source] if isinstance(given, Arguments) else [])
        pairs = itertools.zip_longest(sums, engine.share(sums, 0))
        other = [str(place) for place, (mine, first) in enumerate(pairs, 1) if mine != first]
        problem = (
            f"{function.__qualname__}: rank {engine.rank} was given other values than rank 0 as argument {', '.join(other)}: "
            "every rank takes the same, whole batch, of which the graph takes its rows; read the dataset without "
            "num_shards, and shuffle by one seed"
        )
        engine.backend.agree([problem] if other else [])
    assert given is not None  # or it had problems
    return given


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
