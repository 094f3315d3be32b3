# SPDX-License-Identifier: Apache-2.0
"""Parts of openPangu 2.0 against their formulas, with other settings than the published ones."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from sporeloom.models.family import size_config
from sporeloom.models.parameters import decoder_specs
from sporeloom.models.parts.spec import InitialValue, ParameterSpec, ParameterSpecs
from sporeloom.models.parts.streams import StreamsConfig
from sporeloom.nn.attention import SlotMask, WindowMask
from sporeloom.nn.causal_conv import CausalConv, ConvPlaces
from sporeloom.nn.hyper_connections import StreamReader, StreamWriter

WIDTH, CHANNELS, LENGTH = 4, 3, 11
CONV = ParameterSpecs.of([ParameterSpec("weight", (CHANNELS, 1, WIDTH), InitialValue("normal", 1.0))])
POSITIONS = np.array([[*range(7), *range(4)], [*range(2), *range(9)]], np.int32)


pytestmark = pytest.mark.usefixtures("pynative")


def inside(positions):
    return Tensor((positions >= WIDTH - 1).astype(np.float32)[..., None])


def convolved(z, weight, positions):
    """z (B, T, C) by the formula."""
    y = z.copy()
    for row, token in np.ndindex(*positions.shape):
        if positions[row, token] >= WIDTH - 1:
            y[row, token] += sum(weight[:, 0, WIDTH - 1 - j] * z[row, token - j] for j in range(WIDTH))
    return y


def test_convolutions_stay_within_documents():
    z = np.random.default_rng(1).normal(size=(2, LENGTH, CHANNELS)).astype(np.float32)
    conv = CausalConv(CONV, ms.float32)
    found = conv(Tensor(z.reshape(-1, CHANNELS)), (inside(POSITIONS),)).asnumpy().reshape(z.shape)
    np.testing.assert_allclose(found, convolved(z, conv.weight.asnumpy(), POSITIONS), atol=1e-6)


def test_convolutions_of_a_few_tokens_at_a_time_are_the_same():
    """Two rows of three: parts of several tokens with padding, single tokens, and a row that gets none."""
    z = np.random.default_rng(2).normal(size=(3, LENGTH, CHANNELS)).astype(np.float32)
    conv, places, spare = CausalConv(CONV, ms.float32), ConvPlaces(WIDTH, 100, WIDTH + 2), 99
    conv.attach_cache(3, 2)
    done, found = [0, 0, 0], np.zeros_like(z)
    for parts, length in (({2: 5}, 8), ({0: 2}, 4), ({0: 1, 2: 1}, 1), ({2: 2}, 4), ({0: 1, 2: 1}, 1), ({0: 3}, 4)):
        rows = [next(iter(parts))] if length > 1 else [0, 1, 2]
        fed, slots = np.zeros((len(rows), length, CHANNELS), np.float32), np.full((len(rows), 1, length, 3), spare)
        positions = np.zeros((len(rows), length), np.int32)
        for place, row in enumerate(rows):
            count = parts.get(row, 0)
            fed[place, :count] = z[row, done[row] : done[row] + count]
            positions[place, :count] = slots[place, 0, :count, 2] = np.arange(done[row], done[row] + count)
            slots[place, ..., 0], slots[place, ..., 1] = row, 0
        where = inside(positions), *places(Tensor(slots.astype(np.int32)))
        y = conv(Tensor(fed.reshape(-1, CHANNELS)), where).asnumpy().reshape(fed.shape)
        for place, row in enumerate(rows):
            count = parts.get(row, 0)
            found[row, done[row] : done[row] + count] = y[place, :count]
            done[row] += count
    assert done == [7, 0, 9]
    whole = convolved(z, conv.weight.asnumpy(), np.broadcast_to(np.arange(LENGTH), (3, LENGTH)))
    for row, count in enumerate(done):
        np.testing.assert_allclose(found[row, :count], whole[row, :count], atol=1e-6)


def test_windows_count_the_token_itself_and_stay_within_documents():
    seen = WindowMask(3, 2)(Tensor(POSITIONS)).asnumpy()[:, 0] == 0
    for row, query, key in np.ndindex(2, LENGTH, LENGTH):
        near = 0 <= query - key < min(3, POSITIONS[row, query] + 1)
        assert seen[row, query, 2 + key] == near
    assert seen[..., :2].all()
    cached = SlotMask(LENGTH, 2, 3)(Tensor(np.arange(LENGTH, dtype=np.int32)[None])).asnumpy()[0, 0] == 0
    np.testing.assert_array_equal(
        cached, WindowMask(3, 2)(Tensor(np.arange(LENGTH, dtype=np.int32)[None])).asnumpy()[0, 0] == 0
    )


def test_streams_are_read_mixed_and_written_by_the_formula():
    rng, n, rounds = np.random.default_rng(3), 3, 3
    config = size_config("pangu", "2_tiny").to_dict() | {
        "streams": {"num_streams": n, "rounds": rounds},
        "hidden_size": 8,
    }
    config = type(size_config("pangu", "2_tiny"))(**config)
    assert config.streams == StreamsConfig(num_streams=n, rounds=rounds)
    specs = decoder_specs(config).within("layers.0.mlp_streams")
    reader, writer = StreamReader(config, specs), StreamWriter(config)
    x, y = rng.normal(size=(5, n * 8)).astype(np.float32), rng.normal(size=(5, 8)).astype(np.float32)
    gamma, phi = rng.normal(size=n * 8), rng.normal(size=(n * (n + 2), n * 8))
    alpha, beta = rng.normal(size=3), rng.normal(size=n * (n + 2))
    for parameter, value in zip(
        (reader.norm.weight, reader.gates.weight, reader.alpha, reader.beta), (gamma, phi, alpha, beta), strict=True
    ):
        parameter.set_data(Tensor(value.astype(np.float32)))
    read, gates = reader(Tensor(x))
    found = writer(Tensor(x), Tensor(y), gates).asnumpy()
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer_norm_epsilon) * gamma
    pre, post, mixing = np.split(normed @ phi.T, [n, 2 * n], -1)
    streams = x.reshape(5, n, 8)
    pre = 1 / (1 + np.exp(-(pre * alpha[0] + beta[:n]))) + 1e-6
    np.testing.assert_allclose(read.asnumpy(), (pre[..., None] * streams).sum(1), atol=1e-5)
    post = 2 / (1 + np.exp(-(post * alpha[1] + beta[n : 2 * n])))
    mixing = np.exp((mixing * alpha[2] + beta[2 * n :]).reshape(5, n, n))
    mixing = mixing / mixing.sum(2, keepdims=True) + 1e-6
    mixing = mixing / (mixing.sum(1, keepdims=True) + 1e-6)
    for _ in range(rounds - 1):
        mixing = mixing / (mixing.sum(2, keepdims=True) + 1e-6)
        mixing = mixing / (mixing.sum(1, keepdims=True) + 1e-6)
    expected = post[..., None] * y[:, None] + np.einsum("bsd,bsf->bdf", mixing, streams)
    np.testing.assert_allclose(found.reshape(5, n, 8), expected, atol=1e-5)
