# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel of experts against NumPy: every kind of weights, gates and biases, and each row as if it were alone."""

import ctypes
import shutil

import numpy as np
import pytest
from native_calls import calling

from sporeloom.inference.kernels import PLAN_LENGTH, kernel_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")

NUM_EXPERTS, HIDDEN, FEATURES = 5, 64, 96
KINDS = ("float32", "int8", "w8a8", "int4", "int4-asym")
SILU = 3


def matrix(random, kind, outputs, columns):
    """Inputs of the kernel, and what they stand for in float64."""
    if kind == "float32":
        w = random.standard_normal((NUM_EXPERTS, outputs, columns), np.float32)
        return [w], w.astype(np.float64)
    if kind in ("int8", "w8a8"):
        w, scale = (
            random.integers(-127, 128, (NUM_EXPERTS, outputs, columns)),
            random.random((NUM_EXPERTS, 1, outputs), np.float32),
        )
        return [w.astype(np.int8), scale / 100], w * (scale / 100).swapaxes(1, 2).astype(np.float64)
    q = random.integers(0, 16, (NUM_EXPERTS, outputs, columns // 32, 2, 16))
    packed = (q[..., 0, :] + 16 * q[..., 1, :]).astype(np.uint8)
    scale = random.standard_normal((NUM_EXPERTS, outputs, columns // 32), np.float32) / 10
    zero = (
        random.integers(0, 16, scale.shape).astype(np.uint8)
        if kind == "int4-asym"
        else np.full(scale.shape, 8, np.uint8)
    )
    exact = (q.reshape(*scale.shape, 32) - zero[..., None]) * scale[..., None].astype(np.float64)
    return [packed, scale, *([zero] if kind == "int4-asym" else [])], exact.reshape(NUM_EXPERTS, outputs, columns)


def product(kind, x, w, bias):
    if kind == "w8a8":
        scale = np.abs(x.astype(np.float32)).max() / np.float32(127)
        x = np.rint(x.astype(np.float32) / scale).astype(np.float64) * scale
    return x @ w.T + bias


def expected(kind, x, chosen, exact, biases):
    groups, length = len(chosen), len(x) // len(chosen)
    y = np.zeros((*chosen.shape, HIDDEN))
    for group in range(groups):
        for choice, e in enumerate(chosen[group]):
            row = x[group * length + choice % length].astype(np.float64)
            up = product(kind, row, exact["up"][e], biases["up"][e, 0])
            gate = product(kind, row, exact["gate"][e], biases["gate"][e, 0]) if "gate" in exact else None
            wide = up / (1 + np.exp(-up)) if gate is None else up * gate / (1 + np.exp(-gate))
            y[group, choice] = product(kind, wide, exact["down"][e], biases["down"][e, 0])
    return y


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_the_rows_that_chose_them(kind, has_bias, is_gated):
    call, random = calling(ctypes.CDLL(str(kernel_library()))), np.random.default_rng(1)
    x = random.standard_normal((6, HIDDEN), np.float32)  # two groups of three tokens, two choices each
    chosen = np.asarray([[4, 0, 1, 1, 4, 0], [1, 1, 1, 0, 4, 4]], np.int32)
    inputs, exact, biases = [], {}, {}
    for name in ("up", "gate", "down") if is_gated else ("up", "down"):
        shape = (HIDDEN, FEATURES) if name == "down" else (FEATURES, HIDDEN)
        of, exact[name] = matrix(random, kind, *shape)
        of[0 if kind == "float32" else 1][2:4] = np.nan  # nobody chose these experts
        biases[name] = random.standard_normal((NUM_EXPERTS, 1, shape[0]), np.float32) * has_bias
        inputs += [*of, biases[name]] if has_bias else of
    plan = np.zeros(PLAN_LENGTH, np.int32)
    plan[[3, 4, 5, 8]] = SILU, is_gated, KINDS.index(kind), has_bias
    y = np.full((2, 6, HIDDEN), np.nan, np.float32)
    call("experts", x, chosen, *inputs, plan, y)
    wanted = expected(kind, x, chosen, exact, biases)
    furthest = np.abs(wanted).max()
    tolerance = 1e-5 if kind != "w8a8" else 1e-2  # a float's last bit may round to the next int8
    np.testing.assert_allclose(y, wanted, rtol=0, atol=tolerance * furthest)
    assert np.median(np.abs(y - wanted)) < 1e-6 * furthest
    for group in range(2):
        for choice, e in enumerate(chosen[group]):
            alone, row = np.full((1, 1, HIDDEN), np.nan, np.float32), group * 3 + choice % 3
            call("experts", x[row : row + 1].copy(), np.asarray([[e]], np.int32), *inputs, plan, alone)
            np.testing.assert_array_equal(alone[0, 0], y[group, choice])
