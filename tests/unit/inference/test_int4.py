# SPDX-License-Identifier: Apache-2.0
"""Int4 by its formulas, in float64: rounding, packing, dequantization; and which models and shards can have it."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest

from sporeloom.inference.quantize import dequantized, int4_of, packed
from sporeloom.models.family import size_config
from sporeloom.models.parts.spec import ZEROS, ParameterSpecs, linear
from sporeloom.models.weight_formats import WEIGHT_FORMATS, format_problems
from sporeloom.nn.int4 import Int4Linear
from sporeloom.nn.linear import Linear

PRODUCT = ParameterSpecs.of(linear("product", 256, 24, False, ZEROS)).within("product")
INT4 = [name for name, each in WEIGHT_FORMATS.items() if each.bits == 4]


def matrix(seed=0):
    w = np.random.default_rng(seed).normal(0, 0.05, (24, 256)).astype(np.float32)
    w[0, :128], w[1], w[2] = 0, np.abs(w[1]), 1e-42  # groups of zeros, of one sign, of numbers that no scale divides
    return w


@pytest.mark.parametrize("name", INT4)
def test_numbers_are_rounded_to_the_nearest_of_their_group(name):
    weights, w = WEIGHT_FORMATS[name], matrix()
    found = int4_of(w, weights)
    groups = w.astype(np.float64).reshape(24, -1, weights.group_size)
    scale, zero = found.scale.astype(np.float64), found.zero.astype(np.float64)
    assert scale.shape == (24, 256 // weights.group_size) and found.q.max() <= 15
    if weights.has_zeros:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        is_zero = high - low < 1e-37
        np.testing.assert_allclose(scale[~is_zero], ((high - low) / 15)[~is_zero], rtol=1e-6)
        np.testing.assert_array_equal(zero, np.rint(-low / scale))
    else:
        furthest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        is_zero = np.abs(furthest) < 1e-37
        np.testing.assert_allclose(scale[~is_zero], (furthest / -8)[~is_zero], rtol=1e-6)
        assert (zero == 8).all()
    levels = (np.arange(16) - zero[..., None]) * scale[..., None]  # (24, groups, 16): each number that can be held
    nearest = np.abs(groups[..., None] - levels[..., None, :]).min(-1)
    held = dequantized(found).astype(np.float64).reshape(groups.shape)
    slack = 1e-6 * np.abs(scale)[..., None]
    assert (np.abs(groups - held) <= nearest + slack * (np.inf if weights.has_zeros else 1)).all()
    assert (np.abs(groups - held) <= np.abs(scale)[..., None] * (1.0 if weights.has_zeros else 0.5 + 0.5) + slack).all()
    inner = np.abs(groups / scale[..., None] + zero[..., None] - 7.5) < 7.5  # within the range: half a step at most
    assert (
        np.abs(groups - held)[inner] <= (0.5 * np.abs(scale)[..., None] * np.ones(groups.shape))[inner] + 1e-8
    ).all()
    assert not held[is_zero].any()


@pytest.mark.parametrize("name", INT4)
def test_the_operators_dequantize_what_was_packed(name):
    ms.set_device("CPU")
    found = int4_of(matrix(1), WEIGHT_FORMATS[name])
    bytes_of = packed(found.q)
    assert bytes_of.shape == (24, 8, 16) and bytes_of.dtype == np.uint8
    for column in (0, 15, 16, 31, 32, 255):
        block, of = divmod(column, 32)
        half = bytes_of[:, block, of % 16] >> 4 if of >= 16 else bytes_of[:, block, of % 16] & 15
        np.testing.assert_array_equal(half, found.q[:, column])
    cell = Int4Linear(Linear(PRODUCT), WEIGHT_FORMATS[name])
    for parameter, value in zip(cell.operands(), (bytes_of, found.scale, found.zero), strict=False):
        parameter.set_data(ms.Tensor(value))
    got = cell.matrix().asnumpy()
    exact = (found.q.astype(np.float64).reshape(*found.zero.shape, -1) - found.zero[..., None]) * found.scale[..., None]
    np.testing.assert_array_equal(got, exact.reshape(24, 256).astype(np.float32))
    np.testing.assert_array_equal(got, dequantized(found))


def test_groups_divide_columns_and_shards_or_the_formats_that_do_are_named():
    tiny = dataclasses.replace(size_config("pangu", "tiny"), hidden_size=96, num_heads=6)
    assert not format_problems(WEIGHT_FORMATS["int4-g32"], tiny)
    (problem,) = format_problems(WEIGHT_FORMATS["int4-g64"], tiny)
    assert problem == (
        "groups of 64 do not divide the 96 columns of layers.0.attention.query; use --weights int4-g32 or int4-asym-g32"
    )
    wide = dataclasses.replace(tiny, hidden_size=128, num_heads=4)
    assert not format_problems(WEIGHT_FORMATS["int4"], wide)
    (problem,) = format_problems(WEIGHT_FORMATS["int4"], wide, tp=2)
    assert problem == (
        "a shard of layers.0.attention.output, 128 columns on 2 tensor parallel ranks, is not a multiple of groups of 128; "
        "use --weights int4-g64 or int4-g32"
    )
    (problem,) = format_problems(WEIGHT_FORMATS["int4-g32"], dataclasses.replace(wide, hidden_size=48, num_heads=3))
    assert problem.endswith("do not divide the 48 columns of layers.0.attention.query; use --weights int8")
