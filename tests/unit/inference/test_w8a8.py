# SPDX-License-Identifier: Apache-2.0
"""W8A8 against NumPy in whole numbers: operators and kernels, rows by themselves, numbers that are not finite, refusals."""

import ctypes
import dataclasses
import shutil
import subprocess
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from native_calls import calling

from sporeloom.checkpoint.model_folder import weight_problems
from sporeloom.inference import kernels
from sporeloom.inference.kernels import kernel_library
from sporeloom.models.family import size_config
from sporeloom.models.parts.spec import ZEROS, ParameterSpecs, linear
from sporeloom.models.weight_formats import MAX_COLUMNS_OF_DIGITS, WEIGHT_FORMATS, format_problems
from sporeloom.nn.linear import Linear
from sporeloom.nn.w8a8 import Digits, W8A8ExpertLinear, W8A8Linear

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


@pytest.fixture(autouse=True)
def device():
    ms.set_device("CPU")


def operands(rows, columns, outputs=20, *outer, seed=0):
    random = np.random.default_rng(seed + rows)
    x = (random.standard_normal((*outer, rows, columns)) * random.exponential(1, (*outer, rows, 1))).astype(np.float32)
    w = random.integers(-128, 128, (*outer, outputs, columns)).astype(np.int8)
    return x, w, random.random((*outer, outputs), np.float32) / 100


def rounded(x):
    """The formula: the number furthest from 0 becomes 127, others the nearest."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.rint(x / scale).astype(np.int64), scale


def reference(x, w, scale):
    q, of_rows = rounded(x)
    sums = q @ w.astype(np.int64).swapaxes(-1, -2)
    assert np.abs(q).max() == 127 and np.abs(sums).max() < 2**31
    return sums.astype(np.float32) * of_rows * scale[..., None, :]


def by_operators(x, w, scale, bias=False):
    of = ParameterSpecs.of(linear("product", x.shape[1], len(w), bias, ZEROS)).within("product")
    cell = W8A8Linear(Linear(of))
    cell.weight.set_data(ms.Tensor(w))
    cell.scale.set_data(ms.Tensor(scale))
    return cell(ms.Tensor(x)).asnumpy()


@pytest.mark.parametrize(("rows", "columns"), [(1, 96), (5, 1032), (3, 1104), (2, 16384), (2, 20480)])
def test_operators_give_the_whole_numbers_of_the_formula(rows, columns):
    """With one digit, two and four; to the bit."""
    x, w, scale = operands(rows, columns)
    w[0], x[0] = -128, np.abs(x[0])  # sums beyond 2^24
    np.testing.assert_array_equal(by_operators(x, w, scale), reference(x, w, scale))


@pytest.mark.parametrize("columns", MAX_COLUMNS_OF_DIGITS.values())
def test_digits_are_so_small_that_no_sum_is_rounded(columns):
    digits, q = Digits(columns), np.arange(-127, 128, dtype=np.float32)[:, None]
    parts = digits(ms.Tensor(q)).asnumpy()
    np.testing.assert_array_equal(digits.joined(ms.Tensor(parts)).asnumpy(), q)
    assert np.array_equal(parts, np.rint(parts)) and np.abs(parts).max() * 128 * columns <= 2**24


def test_experts_compute_as_linear_parts_do():
    x, w, scale = operands(6, 1104, 8, 3)
    exact = SimpleNamespace(weight=SimpleNamespace(shape=w.shape), dtype=ms.float32, has_bias=False)
    cell = W8A8ExpertLinear(exact)
    cell.weight.set_data(ms.Tensor(w))
    cell.scale.set_data(ms.Tensor(scale[:, None]))
    np.testing.assert_array_equal(cell(ms.Tensor(x)).asnumpy(), reference(x, w, scale))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns"), [*((n, 96) for n in (1, 2, 3, 4, 5, 8)), (1, 4096), (21, 1104), (70, 528), (130, 16)]
)
def test_kernels_give_the_whole_numbers_of_the_formula(rows, columns):
    call, (x, w, scale) = calling(ctypes.CDLL(str(kernel_library()))), operands(rows, columns)
    check_kernel(call, x, w, scale)
    np.testing.assert_array_equal(by_operators(x, w, scale), reference(x, w, scale))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86-64", "haswell"])
def test_so_do_kernels_of_older_processors(monkeypatch, tmp_path, machine):
    flags = [flag for flag in kernels.FLAGS if not flag.startswith("-march")]
    source, path = kernels.SOURCE, tmp_path / "kernels.so"
    built = subprocess.run(
        ["cc", *flags, f"-march={machine}", source, "-o", path, "-lm"], capture_output=True, check=False
    )
    if built.returncode:
        pytest.skip("not x86_64")
    call = calling(ctypes.CDLL(str(path)))
    for rows, columns in ((1, 96), (7, 1104), (70, 528)):
        check_kernel(call, *operands(rows, columns))


def check_kernel(call, x, w, scale):
    y, alone, with_bias = (np.full((len(x), len(w)), np.nan, np.float32) for _ in range(3))
    wanted = reference(x, w, scale)
    call("linear_w8a8", x, w, scale, y)
    np.testing.assert_array_equal(y, wanted)
    bias = scale[::-1].copy()
    call("linear_w8a8", x, w, scale, bias, with_bias)
    np.testing.assert_allclose(with_bias, wanted + bias, rtol=1e-5, atol=1e-7)
    for given, found in (((), y), ((bias,), with_bias)):
        for row in range(len(x)):
            call("linear_w8a8", x[row : row + 1].copy(), w, scale, *given, alone[row : row + 1])
        np.testing.assert_array_equal(alone, found)  # to the bit, whatever the other rows are


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other(bad):
    x, w, scale = operands(5, 96)
    x[1, 40], x[3] = bad, 0
    y = np.zeros((5, 20), np.float32)
    calling(ctypes.CDLL(str(kernel_library())))("linear_w8a8", x, w, scale, y)
    np.testing.assert_array_equal(y, by_operators(x, w, scale))
    assert np.isnan(y[1]).all() and not y[3].any()
    good = [0, 2, 4]
    np.testing.assert_array_equal(y[good], reference(x[good], w, scale))


def test_a_model_whose_sums_are_not_exact_is_refused(tmp_path):
    wide = dataclasses.replace(size_config("pangu", "tiny"), ffn_hidden_size=70000)
    assert format_problems(WEIGHT_FORMATS["w8a8"], wide) == [
        "sums over the 70000 columns of layers.0.mlp.down are exact for up to 65536; use --weights int8"
    ]
    assert not format_problems(WEIGHT_FORMATS["w8a8"], dataclasses.replace(wide, ffn_hidden_size=65536))
    assert not format_problems(WEIGHT_FORMATS["int8"], wide)
    (problem,) = weight_problems("w8a8", tmp_path, wide)  # before anything is read, and so draft models get int8
    assert problem.startswith("--weights w8a8: sums over the 70000 columns")
    assert not weight_problems("int8", tmp_path, wide)
