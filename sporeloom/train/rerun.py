# SPDX-License-Identifier: Apache-2.0
"""Silent data corruption: a step that runs twice from the same state must give the same bits on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage
from sporeloom.train.saving import ACCUMULATED


class SilentCorruptionError(RuntimeError):
    """The same step gave two results."""


def run_twice(
    engine: Engine, step: TrainStep, report: Report, inputs: Sequence[Tensor], number: int
) -> tuple[Any, ...]:
    """Run step `number`, once more from the state before it, and compare all that this rank holds. Takes two copies of that
    in host memory. All ranks take part. Returns what the second run gave.

    Raises:
        SilentCorruptionError: bits differ, on this rank or another.
    """
    held = _held(engine, step, report)
    before = _values(held)
    first = engine.run(step, *inputs)
    after = {**_values(held), **_results(first)}
    for name, parameter in held.items():
        parameter.set_data(Tensor(before[name], dtype=parameter.dtype), slice_shape=parameter.sliced)
    del before
    second: tuple[Any, ...] = engine.run(step, *inputs)
    different = _difference(after, {**_values(held), **_results(second)})
    failed = engine.max_over_ranks(engine.rank + 1 if different else 0) - 1
    if failed >= 0:
        where = f"rank {engine.rank}: {different}" if different else (f"on rank {failed}, whose log has the details")
        raise SilentCorruptionError(
            f"step {number}, run twice from the same state, does not give the same bits: {where}. Nothing of "
            "this step was saved. Test that device before you --resume; if it is sound, an operator is not "
            "deterministic"
        )
    return second


def _held(engine: Engine, step: TrainStep, report: Report) -> dict[str, Parameter]:
    """This rank's state that a step may change: weights, also frozen ones, of which experts' balance biases move."""
    found: dict[str, Parameter] = {}
    for parameter in step.get_parameters():
        name = parameter.name
        is_reported = bool({name, name.partition(".")[2]} & report.by_name.keys())
        others = is_reported and engine.held_slice(name, tuple(report.of(name).global_shape)) is None
        if not others and not name.startswith(ACCUMULATED):  # other stages' parameters are in the step, too
            found[name] = storage(parameter)
    return found


def _values(parameters: Mapping[str, Parameter]) -> dict[str, NDArray[Any]]:
    return {name: parameter.asnumpy().copy() for name, parameter in parameters.items()}


def _results(outputs: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
    names = ("the loss", "the norm of the gradients", "the counts of experts")
    return {name: output.asnumpy().copy() for name, output in zip(names, outputs, strict=False)}


def _difference(first: Mapping[str, NDArray[Any]], second: Mapping[str, NDArray[Any]]) -> str:
    """Describe the differences, the first by name; empty where there are none."""
    differing = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    if not differing:
        return ""
    one, other = (np.atleast_1d(values[differing[0]]) for values in (first, second))
    places = np.flatnonzero(one.view(np.uint8).reshape(one.size, -1) != other.view(np.uint8).reshape(one.size, -1))
    place = int(places[0]) // one.itemsize
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{differing[0]} is {one.flat[place]!r}, then {other.flat[place]!r}, at entry {place}{more}"
