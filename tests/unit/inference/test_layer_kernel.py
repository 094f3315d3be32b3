# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel of a whole layer gives what MindSpore's operators give, for every kind of layer."""

import dataclasses
import shutil

import mindspore as ms
import numpy as np
import pytest

from sporeloom.inference.model import build_model
from sporeloom.inference.quantize import quantized_weights
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.weight_formats import WEIGHT_FORMATS
from sporeloom.nn.blocks import Block
from sporeloom.nn.moe import MoE
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.tensor_slice import TensorSlice

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")

SMALL = {
    "num_layers": 2,
    "vocab_size": 64,
    "dropout_rate": 0.0,
    "seq_len": 48,
    "eod_id": 0,
    "loss_ignore_id": 0,
    "stop_ids": (),
}
MODELS = {
    "pangu": ("pangu", "tiny", {"num_layers": 3}),
    "pangu, erf": ("pangu", "tiny", {"activation": "gelu", "query_layer": False, "qkv_bias": False}),
    "codegeex": ("codegeex", "tiny", {"num_layers": 3}),
    "embedded": ("pangu", "embedded_tiny", {}),
    "sandwich": ("pangu", "embedded_tiny", {"block": "sandwich", "sandwich_gains": (0.5, 0.7)}),
    "sandwich, layer": ("pangu", "embedded_tiny", {"block": "sandwich", "norm": "layer", "norm_bias": False}),
    "codegeex4": ("codegeex", "4_tiny", {}),
    "palm": ("palm", "tiny", {}),
}
FEW = {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 48, "normalize": "before_drop"}
EXPERTS = {
    "switch": ("pangu", "switch_tiny", {"num_layers": 4}),
    "gshard": ("pangu", "gshard_tiny", {"num_layers": 4}),
    "grouped": (
        "pangu",
        "embedded_tiny",
        {"experts": {**FEW, "router": "grouped", "shared_ffn_hidden_size": 32, "first_dense_layers": 1}},
    ),
    "sandwich": (
        "pangu",
        "embedded_tiny",
        {"block": "sandwich", "num_layers": 4, "experts": {**FEW, "layer_frequency": 2, "capacity_factor": 0.5}},
    ),
    "parallel": ("palm", "tiny", {"num_layers": 3, "experts": {**FEW, "router": "sigmoid", "layer_frequency": 3}}),
}
"""Models of which some layers have experts, and others the kernel."""
ADAPTERS = {
    "none": {},
    "one": {"lora": LoRAConfig(r=2, lora_alpha=2.0, target_modules=("layers.1.attention.query",))},
    "several": {"ranks": {"layers.0.attention.query": (2, 3), "layers.1.attention.value": (2, 0)}},
}
ROWS, SLOTS = 3, 32


@pytest.fixture(scope="module")
def engine():
    ms.set_device("CPU")
    return Engine.start(SINGLE_DEVICE)


def logits_of(engine, family, config, weights, monkeypatch, switch, adapters="none"):
    """Of five tokens of three rows, one after the other, that begin at different places of their caches; then of four tokens
    of one row at once."""
    monkeypatch.setenv("SPORELOOM_KERNELS", switch)
    net = build_model(family, config, SINGLE_DEVICE, (ROWS, SLOTS), WEIGHT_FORMATS[weights], **ADAPTERS[adapters])
    draw = np.random.default_rng(5)
    plain = build_model(family, config, SINGLE_DEVICE, **ADAPTERS[adapters])
    exact = {p.name: draw.normal(0, 0.3, p.shape).astype(np.float32) for p in plain.get_parameters()}

    def read(name, part):
        return exact[name][part.slices]

    read = quantized_weights(net, read, WEIGHT_FORMATS[weights]) if weights != "float32" else read
    for parameter in net.get_parameters():
        if ".cache." not in parameter.name:
            parameter.set_data(ms.Tensor(read(parameter.name, TensorSlice.full(parameter.shape))))
        else:
            cache = np.random.default_rng(6).normal(0, 1, parameter.shape)
            parameter.set_data(ms.Tensor(cache.astype(np.float32)))
    assert any(cell.has_kernel for _, cell in net.cells_and_names() if isinstance(cell, Block)) == (switch == "1")
    assert all(cell.has_kernel == (switch == "1") for _, cell in net.cells_and_names() if isinstance(cell, MoE))
    found = []
    for step in range(5):
        tokens = np.asarray([[7 + step], [3], [11]], np.int32)
        positions = np.asarray([[step], [9 + step], [20 + step]], np.int32)
        slots = np.zeros((ROWS, config.kv_heads, 1, 3), np.int32)
        slots[..., 0], slots[..., 2] = np.arange(ROWS)[:, None, None], positions[:, :, None]
        slots[..., 1] = np.arange(config.kv_heads)[:, None]
        inputs = [tokens, positions, np.arange(ROWS, dtype=np.int32), slots]
        inputs += [np.asarray([[0], [1], [2]], np.int32)] if adapters == "several" else []
        found.append(engine.run(net, *map(ms.Tensor, inputs)).asnumpy())
    tokens, positions = (
        np.asarray([[5, 9, 2, 8]], np.int32),
        np.asarray([[25, 26, 27, 28]], np.int32),
    )  # of the last row
    slots = np.zeros((1, config.kv_heads, 4, 3), np.int32)
    slots[..., 0], slots[..., 2] = 2, positions
    slots[..., 1] = np.arange(config.kv_heads)[:, None]
    inputs = [tokens, positions, np.arange(4, dtype=np.int32), slots]
    inputs += [np.full((1, 4), 2, np.int32)] if adapters == "several" else []
    found.append(engine.run(net, *map(ms.Tensor, inputs)).asnumpy())
    return np.concatenate(found)


