# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels against NumPy, and what happens where they cannot be built."""

import ctypes
import shutil
import subprocess
import sys

import numpy as np
import pytest
from native_calls import calling

from sporeloom.inference import kernels
from sporeloom.inference.kernels import kernel_library

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


@pytest.fixture(scope="module")
def call():
    path = kernel_library()
    assert path is not None
    return calling(ctypes.CDLL(str(path)))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns"),
    [*((n, 96) for n in (1, 2, 3, 4, 5, 8, 13, 16)), *((n, 1104) for n in (3, 5, 8, 21, 24, 25)), (70, 528)],
)
def test_products(call, rows, columns):
    """Columns of more than a few rows are worked on in slices, of more than 24 in copies, more than 64 rows in panels.
    Tolerances grow with what is added up."""
    random = np.random.default_rng(rows)
    x, w = (random.standard_normal((n, columns), np.float32) for n in (rows, 20))
    w8, scale = random.integers(-127, 128, (20, columns)).astype(np.int8), random.random(20, np.float32)
    y, y8, alone = (np.full((rows, 20), np.nan, np.float32) for _ in range(3))
    call("linear", x, w, y)
    exact, added = x.astype(np.float64) @ w.T, np.abs(x) @ np.abs(w.T)
    assert (np.abs(y - exact) <= 1e-5 * np.abs(exact) + 6e-8 * added).all()
    call("linear_int8", x, w8, scale, y8)
    exact8, added = (x.astype(np.float64) @ w8.T) * scale, np.abs(x) @ np.abs(w8.T.astype(np.float32)) * scale
    assert (np.abs(y8 - exact8) <= 1e-5 * np.abs(exact8) + 6e-8 * added).all()
    bias, with_bias = random.standard_normal(20, np.float32), np.full_like(y, np.nan)
    call("linear", x, w, bias, with_bias)
    np.testing.assert_array_equal(with_bias, y + bias)
    call("linear_int8", x, w8, scale, bias, with_bias)
    np.testing.assert_allclose(with_bias, y8 + bias, rtol=1e-6, atol=1e-6)
    for row in range(rows):
        call("linear", x[row : row + 1].copy(), w, alone[row : row + 1])
    np.testing.assert_array_equal(y, alone)  # to the bit, whatever the other rows are


