# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in bfloat16: rounding whose mean is exact, and moments that follow those of float64."""

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.program import storage
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.train.narrow_states import NarrowAdamW, Rounding
from sporeloom.train.optim import AdamW

SHAPE = (24, 40)


def bfloat16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


class Rounded(nn.Cell):
    """Rounds its input, in float32 again."""

    dtype = ms.bfloat16

    def __init__(self, shape):
        super().__init__()
        self.rounding = Rounding([Parameter(Tensor(np.zeros(shape, np.float32)), name="weight")])

    def construct(self, x):
        return self.rounding(x, 0, 1).astype(ms.float32)


class Update(nn.Cell):
    """An optimizer, called with the gradient of its only parameter."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients)


@pytest.fixture(scope="module")
def engine():
    found = Engine.start(SINGLE_DEVICE)
    yield found
    found.close()


@pytest.mark.parametrize("shape", [SHAPE, (960,), (4, 12, 20)])
def test_rounding_leads_to_both_neighbours_and_its_mean_is_exact(engine, shape):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 4, shape)).astype(np.float32)
    x.flat[:3] = 1.0, -0.5, 0.0  # which bfloat16 has
    cell, total, num_steps = Rounded(shape), np.zeros(shape), 400
    nearest = bfloat16(x)
    for update in range(1, num_steps + 1):
        cell.rounding.prepare(update)
        found = engine.run(cell, Tensor(x)).asnumpy().astype(np.float64)
        np.testing.assert_array_equal(found, bfloat16(found))
        total += found
        assert np.all(np.abs(found - x) <= np.abs(x) / 127)
        assert np.array_equal(found.flat[:3], x.flat[:3])
    assert np.any(found != nearest)
    assert np.any(found == nearest)
    # A Bernoulli variable's mean over 400 draws is off by at most 1/40 of the two values' distance, one standard deviation.
    spacing = np.abs(x) / 64
    assert np.all(np.abs(total / num_steps - x) <= 5 * spacing / 40)
    assert abs((total / num_steps - x)[spacing > 0] / spacing[spacing > 0]).mean() < 0.02
    assert abs(((total / num_steps - x)[spacing > 0] / spacing[spacing > 0]).mean()) < 0.002


def moments(gradients, beta2, rounded):
    """v after these gradients in float64, or with every new v rounded to the nearest bfloat16."""
    v = np.zeros_like(gradients[0], np.float64)
    for gradient in gradients:
        v = beta2 * v + (1 - beta2) * gradient.astype(np.float64) ** 2
        v = bfloat16(v) if rounded else v
    return v


def test_the_second_moment_falls_where_rounding_to_nearest_stalls(engine):
    """beta2 = 0.999: the gradients become ten times smaller, v must become a hundred times smaller."""
    rng, beta2 = np.random.default_rng(1), 0.999
    gradients = [rng.standard_normal(SHAPE).astype(np.float32) * (1.0 if i < 60 else 0.1) for i in range(1500)]
    exact, nearest = (moments(gradients, beta2, rounded) for rounded in (False, True))
    peak = moments(gradients[:60], beta2, True)
    assert np.all(nearest >= peak)  # no step of it shrinks v
    assert np.median(nearest / exact) > 2
    optimizer = NarrowAdamW([Parameter(Tensor(np.ones(SHAPE, np.float32)), name="a.weight")], beta2=beta2)
    cell = Update(optimizer)
    for update, gradient in enumerate(gradients, 1):
        optimizer.prepare(update, 0.0)
        engine.run(cell, Tensor(gradient))
    found = storage(optimizer.moments2[0]).asnumpy()
    assert np.abs(found / exact - 1).mean() < 0.1
    assert abs((found / exact).mean() - 1) < 0.01


@pytest.mark.parametrize("bias_correction", [False, True])
def test_weights_follow_those_of_float32_moments(engine, bias_correction):
    rng = np.random.default_rng(2)
    start = {"a.weight": rng.standard_normal(SHAPE), "b.bias": rng.standard_normal(7)}
    made = [
        kind(
            [Parameter(Tensor(value.astype(np.float32)), name=name) for name, value in start.items()],
            bias_correction=bias_correction,
        )
        for kind in (AdamW, NarrowAdamW)
    ]
    cells = [Update(optimizer) for optimizer in made]
    means = [rng.standard_normal(value.shape) for value in start.values()]
    for update in range(1, 41):
        gradients = [Tensor((mean + rng.standard_normal(mean.shape)).astype(np.float32)) for mean in means]
        for optimizer, cell in zip(made, cells, strict=True):
            optimizer.prepare(update, 0.01)
            engine.run(cell, *gradients)
        wide, narrow = ([p.asnumpy().copy() for p in optimizer.parameters] for optimizer in made)
        if update == 1:  # of moments that are zeros no bit is rounded yet
            for one, other in zip(wide, narrow, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
    for one, other, first in zip(wide, narrow, start.values(), strict=True):
        moved = np.linalg.norm(one - first)
        assert np.linalg.norm(other - one) < 0.01 * moved


def test_a_step_with_gradients_that_were_not_finite_changes_nothing(engine):
    class Overflown(nn.Cell):
        def __init__(self, optimizer):
            super().__init__()
            self.optimizer = optimizer

        def construct(self, gradient, overflow):
            return self.optimizer((gradient,), overflow)

    weight = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    optimizer = NarrowAdamW([Parameter(Tensor(weight), name="a.weight")])
    cell = Overflown(optimizer)
    held = lambda: [p.asnumpy().copy() for p in (optimizer.parameters[0], *states())]  # noqa: E731
    states = lambda: [storage(optimizer.moments1[0]), storage(optimizer.moments2[0])]  # noqa: E731
    optimizer.prepare(1, 0.1)
    engine.run(cell, Tensor(weight * 2), Tensor(False))
    before = held()
    assert np.any(before[0] != weight)
    assert np.any(before[2] != 0)
    optimizer.prepare(2, 0.1)
    engine.run(cell, Tensor(np.zeros(SHAPE, np.float32)), Tensor(True))
    for one, other in zip(before, held(), strict=True):
        np.testing.assert_array_equal(one, other)
