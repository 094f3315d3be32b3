# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in bfloat16: updates are computed in float32, and the new states rounded stochastically.

Rounding to nearest stalls them. bfloat16 has 8 significant bits: a moment that changes by less than 2^-9 to 2^-8 of itself in
a step stays as it is. With beta2 = 0.999 a step shrinks v by 0.1 % at most, so that v could never decrease. DeepSeek-V3
(arXiv:2412.19437, section 3.3) keeps both moments in bfloat16 with beta2 = 0.95, where this is a few percent of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.strategy.flags import StateDtype
from sporeloom.train.optim import AdamW, optimizer_number, set_number

STREAM = 0x5B0F
"""Key of the random numbers, which depend on it and the number of the update alone."""
NEIGHBOUR = 0.6 / 128
"""Times a bfloat16 number: 0.6 to 1.2 spacings of the numbers around it, which leads to the next one after rounding."""
GOLDEN = (5**0.5 - 1) / 2
_cast, _assign, _assign_sub = ops.Cast(), ops.Assign(), ops.AssignSub()


def narrow_states(parameters: Sequence[Parameter], prefix: str) -> ParameterTuple:
    """Create a bfloat16 state of zeros for each parameter."""
    return ParameterTuple(
        Parameter(initializer("zeros", p.shape, mstype.bfloat16), name=f"{prefix}.{p.name}", requires_grad=False)
        for p in parameters
    )


def position_offsets(shape: tuple[int, ...], cache: dict[tuple[int, int], Tensor]) -> tuple[Tensor, ...]:
    """Offsets in [0, 1) of the positions along each dim, broadcast over the others.

    The sum of those of a position, modulo 1, is spread evenly over a tensor, as an additive recurrence is.

    Args:
        cache: tensors by size and number of the dims from there on, to be shared.
    """
    found = []
    for dim, size in enumerate(shape):
        following = len(shape) - dim
        if (size, following) not in cache:
            ratio = 1.5
            for _ in range(64):  # the root of x^(n + 1) = x + 1, whose powers are far from rational
                ratio = (1.0 + ratio) ** (1.0 / (1 + following))
            offsets = np.arange(1, size + 1) / ratio % 1.0
            cache[size, following] = Tensor(offsets.reshape(-1, *[1] * (following - 1)), mstype.float32)
        found.append(cache[size, following])
    return tuple(found)


class Rounding(nn.Cell):
    """Rounds float32 states to bfloat16, up or down with probabilities whose mean is the state.

    The random numbers are a function of the update's number, the state and the position in it: they are the same on every
    mesh and after resume.
    """

    def __init__(self, parameters: Sequence[Parameter], name: str = "rounding"):
        super().__init__(auto_prefix=False)
        cache: dict[tuple[int, int], Tensor] = {}
        self.offsets = tuple(position_offsets(tuple(p.shape), cache) for p in parameters)
        self.phases = tuple((2 * i * GOLDEN % 1.0, (2 * i + 1) * GOLDEN % 1.0) for i in range(len(parameters)))
        self.number = optimizer_number(name)

    def prepare(self, update: int) -> None:
        """Set the random number of an update, counted from 1."""
        bits = np.random.Philox(key=STREAM, counter=update)
        set_number(self.number, float(np.random.Generator(bits).random()))

    def construct(self, x, i, moment):
        """Round `x`, the new state `moment` (0 or 1) of parameter `i`."""
        nearest = _cast(_cast(x, mstype.bfloat16), mstype.float32)
        error = x - nearest
        away = nearest + ops.sign(error) * ops.abs(nearest) * NEIGHBOUR
        other = _cast(_cast(away, mstype.bfloat16), mstype.float32)
        noise, number = nearest - nearest, ops.depend(self.number, x) + self.phases[i][moment]  # zeros, sharded as x is
        for offset in self.offsets[i]:
            noise, number = noise + (offset + number), 0.0
        noise = noise - ops.floor(noise)
        is_other = noise * ops.abs(other - nearest) < ops.abs(error)
        return _cast(ops.select(is_other, other, nearest), mstype.bfloat16)


class NarrowAdamW(AdamW):
    """AdamW whose moments are bfloat16."""

    def __init__(self, parameters: list[Parameter], *args: Any, **settings: Any):
        super().__init__(parameters, *args, **settings)
        self.dtype = mstype.bfloat16  # by which an engine knows what it needs kernels for
        self.rounding = Rounding(parameters)
        if not self.is_grouped:
            self.factors, self.decays = (1.0,) * len(parameters), tuple(map(float, self.decayed))

    def states(self, prefix: str) -> ParameterTuple:
        """Create a state of zeros for each parameter."""
        return narrow_states(self.parameters, prefix)

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        super().prepare(update, learning_rate)
        self.rounding.prepare(update)

    def construct(self, gradients, overflow=None):
        """With `overflow`, a bool that the gradients, then all 0, were not finite, nothing changes where it is true."""
        rate, beta1, beta2 = self.rate, self.beta1, self.beta2
        if overflow is not None:
            rate = ops.masked_fill(rate, overflow, 0.0)
            beta1 = ops.masked_fill(Tensor(beta1, mstype.float32), overflow, 1.0)
            beta2 = ops.masked_fill(Tensor(beta2, mstype.float32), overflow, 1.0)
        done = ()
        for i in range(len(self.parameters)):
            gradient, weight = gradients[i], self.parameters[i]
            if done:  # one parameter after another, so that the intermediate results of few are alive
                gradient = ops.depend(gradient, done[-3:])
            before1, before2 = ops.depend(self.moments1[i], gradient), ops.depend(self.moments2[i], gradient)
            moment1 = beta1 * _cast(before1, mstype.float32) + (1.0 - beta1) * gradient
            moment2 = beta2 * _cast(before2, mstype.float32) + (1.0 - beta2) * ops.square(gradient)
            step = moment1 / (ops.sqrt(moment2) + self.adapted_epsilon)
            if self.decays[i] != 0.0:
                step = step + ops.depend(weight, gradient) * (self.decay * self.decays[i])
            done = (*done, _assign(self.moments1[i], self.rounding(moment1, i, 0)))
            done = (*done, _assign(self.moments2[i], self.rounding(moment2, i, 1)))
            done = (*done, _assign_sub(weight, rate * self.factors[i] * step))
        return done


def adamw(parameters: list[Parameter], state_dtype: StateDtype, on_host: bool = False, **settings: Any) -> AdamW:
    """Create an AdamW with moments of a type; `settings` are those of `AdamW`. On the host they are float32."""
    if state_dtype == "bfloat16":
        return NarrowAdamW(parameters, **settings)
    return AdamW(parameters, on_host=on_host, **settings)
