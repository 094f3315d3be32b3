# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose matrices are orthogonalized by Newton-Schulz iterations; AdamW updates everything else.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; sizes of updates arXiv:2502.16982; parts of fused
matrices Megatron-Core 0.16 optimizer/muon.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.strategy.flags import StateDtype
from sporeloom.train.flags import MuonIteration, MuonScale
from sporeloom.train.groups import Scales
from sporeloom.train.narrow_states import Rounding, adamw, narrow_states

Phase = tuple[tuple[float, float, float], int]
"""Coefficients of an iteration, and the number of iterations with them."""
QUINTIC: Phase = ((3.4445, -4.7750, 2.0315), 5)
ITERATIONS: dict[MuonIteration, tuple[Phase, ...]] = {
    "quintic": (QUINTIC,),
    "two-phase": ((QUINTIC[0], 8), ((2.0, -1.5, 0.5), 2)),  # DeepSeek-V4's
}


def size_factor(kind: MuonScale, factor: float, rows: int, columns: int) -> float:
    """Factor of an orthogonalized update of this shape, before the learning rate."""
    if kind == "spectral":
        return factor * math.sqrt(max(rows, columns))
    return factor * math.sqrt(max(1.0, rows / columns) if kind == "shape" else rows / columns)


@dataclass(frozen=True)
class RowSplit:
    """Parts of the rows of a fused matrix, each of which is orthogonalized by itself.

    `blocks`: consecutive parts with these numbers of rows, as gate and up. `periodic`: groups of sum(parts) rows; a part has
    its rows of all groups, as queries, keys and values of each key-value group.
    """

    kind: Literal["blocks", "periodic"]
    parts: tuple[int, ...]

    def check(self, name: str, rows: int) -> None:
        """Raises:
        ValueError: the parts do not make up the rows.
        """
        total = sum(self.parts)
        if min(self.parts, default=0) < 1 or (rows % total if self.kind == "periodic" else rows != total):
            raise ValueError(f"{name}: {rows} rows are not made of {self.kind} parts of {self.parts} rows")


