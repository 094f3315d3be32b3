# SPDX-License-Identifier: Apache-2.0
"""Adafactor equals its formula, and on every mesh one device: the sizes it goes by are of whole parameters."""

import json

import mindspore as ms
import numpy as np
import pytest
from conftest import CONFIGS, call
from mindspore import Parameter, Tensor

from sporeloom.strategy.loader import load_strategy
from sporeloom.train.adafactor import Adafactor

WORKER = "tests/parity/worker.py"
CASES = ["dp2_tp2_zero", "tp2_pp2"]


def numpy_adafactor(weight, gradients, rate, factored):
    """Source: arXiv:1804.04235 algorithms 4 and 5, with momentum as T5X has it and PaLM's weight decay."""
    weight = weight.astype(np.float64)
    moment, squares = np.zeros_like(weight), np.zeros_like(weight)
    rows, columns = np.zeros(weight.shape[:1]), np.zeros(weight.shape[1:])
    for step, gradient in enumerate(gradients, 1):
        beta2, squared = 1 - step**-0.8, gradient.astype(np.float64) ** 2 + 1e-30
        if factored and weight.ndim > 1:
            rows = beta2 * rows + (1 - beta2) * squared.mean(1)
            columns = beta2 * columns + (1 - beta2) * squared.mean(0)
            update = gradient / np.sqrt(np.outer(rows, columns) / rows.mean())
        else:
            squares = beta2 * squares + (1 - beta2) * squared
            update = gradient / np.sqrt(squares)
        update /= max(1.0, np.sqrt((update**2).mean()))
        moment = 0.9 * moment + 0.1 * rate * max(np.sqrt((weight**2).mean()), 1e-3) * update
        weight = weight - moment - rate**2 * weight
    return weight


@pytest.mark.parametrize("factored", [False, True])
def test_twenty_steps_equal_the_formula(factored):
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.RandomState(0)
    start = {"a.weight": rng.randn(3, 4), "a.bias": rng.randn(4) * 1e-5, "b.weight": rng.randn(5, 2) * 7}
    parameters = [Parameter(Tensor(value.astype(np.float32)), name=name) for name, value in start.items()]
    optimizer = Adafactor(parameters, factored=factored, weight_decay=1.0)
    gradients = [[rng.randn(*value.shape).astype(np.float32) for value in start.values()] for _ in range(20)]
    for step, found in enumerate(gradients, 1):
        optimizer.prepare(step, 0.05)
        optimizer(tuple(map(Tensor, found)))
    for i, value in enumerate(start.values()):
        expected = numpy_adafactor(value.astype(np.float32), [g[i] for g in gradients], 0.05, factored)
        np.testing.assert_allclose(parameters[i].asnumpy(), expected, rtol=1e-5, atol=1e-8)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("adafactor") / "one"
    call(WORKER, "train_optimizer", "one_device", ["palm"], out)
    return json.loads(out.with_suffix(".json").read_text()), np.load(out.with_suffix(".npz"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_equals_one_device(expected, tmp_path, name):
    path, out = CONFIGS / f"pangu_tiny_{name}.yaml", tmp_path / name
    call(WORKER, "train_optimizer", path, ["palm"], out, processes=load_strategy(path).mesh.size)
    losses, weights = expected
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(json.loads(out.with_suffix(".json").read_text()), losses, rtol=1e-5)
    found = np.load(out.with_suffix(".npz"))
    assert set(found.files) == set(weights.files)
    for key in weights.files:  # where a gradient is zero but for rounding, its sign decides a whole step
        assert np.sqrt(((found[key] - weights[key]) ** 2).mean()) <= 1e-5, key
