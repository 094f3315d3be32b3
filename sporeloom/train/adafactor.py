# SPDX-License-Identifier: Apache-2.0
"""Adafactor: steps relative to the size of each parameter, with a full or a factored second moment.

Source: arXiv:1804.04235; as PaLM used it arXiv:2204.02311 section 5; order of operations of T5X's implementation.
"""

from __future__ import annotations

import math

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.parallel.step import square_sum
from sporeloom.train.groups import Scales
from sporeloom.train.optim import optimizer_number, set_number

_precondition = ops.MultitypeFuncGraph("precondition")
_precondition_factored = ops.MultitypeFuncGraph("precondition_factored")
_update = ops.MultitypeFuncGraph("update")
_placed_square_sum = ops.MultitypeFuncGraph("placed_square_sum")


@_placed_square_sum.register("Float", "Tensor", "Tensor")
def _square_sum_at_its_place(share, place, x):
    return square_sum(share, x) * place


@_precondition.register("Tensor", "Float", "Tensor", "Tensor")
def _whole_moment(beta2, epsilon, moment, gradient):
    """Update the second moment, and divide the gradient by its square root."""
    squared = ops.square(gradient) + epsilon
    moment = ops.assign(moment, beta2 * moment + (1.0 - beta2) * squared)
    return gradient * ops.rsqrt(moment)


@_precondition_factored.register("Tensor", "Float", "Tensor", "Tensor", "Tensor", "Tensor")
def _factored_moment(beta2, epsilon, moment, rows, columns, gradient):
    """The same with a moment that is the product of its rows' and columns' means; that of vectors is not factored."""
    if gradient.ndim < 2:
        return _whole_moment(beta2, epsilon, moment, gradient)
    squared = ops.square(gradient) + epsilon
    rows = ops.assign(rows, beta2 * rows + (1.0 - beta2) * ops.ReduceMean()(squared, 1))
    columns = ops.assign(columns, beta2 * columns + (1.0 - beta2) * ops.ReduceMean()(squared, 0))
    by_row = ops.rsqrt(rows / ops.ReduceMean()(rows, 0))
    return gradient * ops.expand_dims(by_row, 1) * ops.expand_dims(ops.rsqrt(columns), 0)


@_update.register(
    *("Tensor", "Tensor", "Tensor", "Tensor", "Float", "Float", "Float", "Float"),
    *("Tensor", "Tensor", "Tensor", "Tensor"),
)
def _one_update(rate, decay, weight_sums, step_sums, beta1, least_size, clip, count, place, weight, moment, step):
    weight_sum, step_sum = ops.ReduceSum()(weight_sums * place, 0), ops.ReduceSum()(step_sums * place, 0)
    size = ops.maximum(ops.sqrt(weight_sum / count), Tensor(least_size, mstype.float32))
    too_long = ops.maximum(ops.sqrt(step_sum / count) / clip, Tensor(1.0, mstype.float32))
    moment = ops.assign(moment, beta1 * moment + (1.0 - beta1) * (rate * size / too_long) * step)
    return ops.assign_sub(weight, moment + decay * weight)


@_update.register(
    *("Tensor", "Tensor", "Tensor", "Tensor", "Float", "Float", "Float", "Float", "Float", "Float"),
    *("Tensor", "Tensor", "Tensor", "Tensor"),
)
def _grouped_update(
    rate, decay, weight_sums, step_sums, beta1, least_size, clip, factor, own_decay, count, place, weight, moment, step
):
    scaled = (rate * factor, decay * own_decay, weight_sums, step_sums)
    return _one_update(*scaled, beta1, least_size, clip, count, place, weight, moment, step)


