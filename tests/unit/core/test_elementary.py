# SPDX-License-Identifier: Apache-2.0
"""Elementary functions have the same bits wherever arrays lie in memory, and nothing calls NumPy's own."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import sporeloom
from sporeloom.core import elementary

SOURCES = Path(sporeloom.__file__).parent
DEPENDENT = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "power",
    "float_power",
    "cbrt",
    "tan",
    "sinh",
    "cosh",
    "arctan",
    "arctan2",
    "arcsin",
    "arccos",
    "arcsinh",
    "arctanh",
}
"""Functions of NumPy, in single or double precision by two routines."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["exp", "log", "expm1"])
def test_bits_do_not_depend_on_memory(name, dtype):
    values = np.random.default_rng(0).uniform(0.1, 4.0, 4096).astype(dtype)
    function, found = getattr(elementary, name), set()
    block = np.zeros((2, len(values)), dtype)
    block[0] = values
    for x in (values, block[0], values[::-1][::-1], np.repeat(values, 2)[::2], np.stack([values, values], 1)[:, 0]):
        y = function(x)
        assert y.dtype == dtype
        np.testing.assert_array_equal(x, values)
        found.add(y.tobytes())
    assert len(found) == 1
    exact = [getattr(math, name)(value) for value in values.tolist()]
    np.testing.assert_allclose(function(values), exact, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["exp", "log", "expm1"])
def test_results_are_written_over_a_copy(name, monkeypatch):
    calls, x = [], np.ones(4)
    monkeypatch.setattr(np, name, lambda y, out: calls.append(y is out and y is not x) or out)
    getattr(elementary, name)(x)
    assert calls == [True]


def test_whole_numbers_and_scalars():
    assert elementary.log(np.array([1, 2])).dtype == np.float64
    assert elementary.exp(0.0) == 1.0


def test_nothing_calls_those_of_numpy():
    families = [SOURCES.parent / name for name in ("pangu", "codegeex", "palm")]
    found = [
        f"{file.name}:{node.lineno}: np.{node.attr}"
        for folder in (SOURCES, *families)
        for file in folder.rglob("*.py")
        if file.stem != "elementary"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "np" and node.attr in DEPENDENT
    ]
    assert not found, found
