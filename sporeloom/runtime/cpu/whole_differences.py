# SPDX-License-Identifier: Apache-2.0
"""Find the first value in which a recording differs from one of another mesh or program, or from what a reference computed.

Other meshes add up in another order, so values are compared within a tolerance, put together from the parts of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.recording import Array, Recording
from sporeloom.runtime.cpu.whole_values import WholeStep, WholeValue

TOLERANCE = 1e-4
"""Fraction of the largest number of a tensor, or of a hundredth of that of tensors of the same kind."""
FLOOR = 0.01
BACKWARD = ", backward"
PARAMETER = "parameter "
DRIFT = 100
"""Single numbers of a parameter may differ by this many times the tolerance, if the root mean square of all differences is
within it: where a gradient was once near 0, Adam moved a weight in a direction determined by rounding."""
SQUARES = "adam_v."
"""Beginning of the names of the averages of squared gradients."""
NO_GRADIENT = 1e-3
"""Fraction of the largest gradient. Weights whose gradients have been smaller are not compared: all steps of these were in
such directions."""


@dataclass(frozen=True)
class Equal:
    """Two steps without a difference."""

    num_parameters: int
    num_values: int
    """Inputs and results of operators that were compared."""
    num_others: int
    """Results of operators that only one of both has, or in shapes that do not fit."""

    def __str__(self) -> str:
        others = f"; {self.num_others} results are only in one of them" if self.num_others else ""
        return f"{self.num_parameters} parameters and {self.num_values} results of operators are equal{others}"


def first_difference_of_wholes(a: Recording, b: Recording, step: int, tolerance: float) -> str | Equal:
    """The first difference of a step of two recordings, as a line, in the order of one device's graph.

    Raises:
        ConfigError: the recordings are of different networks.
    """
    one, other = WholeStep.of(a, step), WholeStep.of(b, step)
    if one.before.keys() != other.before.keys():
        name = min(one.before.keys() ^ other.before.keys())
        has, lacks = (a, b) if name in one.before else (b, a)
        raise ConfigError(
            f"{lacks.run}: has no parameter {name}, {has.run} has it; give two runs of one network and optimizer"
        )
    shapes = {name: [list(each.before[name].parts[0].shape) for each in (one, other)] for name in one.before}
    for name, (mine, theirs) in shapes.items():
        if mine != theirs:
            raise ConfigError(
                f"{b.run}: parameter {name} is {theirs}, in {a.run} {mine}; give two runs of one network and optimizer"
            )
    return compared(one, other, tolerance)


def compared(one: WholeStep, other: WholeStep, tolerance: float) -> str | Equal:
    """The first difference of two steps, as a line."""
    counts = [0, 0, 0]
    groups = (one.before, other.before), (one.computed, other.computed), (one.after, other.after)
    for number, (mine, theirs) in enumerate(groups):
        scales, small = _scales(mine), _squares_of_small_gradients(mine)
        both = sorted(((mine[key], theirs[key]) for key in mine.keys() & theirs.keys()), key=_order)
        counts[number] = len(both)
        for x, y in both:
            squares = mine.get(SQUARES + x.name)
            moved = None if squares is None else squares.parts[0] >= small
            if found := _of_value(x, y, scales[_kind(x)], tolerance, moved):
                return found
            counts[number] -= found is None
            for value, run in ((x, "a"), (y, "b")):
                if value.differing is not None:
                    return _line(value, f"rank {value.differing} of {run}", "of which other ranks have other numbers")
    in_one = len(one.computed.keys() | other.computed.keys()) - counts[1]
    return Equal(counts[0], counts[1], in_one)


def _order(pair: tuple[WholeValue, WholeValue]) -> tuple[int, str]:
    return pair[0].order, pair[0].place


def _line(value: WholeValue, ranks: str, what: str) -> str:
    return f"{ranks}: {value.place}, tensor {value.name}, {what}"


def _kind(value: WholeValue) -> str:
    """Gradients, parameters of the same prefix, or, empty, results of the forward pass."""
    if value.place.startswith(PARAMETER):
        return value.name.partition(".")[0]
    return BACKWARD if value.place.endswith(BACKWARD) else ""


def _squares_of_small_gradients(values: Mapping[str, WholeValue]) -> float:
    squares = [_largest(part) for name, value in values.items() if name.startswith(SQUARES) for part in value.parts]
    return NO_GRADIENT**2 * max(squares, default=0.0)


def _scales(values: Mapping[str, WholeValue]) -> dict[str, float]:
    """Numbers that are compared with the largest one of a tensor, by the kind of the tensor. Of the forward pass it is from
    the median tensor: masks are of other sizes than activations."""
    largest: dict[str, list[float]] = {}
    for value in values.values():
        largest.setdefault(_kind(value), []).append(max((_largest(part) for part in value.parts), default=0.0))
    return {kind: FLOOR * (max(found) if kind else float(np.median(found))) for kind, found in largest.items()}


def _largest(array: Array) -> float:
    finite = array[np.isfinite(array)] if array.dtype.kind not in "iub" else array
    return float(np.abs(finite.astype(np.float64)).max(initial=0.0))


def _root_mean_square(array: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def _of_value(
    x: WholeValue, y: WholeValue, scale: float, tolerance: float, moved: NDArray[np.bool_] | None = None
) -> str | None:
    """The difference of a value, as a line; empty: there is none; None: its shapes do not fit. Of a weight only numbers that
    `moved` are compared."""
    line = None
    for mine, theirs, dim in _joined(x.parts, y.parts):
        allowed = 0.0 if mine.dtype.kind in "iub" else tolerance * max(_largest(mine), scale)
        allowed *= DRIFT if (is_parameter := x.place.startswith(PARAMETER)) else 1
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if moved is not None and moved.shape == same.shape:
            same |= ~moved
        with np.errstate(invalid="ignore"):
            away = np.where(same, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
        is_drift = not is_parameter or _root_mean_square(away) <= tolerance * max(_root_mean_square(a), scale)
        if is_drift and not (away > allowed).any():
            return ""
        at = tuple(map(int, np.unravel_index(int(np.argmax(away)), away.shape)))
        ranks = f"{_ranks(y, at, dim, 'b')} ({_ranks(x, at, dim, 'a')})" if y.owners else _ranks(x, at, dim, "a")
        place = f"at {list(at)} {theirs[at]:.6g} instead of {mine[at]:.6g}"
        line = line or _line(y if y.owners else x, ranks, f"{place}; the largest number is {_largest(mine):.3g}")
    return line


def _joined(x: list[Array], y: list[Array]) -> Iterator[tuple[Array, Array, int | None]]:
    """The parts of microbatches as whole values, in each way in which they may be parts, and the dim along which."""
    a, b = x[0].shape, y[0].shape
    if a == b and len(x) == len(y):
        yield (x[0], y[0], None) if len(x) == 1 else (np.stack(x), np.stack(y), 0)
    elif a == b:
        yield sum(x[1:], x[0]), sum(y[1:], y[0]), None
        yield np.max(x, axis=0), np.max(y, axis=0), None
    elif len(a) == len(b):
        dims = [dim for dim, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]
        if len(dims) == 1 and a[dims[0]] * len(x) == b[dims[0]] * len(y):
            yield np.concatenate(x, dims[0]), np.concatenate(y, dims[0]), dims[0]


def _ranks(value: WholeValue, at: tuple[int, ...], dim: int | None, run: str) -> str:
    """The ranks with the part of a value in which an entry of the joined value is."""
    shape = value.parts[0].shape
    place = list(at)
    if len(at) > len(shape):
        place = place[1:]
    elif dim is not None:
        place[dim] %= shape[dim]
    holders = [
        str(rank)
        for rank, where in sorted(value.owners, key=lambda each: each[0])
        if rank != value.differing
        and all(first <= p < end for first, p, end in zip(where.start, place, where.stop, strict=True))
    ]
    return f"rank{'s' if len(holders) > 1 else ''} {', '.join(dict.fromkeys(holders))} of {run}"
