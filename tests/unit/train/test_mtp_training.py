# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction next to adapters and to layers that drop tokens: their inputs reach the layers of the model."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from sporeloom.data.random_ltd import draw_kept
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.cells import CountingCell
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parts.streams import StreamsConfig
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.token_drop import attach_token_drop

SHAPE, SIZES = (2, 16), {"hidden_size": 32, "ffn_hidden_size": 32, "vocab_size": 64, "seq_len": 16}


pytestmark = pytest.mark.usefixtures("pynative")


def network(size="ultra_moe_tiny", **changes):
    config = dataclasses.replace(size_config("pangu", size), num_layers=1, **{**SIZES, "experts": None, **changes})
    ms.set_seed(1)
    return family_module("pangu", "model").ModelWithLoss(config)


def loss(net, *more):
    rng = np.random.default_rng(2)
    tokens, later, further = (rng.integers(10, 64, SHAPE).astype(np.int32) for _ in range(3))
    weights = np.full(SHAPE, 1 / 32, np.float32)
    positions = np.broadcast_to(np.arange(SHAPE[1], dtype=np.int32), SHAPE).copy()
    targets = (further, weights) if net.num_mtp else ()
    return net.set_train()(*map(Tensor, (tokens, later, positions, weights, *targets, *more))).asnumpy().item()


def with_adapters(net, rate):
    attach_adapters(net.model, LoRAConfig(r=2, lora_dropout=rate, target_modules=("all-linear",)))
    rng = np.random.default_rng(3)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(rng.normal(size=parameter.shape).astype(np.float32)))
    return net


KEYS = np.full(SHAPE, 12345679, np.int32) * np.arange(1, 17, dtype=np.int32)
STREAMS = StreamsConfig(num_streams=2, rounds=2)
INDEXER = {"layers": (0,), "top_k": 4, "num_heads": 2, "head_dim": 32}


def test_adapters_drop_their_inputs():
    net = with_adapters(network(), 0.5)
    assert loss(net, KEYS) != loss(net, 3 * KEYS)


def test_adapters_of_streams_indexer_and_sinks_drop_their_inputs():
    net = with_adapters(network("2_tiny", windows=(), indexer=INDEXER, streams=STREAMS), 0.5)
    layer, positions = net.model.set_train().layers[0], Tensor(np.tile(np.arange(16, dtype=np.int32), (2, 1)))
    (bias,), angles = net.model.biases(positions), net.model.angles(positions)
    angles = net.model.with_conv(angles, positions, None)
    x = Tensor(np.random.default_rng(4).normal(size=(32, 2 * 32)).astype(np.float32))
    first, second = (layer(x, bias, angles, None, Tensor(keys)).asnumpy() for keys in (KEYS, 3 * KEYS))
    assert np.isfinite(first).all()
    assert (first != second).any(1).all()


def test_layers_drop_tokens():
    net = network()
    undropped = loss(net)
    attach_token_drop(net.model, (0,))
    first, second = (draw_kept(5, step, (0,), np.arange(2), SHAPE, 8) for step in range(2))
    assert len({undropped, loss(net, *first), loss(net, *second)}) == 3
    everything = draw_kept(5, 0, (0,), np.arange(2), SHAPE, 16)
    assert loss(net, *everything) == pytest.approx(undropped, rel=1e-6)


def test_adapters_leave_the_balance_biases_of_routers():
    experts = dataclasses.replace(
        size_config("pangu", "ultra_moe_tiny").experts, first_dense_layers=0, balance_bias_rate=0.1
    )
    net = network(experts=experts)
    assert any(cell.balance_rate for _, cell in net.cells_and_names() if isinstance(cell, CountingCell))
    with_adapters(net, 0.0)
    assert not any(cell.balance_rate for _, cell in net.cells_and_names() if isinstance(cell, CountingCell))