class Adafactor(nn.Cell):
    """p -= m + decay p, where m follows rate * max(RMS(p), 1e-3) * u and u is the gradient over the root of its second
    moment, shortened to RMS(u) <= 1.

    The second moment decays with 1 - step^-0.8. RMS is of the whole parameter, wherever its parts are: their square sums are
    added up over all ranks. The moments are `adam_m` and `adam_v` in checkpoints, as Adam's.

    Args:
        shares: how much of each parameter's square sum this rank adds (`Report.norm_shares`); None: all of it.
        all_reduce: adds numbers up over all ranks; None on one device.
        factored: keep the second moment of a matrix as the means of its rows and columns. Needs unsharded matrices.
        weight_decay: times the square of the rate; PaLM's is 1.
        scales: learning rate factor and weight decay of each parameter, where groups of them have their own.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        shares: tuple[float, ...] | None = None,
        all_reduce: nn.Cell | None = None,
        factored: bool = False,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
        scales: Scales | None = None,
    ):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.moments1 = self.parameters.clone(prefix="adam_m", init="zeros")
        self.factored = factored
        if factored:
            self.moments2, self.rows, self.columns = _factored_state(parameters)
        else:
            self.moments2 = self.parameters.clone(prefix="adam_v", init="zeros")
        for state in (*self.moments1, *self.moments2):
            state.requires_grad = False
        self.shares = shares or (1.0,) * len(parameters)
        self.counts = tuple(float(math.prod(parameter.shape)) for parameter in parameters)
        self.all_reduce, self.beta1, self.weight_decay = all_reduce, beta1, weight_decay
        self.is_grouped = scales is not None
        if scales is not None:  # the decay is times the square of the parameter's own rate
            own = scales.decays_or([weight_decay] * len(parameters))
            self.factors = scales.factors
            self.decays = tuple(decay * factor**2 for decay, factor in zip(own, scales.factors, strict=True))
        self.rate, self.decay = optimizer_number("rate"), optimizer_number("decay")
        self.beta2 = optimizer_number("beta2")
        # One vector of all sums, in one message. A pipeline's stage has some of the parameters only, and MindSpore takes the
        # others out of every tuple: a place is a number times a vector, which may be missing.
        self.places = tuple(Tensor(row) for row in np.eye(len(parameters), dtype=np.float32))
        self.map, self.add_n = ops.HyperMap(), ops.AddN()

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        set_number(self.rate, learning_rate)
        set_number(self.decay, (1.0 if self.is_grouped else self.weight_decay) * learning_rate**2)
        set_number(self.beta2, 1.0 - update**-0.8)

    def construct(self, gradients):
        weight_sums = self.summed(self.parameters)
        if self.factored:
            precondition = ops.partial(_precondition_factored, self.beta2, 1e-30)
            steps = self.map(precondition, self.moments2, self.rows, self.columns, gradients)
        else:
            steps = self.map(ops.partial(_precondition, self.beta2, 1e-30), self.moments2, gradients)
        step_sums = self.summed(steps)
        update = ops.partial(_update, self.rate, self.decay, weight_sums, step_sums, self.beta1, 1e-3, 1.0)
        if self.is_grouped:
            states = (self.parameters, self.moments1, steps)
            return self.map(update, self.factors, self.decays, self.counts, self.places, *states)
        return self.map(update, self.counts, self.places, self.parameters, self.moments1, steps)

    def summed(self, tensors):
        """Square sums of the global tensors, (N,)."""
        sums = self.add_n(self.map(_placed_square_sum, self.shares, self.places, tensors))
        return sums if self.all_reduce is None else self.all_reduce(sums)


def _factored_state(parameters):
    """Second moments of vectors, and means of rows and columns of matrices; each has one zero where it does not
    apply."""
    moments: list[Parameter] = []
    rows: list[Parameter] = []
    columns: list[Parameter] = []
    for parameter in parameters:
        is_matrix = len(parameter.shape) > 1
        for found, shape, prefix in (
            (moments, (1,) if is_matrix else parameter.shape, "adam_v"),
            (rows, parameter.shape[:1] if is_matrix else (1,), "adafactor_rows"),
            (columns, parameter.shape[1:] if is_matrix else (1,), "adafactor_columns"),
        ):
            zeros = Tensor(0.0, mstype.float32).broadcast_to(shape)
            found.append(Parameter(zeros, name=f"{prefix}.{parameter.name}", requires_grad=False))
    return ParameterTuple(moments), ParameterTuple(rows), ParameterTuple(columns)