@pytest.mark.parametrize("several", [False, True], ids=["LoRA", "several adapters"])
def test_a_layer_with_adapters_anywhere_is_left_to_its_operators(monkeypatch, several):
    monkeypatch.setenv("SPORELOOM_KERNELS", "1")
    config = dataclasses.replace(size_config("pangu", "embedded_tiny"), **SMALL)
    lora = LoRAConfig(r=2, lora_alpha=2.0, lora_dropout=0.0, target_modules=("layers.0.mlp.gate",), use_rslora=False)
    adapters = {"ranks": {"layers.0.mlp.gate": (2,)}} if several else {"lora": lora}
    net = build_model("pangu", config, SINGLE_DEVICE, (ROWS, SLOTS), **adapters)
    assert [layer.has_kernel for layer in net.layers] == [False, True]
    assert not net.rows_are_alone
    assert build_model("pangu", config, SINGLE_DEVICE, (ROWS, SLOTS)).rows_are_alone


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, "int4-g32") for name in MODELS]
    + [("codegeex4", "float32"), ("sandwich, layer", "float32"), ("pangu", "int8"), ("palm", "int8")],
)
def test_a_layer_gives_what_its_operators_give(engine, monkeypatch, name, weights):
    family, size, changes = MODELS[name]
    config = dataclasses.replace(size_config(family, size), **{**SMALL, **changes})
    got = logits_of(engine, family, config, weights, monkeypatch, "1")
    wanted = logits_of(engine, family, config, weights, monkeypatch, "0")
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_so_it_does_with_int8_activations(engine, monkeypatch):
    """Nearly: its sums are exact, but inputs of products differ in the last bits of a float, and where such a difference
    crosses the middle of two steps, a number becomes the next int8."""
    config = dataclasses.replace(size_config("pangu", "embedded_tiny"), **SMALL)
    got = logits_of(engine, "pangu", config, "w8a8", monkeypatch, "1")
    wanted = logits_of(engine, "pangu", config, "w8a8", monkeypatch, "0")
    furthest = np.abs(wanted).max()
    assert furthest > 0.1 and np.median(np.abs(got - wanted)) <= 1e-5 * furthest
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-3 * furthest)


@pytest.mark.parametrize(
    ("name", "weights", "adapters"),
    [
        ("sandwich", "float32", "none"),
        ("parallel", "int8", "none"),
        ("grouped", "int8", "one"),
        ("gshard", "int4-g32", "none"),
        ("switch", "int4-asym-g32", "several"),
    ],
)
def test_so_does_a_model_with_experts_in_some_layers(engine, monkeypatch, name, weights, adapters):
    """A token's experts depend on it alone, so nothing tells the two ways apart."""
    family, size, changes = EXPERTS[name]
    config = dataclasses.replace(size_config(family, size), **{**SMALL, **changes})
    some = [config.has_experts(layer) for layer in range(config.num_layers - config.query_layer)]
    assert any(some) and not all(some)
    got = logits_of(engine, family, config, weights, monkeypatch, "1", adapters)
    wanted = logits_of(engine, family, config, weights, monkeypatch, "0", adapters)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