class Orthogonalizer(nn.Cell):
    """Update of one parameter -> the orthogonalized update, scaled; (..., rows, columns), leading dims are matrices."""

    def __init__(
        self,
        shape: tuple[int, ...],
        phases: tuple[Phase, ...],
        epsilon: float,
        scale: Callable[[int, int], float],
        split: RowSplit | None,
        dtype: Any,
    ):
        super().__init__(auto_prefix=False)
        rows, self.columns = shape[-2:]
        self.shape, self.epsilon, self.lead = shape, Tensor(epsilon, dtype), len(shape) - 2
        # Tensors, as MindSpore rounds plain numbers to float32.
        self.coefficients = tuple(
            tuple(Tensor(number, dtype) for number in numbers) for numbers, count in phases for _ in range(count)
        )
        periodic = split is not None and split.kind == "periodic"
        parts = (rows,) if split is None else split.parts
        self.groups = rows // sum(parts)
        self.is_split, self.is_grouped = len(parts) > 1, periodic and self.groups > 1
        self.bounds = tuple(pairwise(accumulate(parts, initial=0)))
        self.rows = tuple(part * self.groups for part in parts)
        self.scales = tuple(Tensor(scale(count, self.columns), dtype) for count in self.rows)
        product = ops.BatchMatMul if self.lead else ops.MatMul
        self.matmul, self.times_transposed, self.transposed_times = (
            product(),
            product(transpose_b=True),
            product(transpose_a=True),
        )
        self.sum, self.concat = ops.ReduceSum(keep_dims=True), ops.Concat(self.lead)

    def construct(self, update):
        if not self.is_split:
            return self.orthogonal(update, self.rows[0]) * self.scales[0]
        lead = self.shape[: self.lead]
        if self.is_grouped:
            update = ops.reshape(update, (*lead, self.groups, -1, self.columns))
        found = ()
        for i in range(len(self.bounds)):
            part = self.rows_of(update, self.bounds[i])
            part = ops.reshape(part, (*lead, self.rows[i], self.columns))
            part = self.orthogonal(part, self.rows[i]) * self.scales[i]
            if self.is_grouped:
                part = ops.reshape(part, (*lead, self.groups, self.rows[i] // self.groups, self.columns))
            found = (*found, part)
        joined = ops.Concat(self.lead + 1)(found) if self.is_grouped else self.concat(found)
        return ops.reshape(joined, self.shape)

    def rows_of(self, update, bounds):
        """Rows of a part, of each group where there are several."""
        start, stop = bounds
        if self.lead and self.is_grouped:
            return update[:, :, start:stop]
        if self.lead or self.is_grouped:
            return update[:, start:stop]
        return update[start:stop]

    def orthogonal(self, x, rows):
        """Approach U V^T of the singular value decomposition, one matrix at a time."""
        square = self.sum(ops.square(x), (self.lead, self.lead + 1))
        x = x / ops.maximum(ops.sqrt(square), self.epsilon)
        for a, b, c in self.coefficients:
            if rows > self.columns:  # the same polynomial, from the side with the smaller product
                gram = self.transposed_times(x, x)
                x = a * x + self.matmul(x, b * gram + c * self.matmul(gram, gram))
            else:
                gram = self.times_transposed(x, x)
                x = a * x + self.matmul(b * gram + c * self.matmul(gram, gram), x)
        return x


class Muon(nn.Cell):
    """m = mu m + g; u = g + mu m with Nesterov momentum, else m; p = p (1 - lr wd) - lr size O(u).

    O orthogonalizes each matrix, each expert and each part of a fused matrix by itself, so that an update does not depend on
    the mesh. The other parameters have AdamW with bias correction. Momenta are `adam_m` in checkpoints, as Adam's are; only
    AdamW's parameters have `adam_v`.

    Args:
        is_muon: whether Muon updates a parameter, by its name and shape.
        splits: rows of fused matrices by parameter name.
        adam_rate_factor: times the learning rate for AdamW's parameters.
        scales: learning rate factor and weight decay of each parameter, where groups of them have their own.
        state_dtype: number type of momenta and moments.

    Raises:
        ValueError: a split that does not fit its matrix.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        is_muon: Callable[[str, tuple[int, ...]], bool],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        phases: tuple[Phase, ...] = ITERATIONS["quintic"],
        epsilon: float = 1e-7,
        scale: MuonScale = "spectral",
        scale_factor: float = 0.2,
        weight_decay: float = 0.1,
        splits: Mapping[str, RowSplit] | None = None,
        adam_rate_factor: float = 1.0,
        beta1: float = 0.95,
        beta2: float = 0.95,
        adam_epsilon: float = 1e-8,
        scales: Scales | None = None,
        state_dtype: StateDtype = "float32",
    ):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        chosen = [is_muon(parameter.name, tuple(parameter.shape)) for parameter in parameters]
        self.muon_places = tuple(i for i, is_it in enumerate(chosen) if is_it)
        self.adam_places = tuple(i for i, is_it in enumerate(chosen) if not is_it)
        self.matrices = ParameterTuple([parameters[i] for i in self.muon_places])
        self.is_narrow = state_dtype == "bfloat16"
        if self.is_narrow:
            self.momenta, self.dtype = narrow_states(self.matrices, "adam_m"), mstype.bfloat16
            self.rounding = Rounding(self.matrices, "muon_rounding")
        else:
            self.momenta = self.matrices.clone(prefix="adam_m", init="zeros")
        for state in self.momenta:
            state.requires_grad = False
        others = [parameters[i] for i in self.adam_places]
        of_adam = scales.of(self.adam_places) if scales else None
        adam: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "epsilon": adam_epsilon, "weight_decay": weight_decay}
        self.adam = adamw(others, state_dtype, **adam, bias_correction=True, scales=of_adam) if others else None
        self.nesterov, self.weight_decay, self.adam_rate_factor = nesterov, weight_decay, adam_rate_factor
        dtype = self.matrices[0].dtype if self.muon_places else mstype.float32
        self.momentum = Tensor(momentum, dtype)
        self.rate = Parameter(Tensor(0.0, dtype), name="optimizer_muon_rate", requires_grad=False)
        self.decay = Parameter(Tensor(0.0, dtype), name="optimizer_muon_decay", requires_grad=False)
        cells = []
        for parameter in self.matrices:
            shape, split = tuple(parameter.shape), (splits or {}).get(parameter.name)
            if split:
                split.check(parameter.name, shape[-2])
            cells.append(
                Orthogonalizer(shape, phases, epsilon, partial(size_factor, scale, scale_factor), split, dtype)
            )
        self.orthogonalizers = nn.CellList(cells)
        self.is_grouped = scales is not None
        if scales is not None:
            own = scales.of(self.muon_places)
            decays = own.decays_or([weight_decay] * len(self.muon_places))
            self.factors = tuple(Tensor(factor, dtype) for factor in own.factors)
            self.decays = tuple(Tensor(d * f, dtype) for d, f in zip(decays, own.factors, strict=True))
        self.assign, self.assign_sub, self.cast = ops.Assign(), ops.AssignSub(), ops.Cast()

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        self.rate.set_data(Tensor(learning_rate, self.rate.dtype))
        decay = learning_rate * (1.0 if self.is_grouped else self.weight_decay)
        self.decay.set_data(Tensor(decay, self.decay.dtype))
        if self.is_narrow:
            self.rounding.prepare(update)
        if self.adam:
            self.adam.prepare(update, learning_rate * self.adam_rate_factor)

    def construct(self, gradients, overflow=None):
        """With `overflow`, a bool that the gradients, then all 0, were not finite, nothing changes where it is true."""
        rate, decay, momentum = self.rate, self.decay, self.momentum
        if overflow is not None:
            rate, decay = ops.masked_fill(rate, overflow, 0.0), ops.masked_fill(decay, overflow, 0.0)
            momentum = ops.masked_fill(momentum, overflow, 1.0)
        done = ()
        for i in range(len(self.muon_places)):
            gradient, weight = gradients[self.muon_places[i]], self.matrices[i]
            if self.is_narrow:
                state = momentum * self.cast(self.momenta[i], mstype.float32) + gradient
                done = (*done, self.assign(self.momenta[i], self.rounding(state, i, 0)))
            else:
                state = self.assign(self.momenta[i], momentum * self.momenta[i] + gradient)
            used = gradient + momentum * state if self.nesterov else state
            if self.is_grouped:
                update = self.factors[i] * rate * self.orthogonalizers[i](used)
                step = update + self.decays[i] * decay * weight
            else:
                step = rate * self.orthogonalizers[i](used) + decay * weight
            done = (*done, self.assign_sub(weight, step))
        if self.adam is not None:
            others = ()
            for place in self.adam_places:
                others = (*others, gradients[place])
            updated = self.adam(others) if overflow is None else self.adam(others, overflow)
            done = (*done, updated)
        return done
