# SPDX-License-Identifier: Apache-2.0
"""`auto_parallel(..., check=True)`: runs the first call of a network on one device as well, and compares both results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.report import Report
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.tensor_slice import TensorSlice

Array = NDArray[Any]

TOLERANCE, TOLERANCE_OF_HALF = 1e-4, 1e-2
"""Tolerances, relative to the largest element of a tensor, or to a hundredth of the largest element of tensors of the
same kind: a tensor that is zero but for rounding may differ by that."""
NO_GRADIENT = 1e-3
"""Fraction of the largest gradient. Steps of weights with a smaller gradient are not compared: Adam moves these as far
as any other weight, in a direction determined by rounding."""
SHOWN = 8
CALL = "auto_parallel(..., check=True)"


class Comparison:
    """Calls Cells on one device, on every rank, and under the mesh, and compares the results.

    Args:
        cell: Cell with all parameters that the calls use; they are initialized if necessary.
        alone: its equivalent for one device; None: a function, which uses the parameters of `cell`.
        report: report of the parallel network in it.

    Raises:
        ConfigError: the results of one device and several are not comparable.
    """

    def __init__(self, cell: nn.Cell, alone: nn.Cell | None, engine: Engine, report: Report):
        self.engine, self.report = engine, report
        for _, part in cell.cells_and_names():
            if isinstance(part, nn.Dropout) and part.training and (part.p or 0.0) > 0.0:
                raise ConfigError(f"{CALL}: ranks draw dropout for themselves: give it p=0.0 for that")
            held = [getattr(part, "dtype", None), *(p.dtype for p in part.get_parameters(expand=False))]
            if ms.bfloat16 in held or part.get_flags().get("bf16"):
                raise ConfigError(f"{CALL}: one CPU does not compute in bfloat16: check in float32")
        self.parameters = {p.name: p for p in cell.get_parameters()}
        self.whole = self._whole_values()
        self.alone = _twin(alone) if alone else cell
        """A copy with its own parameters if `alone` is given, because MindSpore mixes up its records of a Cell on
        several devices."""
        self.its_own = {p.name: p for p in self.alone.get_parameters()}
        self.gradients: dict[str, Array] = {}
        """Full gradients of weights on one device."""
        self.differences: list[tuple[float, str]] = []

    def of(
        self, alone: Callable[[], Any], together: Callable[[], Any], weights: Sequence[Sequence[Parameter]], keeps: bool
    ) -> Any:
        """The result of `together`, after it was compared with that of `alone` from the same state.

        Args:
            weights: lists of weights: outputs that match a list one to one are the gradients of its weights.
            keeps: whether to compare and keep the state after `together`; otherwise the state is restored.
        """
        parts = {name: p.asnumpy().copy() for name, p in self.parameters.items() if p.sliced}
        _set(self.its_own, self.whole)
        reference = alone()
        after = {name: p.asnumpy().copy() for name, p in self.its_own.items()}
        _set(self.parameters, {**self.whole, **parts})
        given = together()
        self._compare_outputs(reference, given, weights)
        if keeps:
            self._compare_state(after)
        else:
            _set(
                self.parameters,
                {name: value[self._own_slice(name, value).slices] for name, value in self.whole.items()},
            )
        return given

    def raise_if_different(self) -> None:
        """Report differences.

        Raises:
            ConfigError: results differ on some rank; raised on all ranks.
        """
        found = [text for _, text in sorted(self.differences, reverse=True)]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        problem = (
            f"{self.engine.strategy.source}: on rank {self.engine.rank} of the mesh {self.engine.strategy.mesh} this is not "
            f"what one device computes: {'; '.join(found[:SHOWN])}{more}"
        )
        self.engine.backend.agree([problem] if found else [])

    def _whole_values(self) -> dict[str, Array]:
        """Full values of all parameters, assembled from the ranks that hold the shards."""
        parameters, engine = self.parameters, self.engine
        engine.backend.bring_up_to_date()
        for parameter in parameters.values():
            if not parameter.sliced:
                parameter.init_data()
        values = {name: p.asnumpy().copy() for name, p in parameters.items()}
        if not engine.max_over_ranks(int(any(p.sliced for p in parameters.values()))):
            return values
        own = dict(values)
        for source in range(engine.strategy.mesh.size):
            places = engine.broadcast_value(self._places(), source)
            for name, (start, local_shape, dtype) in places.items():
                local = own[name] if engine.rank == source else np.zeros(local_shape, dtype)
                shard, shape = engine.broadcast(local, source), self.report.of(name).global_shape
                if values[name].shape != shape:
                    values[name] = np.zeros(shape, dtype)
                values[name][TensorSlice(tuple(start), tuple(local_shape)).slices] = shard
        return values

    def _places(self) -> dict[str, Any]:
        """Start, shape and dtype of the shards that this rank contributes."""
        places = {}
        for name, parameter in self.parameters.items():
            if not parameter.sliced:
                continue  # still unsharded, whatever another network with that name has
            said = self.report.by_name.get(name) or self.report.by_name.get(name.partition(".")[2])
            if said and (part := self.engine.slice_to_write(name, said)) is not None:
                places[name] = part.start, part.shape, np.dtype(parameter.asnumpy().dtype).name
        return places

    def _own_slice(self, name: str, whole: Array) -> TensorSlice:
        return self.engine.held_slice(name, whole.shape) or TensorSlice.full(whole.shape)

    def _compare_outputs(self, reference: Any, given: Any, weights: Sequence[Sequence[Parameter]]) -> None:
        pairs = list(self._pairs(reference, given, weights, "the output"))
        gradients = {name: whole for name, whole, _ in pairs if name in self.parameters}
        self.gradients |= gradients
        largest = max((_largest(each) for each in gradients.values()), default=0.0)
        for name, whole, own in pairs:
            if name in self.parameters:
                slices = self._own_slice(name, whole).slices if own.shape != whole.shape else ...
                self._compare(f"the gradient of {name}", whole[slices], own, 0.01 * largest)
            else:
                self._compare(name, whole, own)

    def _pairs(
        self, reference: Any, given: Any, weights: Sequence[Sequence[Parameter]], name: str
    ) -> Iterator[tuple[str, Array, Array]]:
        """Name and both values of each tensor in two results; a gradient has the name of its weight."""
        if isinstance(reference, Tensor):
            yield name, _array(reference), _array(given)
        elif isinstance(reference, (list, tuple)):
            shapes = [each.shape if isinstance(each, Tensor) else None for each in reference]
            whole = self.whole
            of = next((w for w in weights if w and [whole[p.name].shape for p in w if p.name in whole] == shapes), None)
            for place, (one, other) in enumerate(zip(reference, given, strict=True)):
                yield from self._pairs(one, other, weights, of[place].name if of else f"{name}[{place}]")

    def _compare_state(self, after: Mapping[str, Array]) -> None:
        """Compare the updates of the parameters."""
        moved = {name: value.astype(np.float64) - self.whole[name] for name, value in after.items()}
        largest = max((_largest(each) for each in moved.values()), default=0.0)
        steepest = max((_largest(each) for each in self.gradients.values()), default=0.0)
        for name, change in moved.items():
            if not self.engine.holds_now(self.parameters[name], change.shape):
                continue  # another stage holds it
            slices, value = self._own_slice(name, change).slices, self.parameters[name].asnumpy()
            own, change = value.astype(np.float64) - self.whole[name][slices], change[slices]
            if name in self.gradients:
                gradient = np.abs(self.gradients[name][slices])
                bound = NO_GRADIENT * max(_largest(self.gradients[name]), 0.01 * steepest)
                own = np.where(gradient > bound, own, change)
            rounding = 4 * float(np.finfo(value.dtype).eps) * _largest(value) if value.dtype.kind == "f" else 0.0
            self._compare(f"the step of {name}", change, own, 0.01 * largest, rounding, value.dtype.itemsize == 2)

    def _compare(
        self, what: str, whole: Array, own: Array, beside: float = 0.0, rounding: float = 0.0, half: bool = False
    ) -> None:
        if whole.shape != own.shape:
            self.differences.append((math.inf, f"{what} has the shape {own.shape} instead of {whole.shape}"))
        elif own.size:
            scale = max(_largest(whole), beside)
            tolerance = (TOLERANCE_OF_HALF if half or own.dtype.itemsize == 2 else TOLERANCE) * scale + rounding
            both = np.isnan(own) & np.isnan(whole)
            away = np.where(both, 0.0, np.nan_to_num(np.abs(own.astype(np.float64) - whole), nan=math.inf))
            place = np.unravel_index(int(np.argmax(away)), away.shape)
            if away[place] > tolerance:
                at = f" at {list(map(int, place))}" if place else ""
                off = f"{what}{at} is {own[place]:.6g} instead of {whole[place]:.6g}"
                self.differences.append((float(away[place]) / (scale or 1.0), off))


def _twin(cell: nn.Cell) -> nn.Cell:
    """A copy with its own parameters; operators and other attributes are shared."""
    shared: dict[int, Any] = {}
    for _, part in cell.cells_and_names():
        values = list(vars(part).values())
        for held in [value for value in values if isinstance(value, (dict, list, tuple))]:
            values += held.values() if isinstance(held, dict) else held
        shared |= {id(v): v for v in values if not isinstance(v, (nn.Cell, Parameter, dict, list, tuple))}
    twin: nn.Cell = copy.deepcopy(cell, shared)
    return twin


def _set(parameters: Mapping[str, Parameter], values: Mapping[str, Array]) -> None:
    for name, value in values.items():
        if name in parameters:
            parameter, same = parameters[name], parameters[name].shape == value.shape
            # A parameter that is not sliced yet must not be marked as such: it would be taken for a shard.
            parameter.set_data(Tensor(value.copy(), dtype=parameter.dtype), slice_shape=parameter.sliced or not same)


def _largest(array: Array) -> float:
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return float(np.abs(finite.astype(np.float64)).max(initial=0.0))


def _array(tensor: Tensor) -> Array:
    return (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
