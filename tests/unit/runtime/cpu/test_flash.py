# SPDX-License-Identifier: Apache-2.0
"""NumPy's FlashAttentionScore against differences of itself, and attention as its formula says it."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.ops.operations.nn_ops import FlashAttentionScore

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.runtime.cpu.flash import attention, attention_gradient, exchange_flash_attention, statistics
from sporeloom.runtime.spmd.compile import compile_for_one_device

SCALE = 0.3


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.normal(size=(2, heads, 5, 4)) for heads in (4, 2, 2, 4))
    hidden = np.triu(np.ones((5, 5), np.uint8), 1)[None, None].repeat(2, 0)
    hidden[1, 0, 3:, :2] = 1  # a second document
    return [x.astype(np.float32) for x in (q, k, v)], hidden, dy.astype(np.float32)


def test_each_query_sees_what_is_not_hidden(tensors):
    (q, k, v), hidden, _ = tensors
    found = attention(q, k, v, hidden, SCALE)
    for b, h, t in np.ndindex(2, 4, 5):
        seen = hidden[b, 0, t] == 0
        weights = np.exp(SCALE * k[b, h // 2, seen] @ q[b, h, t])
        np.testing.assert_allclose(found[b, h, t], weights / weights.sum() @ v[b, h // 2, seen], rtol=1e-5, atol=1e-6)


def test_what_is_kept_of_a_row_restores_its_probabilities(tensors):
    (q, k, v), hidden, _ = tensors
    most, total = (statistics(q, k, v, hidden, SCALE, of)[..., :1] for of in (0, 1))
    scores = SCALE * np.einsum("bhtd,bhsd->bhts", q, k.repeat(2, 1))
    probs = np.where(hidden == 0, np.exp(scores - most) / total, 0)
    np.testing.assert_allclose(probs @ v.repeat(2, 1), attention(q, k, v, hidden, SCALE), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", [0, 1, 2])
def test_gradients_are_those_of_differences(tensors, of):
    inputs, hidden, dy = tensors
    direction = np.random.default_rng(of).normal(size=inputs[of].shape).astype(np.float32)

    def moved(by):
        changed = [x + by * direction if place == of else x for place, x in enumerate(inputs)]
        return float((attention(*changed, hidden, SCALE).astype(np.float64) * dy).sum())

    expected = (moved(1e-2) - moved(-1e-2)) / 2e-2
    found = (attention_gradient(*inputs, hidden, dy, SCALE, of) * direction).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def small(**changes):
    return ModelConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, **{"dropout_rate": 0.0, **changes})


def test_what_the_kernel_does_not_take_is_told():
    with pytest.raises(ConfigError, match="heads of 24 features; it takes multiples of 16"):
        small(head_dim=24, attention="flash")
    with pytest.raises(ConfigError, match=r"dropout_rate 0\.1"):
        small(dropout_rate=0.1, attention="flash")


LATENT = {"kv_width": 32, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"value_dim": 8}, "values of 8 features; latent attention takes 16 to 48 of them"),
        ({"value_dim": 64}, "values of 64 features; latent attention takes 16 to 48 of them"),
        ({"nope_dim": 24}, "heads of 40 features; it takes multiples of 16"),
    ],
)
def test_what_the_kernel_does_not_take_of_latent_attention_is_told(changes, told):
    for given in (changes, {}):
        parts = {"position": "rotary", "norm": "rms", "query_layer": False}
        config = {**parts, "latent": {**LATENT, **given}}
        if given:
            with pytest.raises(ConfigError, match=told):
                small(**config, attention="flash")
        assert small(**config, compute_dtype="bfloat16").attention_on_ascend == ("plain" if given else "flash")


def test_ascend_has_it_unless_something_is_in_the_way():
    half = {"compute_dtype": "bfloat16"}
    assert small(**half).attention_on_ascend == "flash"
    for config in (
        small(),
        small(**half, dropout_rate=0.1),
        small(**half, head_dim=24),
        small(**half, attention="plain"),
    ):
        assert config.attention_on_ascend == "plain"


class Attending(nn.Cell):
    def __init__(self, has_mask, **settings):
        super().__init__()
        self.attend, self.has_mask = FlashAttentionScore(2, **settings), has_mask

    def construct(self, q, k, v, hidden):
        mask = hidden if self.has_mask else None
        return self.attend(q, k, v, None, None, None, mask, None)[3]


def exchanged(has_mask=True, **settings):
    ms.set_context(mode=ms.GRAPH_MODE)
    cell = Attending(has_mask, **{"scale_value": SCALE, "input_layout": "BNSD", **settings})
    shape = ((2, 2, 2, 4), np.float16)
    model = compile_for_one_device(cell, [shape, shape, shape, ((2, 1, 2, 2), np.uint8)])
    exchange_flash_attention(model)
    return {p.op_type for p in model.primitives if any(f"REF::{p.name}" == n.op_type for n in model.graph.node)}


def test_the_kernel_is_exchanged():
    assert "FlashAttentionScore" not in exchanged()


@pytest.mark.parametrize(
    "form", [{"has_mask": False}, {"input_layout": "BSND"}, {"sparse_mode": 2}, {"pre_tokens": 1}, {"keep_prob": 0.9}]
)
def test_another_form_is_refused(form):
    with pytest.raises(ConfigError, match=r"FlashAttentionScore of .*CPU processes compute it for inputs"):
        exchanged(**form)