@needs_compiler
@pytest.mark.parametrize("inner", [3, 17, 32, 40, 1025, 1048])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (2, 1025), (7, 8), (13, 33)])
@pytest.mark.parametrize("kind", ["nn", "nt", "tn", "tt"])
def test_products_of_any_size(call, kind, rows, columns, inner):
    """A batch whose dims repeat in one of both. With MindSpore's products the last of 7 or 13 rows, and the second of 3
    matrices, get other bits than the same numbers elsewhere."""
    random = np.random.default_rng(rows)
    x, w = (
        random.standard_normal((2, 1, 1, inner), np.float32),
        random.standard_normal((2, 1, inner, columns), np.float32),
    )
    x = np.broadcast_to(x, (2, 3, rows, inner))
    given = [
        np.ascontiguousarray(a.swapaxes(-1, -2) if lies == "t" else a) for a, lies in zip((x, w), kind, strict=True)
    ]
    y = np.full((2, 3, rows, columns), np.nan, np.float32)
    call(f"product_{kind}", *given, y)
    added = np.abs(x) @ np.abs(w)
    assert (np.abs(y - x.astype(np.float64) @ w) <= 1e-6 * added).all()
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1, :1], y.shape))
    alone = np.full((1, columns), np.nan, np.float32)
    shifted = np.concatenate([[0.0], x[1, 2, 0]]).astype(np.float32)[
        None, 1:
    ]  # it begins elsewhere in a line of the cache
    call(f"product_n{kind[1]}", shifted, given[1][1, 0], alone)
    np.testing.assert_array_equal(alone[0], y[1, 0, 0])


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        *((n, 96, 32) for n in (1, 2, 3, 5, 8)),
        (1, 1152, 128),
        (3, 1152, 64),
        (21, 1152, 128),
        (70, 576, 576),
        (6, 1152, 1152),
    ],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_with_int4(call, rows, columns, group, has_zeros):
    """Groups within slices, across them, and as long as a row."""
    random = np.random.default_rng(rows)
    x, q = random.standard_normal((rows, columns), np.float32), random.integers(0, 16, (20, columns))
    blocks = q.reshape(20, -1, 2, 16)
    w = (blocks[:, :, 0] + 16 * blocks[:, :, 1]).astype(np.uint8)
    scale = random.standard_normal((20, columns // group), np.float32)
    zero = random.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else np.full(scale.shape, 8, np.uint8)
    exact_w = (q - np.repeat(zero, group, 1)) * np.repeat(scale, group, 1).astype(np.float64)
    name, of = ("linear_int4_zeros", (w, scale, zero)) if has_zeros else ("linear_int4", (w, scale))
    y, alone, with_bias = (np.full((rows, 20), np.nan, np.float32) for _ in range(3))
    call(name, x, *of, y)
    exact, added = x.astype(np.float64) @ exact_w.T, np.abs(x) @ np.abs(exact_w.T)
    assert (np.abs(y - exact) <= 1e-5 * np.abs(exact) + 6e-8 * added).all()
    bias = random.standard_normal(20, np.float32)
    call(name, x, *of, bias, with_bias)
    np.testing.assert_array_equal(with_bias, y + bias)
    for row in range(rows):
        call(name, x[row : row + 1].copy(), *of, alone[row : row + 1])
    np.testing.assert_array_equal(y, alone)  # to the bit, whatever the other rows are


@needs_compiler
def test_threads_that_lose_their_core_change_no_bit(tmp_path):
    """More threads than cores, beside a program that computes all the time: pieces are taken late, by whoever is there."""
    one, many = (ctypes.CDLL(shutil.copy(kernel_library(), tmp_path / f"{count}.so")) for count in (1, 7))
    one.use_threads(1)
    many.use_threads(7)
    random = np.random.default_rng(0)
    busy = subprocess.Popen(
        [sys.executable, "-c", "import time\nend = time.time() + 60\nwhile time.time() < end: pass"]
    )
    try:
        for turn in range(400):
            x, w = (random.standard_normal((n, 512), np.float32) for n in (1 + turn % 5, 16 * (17 + turn % 11)))
            name, of = "linear", (w,)
            if turn % 2:
                name, of = "linear_int4", (random.integers(0, 256, (len(w), 16, 16)).astype(np.uint8), w[:, :4].copy())
            expected, found = (np.full((len(x), len(w)), np.nan, np.float32) for _ in range(2))
            calling(one)(name, x, *of, expected)
            calling(many)(name, x, *of, found)
            np.testing.assert_array_equal(found, expected)
    finally:
        busy.kill()
        busy.wait()


@needs_compiler
@pytest.mark.parametrize(("kv_heads", "width"), [(1, 32), (2, 32), (4, 32), (2, 16), (4, 64), (1, 112), (2, 240)])
def test_attention_of_single_queries(call, kv_heads, width):
    """Heads are mixed in eight vectors, in four and in single ones, as many as fit."""
    random = np.random.default_rng(kv_heads)
    q, cache, new = (
        random.standard_normal((3, 4, 1, width), np.float32),
        (3, kv_heads, 37, width),
        (3, kv_heads, 1, width),
    )
    k, v, new_k, new_v = (random.standard_normal(shape, np.float32) for shape in (cache, cache, new, new))
    rows, slots = (2, 0, 1), np.zeros((3, kv_heads, 1, 3), np.int32)
    slots[..., 1] = np.arange(kv_heads)[:, None]
    bias = np.zeros((3, 1, 1, 37), np.float32)
    for place, (row, length) in enumerate(zip(rows, (1, 20, 37), strict=True)):
        bias[place, ..., length:] = -10000
        k[row, :, length - 1 :] = np.nan  # what comes behind is not read, the last one is written
        slots[place, ..., 0], slots[place, ..., 2] = row, length - 1
    bias[2, ..., 4] = -10000
    y = np.full_like(q, np.nan)
    call("attend", q, new_k, new_v, k, v, slots, bias, y)
    for place, row in enumerate(rows):
        np.testing.assert_array_equal(k[row, :, slots[place, 0, 0, 2]], new_k[place, :, 0])
        np.testing.assert_array_equal(v[row, :, slots[place, 0, 0, 2]], new_v[place, :, 0])
    keys, values = (np.repeat(np.nan_to_num(x[list(rows)]), 4 // kv_heads, 1).astype(np.float64) for x in (k, v))
    scores = q.astype(np.float64) @ keys.swapaxes(-1, -2) / np.sqrt(width) + bias
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(y, probs / probs.sum(-1, keepdims=True) @ values, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_with_caches_of_int8(call, kv_heads):
    """Against float64, with what the caches hold; new keys and values are rounded to the nearest of 127 steps."""
    random = np.random.default_rng(kv_heads)
    q, cache, new = random.standard_normal((2, 4, 1, 80), np.float32), (2, kv_heads, 37, 80), (2, kv_heads, 1, 80)
    k, v = (random.integers(-127, 128, cache).astype(np.int8) for _ in range(2))
    of_k, of_v = (random.random((*cache[:3], 1), np.float32) / 50 for _ in range(2))
    new_k, new_v = (random.standard_normal(new, np.float32) for _ in range(2))
    new_k[0, 0] = 0
    slots, bias = np.zeros((2, kv_heads, 1, 3), np.int32), np.zeros((2, 1, 1, 37), np.float32)
    slots[..., 0], slots[..., 1], slots[..., 2] = np.arange(2)[:, None, None], np.arange(kv_heads)[:, None], 20
    bias[..., 21:] = -10000
    y = np.full_like(q, np.nan)
    call("attend_int8", q, new_k, new_v, k, v, of_k, of_v, slots, bias, y)
    for held, scales, given in ((k, of_k, new_k), (v, of_v, new_v)):
        wanted = np.maximum(np.abs(given).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
        np.testing.assert_array_equal(scales[:, :, 20:21], wanted)
        np.testing.assert_array_equal(held[:, :, 20:21], np.rint(given / wanted).astype(np.int8))
        assert (np.abs(held[:, :, 20:21] * wanted - given) <= 0.5001 * wanted).all()
    keys, values = (np.repeat(x * s.astype(np.float64), 4 // kv_heads, 1) for x, s in ((k, of_k), (v, of_v)))
    scores = q.astype(np.float64) @ keys.swapaxes(-1, -2) / np.sqrt(80) + bias
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(y, probs / probs.sum(-1, keepdims=True) @ values, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["key", "value"])
def test_what_is_not_finite_comes_out_of_caches_of_int8(call, bad, of):
    random = np.random.default_rng(0)
    q, new_k, new_v = (random.standard_normal((2, n, 1, 48), np.float32) for n in (4, 2, 2))
    (new_k if of == "key" else new_v)[0, 1, 0, 3] = bad
    k, v = (np.zeros((2, 2, 20, 48), np.int8) for _ in range(2))
    of_k, of_v = (np.zeros((2, 2, 20, 1), np.float32) for _ in range(2))
    slots, bias = np.zeros((2, 2, 1, 3), np.int32), np.full((2, 1, 1, 20), -10000, np.float32)
    slots[..., 0], slots[..., 1], slots[..., 2] = np.arange(2)[:, None, None], np.arange(2)[:, None], 7
    bias[..., :8] = 0
    y = np.zeros_like(q)
    call("attend_int8", q, new_k, new_v, k, v, of_k, of_v, slots, bias, y)
    scales = of_k if of == "key" else of_v
    assert np.isnan(scales[0, 1, 7, 0]) and np.isnan(scales).sum() == 1
    assert np.isnan(y[0, 2:]).all() and np.isfinite(y[0, :2]).all() and np.isfinite(y[1]).all()


@needs_compiler
def test_scores_that_lie_far_apart(call):
    q, k, v = (np.zeros((1, 1, n, 16), np.float32) for n in (1, 16, 16))
    q[..., 0], k[0, 0, :, 0], v[0, 0, :, 0] = 4.0, np.linspace(-300, 300, 16), np.arange(16)
    y, slots = np.full_like(q, np.nan), np.array([0, 0, 0], np.int32).reshape(1, 1, 1, 3)
    call("attend", q, k[:, :, :1], v[:, :, :1], k, v, slots, np.zeros((1, 1, 1, 16), np.float32), y)
    assert y[0, 0, 0, 0] == pytest.approx(15.0, abs=1e-6)


def test_without_a_compiler_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert kernel_library() is None
    assert "no C compiler (cc): decoding with MindSpore's operators" in capsys.readouterr().err
    monkeypatch.setenv("SPORELOOM_KERNELS", "0")
    assert kernel_library() is None
    assert capsys.readouterr().err == ""


@needs_compiler
def test_what_cannot_be_compiled_leaves_nothing_behind(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "kernels.c").write_text("int linear(\n")
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "kernels.c")
    assert kernel_library() is None
    assert "kernels.c cannot be used, decoding is slower: " in capsys.readouterr().err
    assert list((tmp_path / "cache/sporeloom/kernels").iterdir()) == []
