# SPDX-License-Identifier: Apache-2.0
"""A KV cache of int8: its operators by the formula, its memory, what a row gets, and which models cannot have it."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.core.errors import ConfigError
from sporeloom.inference.cache import cache_bytes, cache_problems
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import CACHE, load_model
from sporeloom.inference.sampling import BadLogitsError, check_logits
from sporeloom.inference.uncached import UncachedDecoder
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.nn.cache import Int8KVCache
from sporeloom.nn.vector_quantizer import VectorQuantizer
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

IDS = [5, 9, 2, 8, 30, 31, 7, 1, 12, 44, 3, 3, 17]


@pytest.fixture(scope="module")
def engine():
    ms.set_device("CPU")
    return Engine.start(SINGLE_DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(size_config("pangu", "embedded_tiny"), num_layers=2, vocab_size=64, seq_len=48)
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in parameter_shapes(config).items()}
    save_checkpoint(path := tmp_path_factory.mktemp("model") / "m", weights, "pangu", config)
    return path, config


def test_the_operators_return_what_the_cache_holds():
    ms.set_device("CPU")
    cell, draw = Int8KVCache((2, 2, 8, 16), ms.float32), np.random.default_rng(0)
    given = draw.normal(0, 3, (2, 2, 2, 3, 16)).astype(np.float32)
    given[0, 0, 0, 0] = 0
    slots = np.zeros((2, 2, 3, 3), np.int32)
    slots[..., 0], slots[..., 1] = np.arange(2)[:, None, None], np.arange(2)[:, None]
    slots[..., 2] = [4, 5, 6]
    got = [each.asnumpy() for each in cell(ms.Tensor(given[0]), ms.Tensor(given[1]), ms.Tensor(slots))]
    for x, held, q in zip(given.astype(np.float64), got, (cell.keys, cell.values), strict=True):
        scale = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / 127
        np.testing.assert_array_equal(q.asnumpy()[:, :, 4:7], np.rint(x / scale))
        np.testing.assert_allclose(held[:, :, 4:7], np.rint(x / scale) * scale, rtol=1e-6, atol=0)
        assert not held[:, :, :4].any() and not held[:, :, 7:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_become_nan(bad):
    ms.set_device("CPU")
    x = np.random.default_rng(0).normal(0, 3, (2, 3, 16)).astype(np.float32)
    wanted = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    x[1, 1, 5], wanted[1, 1] = bad, np.nan
    q, scale = (each.asnumpy() for each in VectorQuantizer()(ms.Tensor(x)))
    np.testing.assert_allclose(scale, wanted, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(np.isnan(q * scale), np.isnan(np.broadcast_to(wanted, x.shape)))


@pytest.mark.parametrize("switch", ["1", "0"], ids=["kernels", "operators"])
def test_a_text_whose_keys_are_not_finite_gets_no_answer(engine, folder, monkeypatch, switch):
    monkeypatch.setenv("SPORELOOM_KERNELS", switch)
    path, config = folder
    net = load_model(path, "pangu", config, SINGLE_DEVICE, (3, 32), kv_cache="int8")
    key = next(p for p in net.get_parameters() if p.name.endswith("layers.1.attention.key.weight"))
    broken = key.asnumpy().copy()
    broken[0] = np.nan
    key.set_data(ms.Tensor(broken))
    decoding = cached(engine, net, config, 3, 32)
    logits = [decoding.step({0: IDS}, {})[0], decoding.step({}, {0: 5})[0]]
    for each in logits:
        with pytest.raises(BadLogitsError):
            check_logits(each)


@pytest.mark.parametrize("switch", ["1", "0"], ids=["kernels", "operators"])
def test_a_text_gets_nearly_what_it_gets_without_and_the_same_however_it_is_cut(engine, folder, monkeypatch, switch):
    monkeypatch.setenv("SPORELOOM_KERNELS", switch)
    path, config = folder
    net = load_model(path, "pangu", config, SINGLE_DEVICE, (3, 32), kv_cache="int8")
    assert bool(net.num_kernels) == (switch == "1")
    decoding = cached(engine, net, config, 3, 32)
    together = decoding.step({0: IDS}, {})[0]
    one_by_one = [decoding.step({}, {1: token, 2: 9})[1] for token in IDS][-1]
    if switch == "1":  # to the bit, whoever else is there
        np.testing.assert_array_equal(one_by_one, together)
    exact = UncachedDecoder(engine, load_model(path, "pangu", config, SINGLE_DEVICE), config, 1).step({0: IDS}, {})[0]
    assert 1e-6 < np.abs(together - exact).max() / np.abs(exact).max() < 0.02
    np.testing.assert_allclose(one_by_one, exact, rtol=0, atol=0.02 * np.abs(exact).max())


def test_its_memory_is_what_plans_count(engine, folder):
    path, config = folder
    for name in ("auto", "int8"):
        net = load_model(path, "pangu", config, SINGLE_DEVICE, (3, 32), kv_cache=name)
        held = sum(parameter.nbytes for parameter in net.get_parameters() if CACHE in parameter.name)
        assert held == cache_bytes(config, 3, 32, name) == CachedDecoder(engine, net, config, 3, 32).cache_bytes


def test_a_model_that_caches_latents_cannot_have_it(folder, tmp_path):
    latent = size_config("pangu", "ultra_moe_tiny")
    (problem,) = cache_problems("int8", latent)
    assert "this model caches latents" in problem and not cache_problems("auto", latent)
    weights = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(latent).items()}
    save_checkpoint(tmp_path / "m", weights, "pangu", latent)
    with pytest.raises(ConfigError, match="this model caches latents"):
        load_model(tmp_path / "m", "pangu", latent, SINGLE_DEVICE, (2, 32), kv_cache="int8")
