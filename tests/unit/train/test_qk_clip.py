# SPDX-License-Identifier: Apache-2.0
"""QK-clip against its formula: the logits of the heads above the threshold, and only theirs, shrink by exactly its factor."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from sporeloom.core.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.models.parameters import decoder_specs
from sporeloom.models.parts.latent_attention import LatentConfig
from sporeloom.nn.attention import Attention
from sporeloom.nn.latent_attention import LatentAttention
from sporeloom.nn.max_logits import MaxLogits
from sporeloom.train.checks import check
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.metrics import layer_metrics
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.qk_clip import QKClip
from sporeloom.train.tuning import DPOConfig

HIDDEN, HEADS, LENGTH, ROWS = 12, 4, 6, 2
LATENT = {"kv_width": 5, "nope_dim": 4, "rope_dim": 2, "value_dim": 3, "num_sinks": 2}
VISIBLE = np.tri(LENGTH, dtype=bool)


pytestmark = pytest.mark.usefixtures("pynative")


class Recorder(nn.Cell):
    """Keeps the logits that attention computes, in place of `MaxLogits`."""

    def construct(self, logits, padding):
        self.logits = logits.asnumpy()
        return Tensor(np.zeros(1, np.float32))


def attention(kind):
    if kind.startswith("latent"):
        latent = LatentConfig(query_width=6 if kind == "latent with query compression" else None, **LATENT)
        changes = {"latent": latent, "indexer": None, "windows": (), "experts": None}
        config = dataclasses.replace(size_config("pangu", "2_tiny"), hidden_size=HIDDEN, num_heads=HEADS, **changes)
    else:
        kv_heads = 2 if kind == "grouped" else HEADS
        size = dataclasses.replace(size_config("pangu", "embedded_tiny"), qkv_bias=True)
        config = dataclasses.replace(size, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=kv_heads, head_dim=4)
    build = LatentAttention if config.latent else Attention
    cell, rng = build(config, decoder_specs(config).within("layers.0.attention"), ms.float32), np.random.default_rng(1)
    for parameter in cell.get_parameters():
        parameter.set_data(Tensor(rng.normal(size=parameter.shape).astype(np.float32)))
    cell.has_losses, cell.max_logits = True, Recorder()
    return cell, config.rotary_width


def outputs(cell, width):
    """Logits (B, H, T, S) and the output."""
    rng = np.random.default_rng(2)
    x = Tensor(rng.normal(size=(ROWS * LENGTH, HIDDEN)).astype(np.float32))
    bias = np.broadcast_to(np.where(VISIBLE, 0.0, -10000.0), (ROWS, 1, LENGTH, LENGTH)).astype(np.float32)
    sinks = getattr(cell, "num_sinks", 0)
    bias = np.concatenate([np.zeros((ROWS, 1, LENGTH, sinks), np.float32), bias], -1)
    angle = rng.normal(size=(ROWS, LENGTH, 1, width // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    angles = [np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)]
    y, _ = cell(x, x, Tensor(bias), [Tensor(a.astype(np.float32)) for a in angles], None, None, (None, None))
    return np.where(bias == 0, cell.max_logits.logits, np.nan), y.asnumpy()


@pytest.mark.parametrize("kind", ["plain", "grouped", "latent", "latent with query compression"])
def test_logits_of_heads_above_the_threshold_get_its_factor_and_no_others(kind):
    cell, width = attention(kind)
    before, _ = outputs(cell, width)
    largest = np.nanmax(before, (0, 2, 3))
    threshold = float(np.sort(largest)[1:3].mean())  # two of four heads exceed it
    assert threshold > 0
    weights = {name: parameter.asnumpy().copy() for name, parameter in cell.parameters_and_names()}
    QKClip(threshold, [cell])((Tensor(largest),), Tensor(0.0))
    after, _ = outputs(cell, width)
    factors = np.minimum(1, threshold / largest)[None, :, None, None]
    assert (factors < 1).sum() == 2
    np.testing.assert_allclose(after, before * factors, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.nanmax(after, (0, 2, 3)), np.minimum(largest, threshold), rtol=1e-5)
    changed = {name for name, p in cell.parameters_and_names() if not np.array_equal(p.asnumpy(), weights[name])}
    assert (
        changed
        == {
            "plain": {"query.weight", "query.bias", "key.weight", "key.bias"},
            "grouped": {"query.weight", "query.bias"},  # keys serve heads that did not exceed it
            "latent": {"query.weight", "kv_up.weight"},
            "latent with query compression": {"query_up.weight", "kv_up.weight"},
        }[kind]
    )
    if kind.startswith("latent"):  # values stay as they are
        shape = (HEADS, LATENT["nope_dim"] + LATENT["value_dim"], -1)
        values = [
            array.reshape(shape)[:, LATENT["nope_dim"] :]
            for array in (cell.kv_up.weight.asnumpy(), weights["kv_up.weight"])
        ]
        np.testing.assert_array_equal(*values)


def test_nothing_changes_below_the_threshold_or_after_an_overflow():
    cell, width = attention("latent")
    largest = np.nanmax(outputs(cell, width)[0], (0, 2, 3))
    weights = [parameter.asnumpy().copy() for parameter in cell.get_parameters()]
    QKClip(float(largest.max()) + 1, [cell])((Tensor(largest),), Tensor(0.0))
    not_finite = np.full(HEADS, np.nan, np.float32)
    QKClip(0.1, [cell])((Tensor(not_finite),), Tensor(0.0), Tensor(True))
    for parameter, value in zip(cell.get_parameters(), weights, strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), value)


def test_the_largest_logits_are_of_each_head_and_not_of_padding():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, HEADS, LENGTH, LENGTH)).astype(np.float32) + np.where(VISIBLE, 0, -10000).astype(
        np.float32
    )
    padding = np.zeros((3, 1, LENGTH), np.float32)
    padding[2, 0, 2:] = -1e9
    logits[2, :, 2:] += 100.0
    cell = MaxLogits(HEADS)
    count = cell.attach_counter("counter.0")
    found = ms.grad(lambda x: cell(x, Tensor(padding)).sum(), grad_position=None, weights=count)(Tensor(logits))
    kept = np.concatenate([logits[:2].reshape(2, HEADS, -1), np.full((1, HEADS, LENGTH**2), -1e9)])
    kept[2, :, : 2 * LENGTH] = logits[2, :, :2].reshape(HEADS, -1)
    np.testing.assert_array_equal(found.asnumpy(), kept.max((0, 2)).astype(np.float32))


def test_metrics_name_the_layer_and_the_head():
    model = dataclasses.replace(size_config("pangu", "tiny"), num_layers=2)
    told = layer_metrics(np.array([5.0, 3.0, 1.0, 7.5, 2.0, 0.0], np.float32), model, has_logits=True)
    layer_and_head = {"max_attention_logit_layer": 1, "max_attention_logit_head": 2}
    assert told == {"max_attention_logit": 7.5, **layer_and_head, "clipped_heads": 1}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"attention": "flash", "compute_dtype": "bfloat16"},
            "FlashAttention does not return its largest logits; give --attention plain",
        ),
        ({"random_ltd_min_value": 16}, "some layers do not see the tokens that --random-ltd-min-value drops"),
        ({"qk_clip_threshold": 0.0}, "--qk-clip-threshold must be above 0"),
        ({"groups": "layers.0.attention.query.*"}, "layers.0.attention.query.weight is frozen, so it cannot be scaled"),
    ],
)
def test_what_cannot_be_clipped_is_refused(write, flags, told):
    if groups := flags.pop("groups", None):
        text = f'parameter_groups:\n  - {{match: "{groups}", freeze: true}}\n'
        flags["parameter_groups"] = write("groups.yaml", text)
    config = {"size": "embedded_tiny", "qk_clip_threshold": 100.0, **flags}
    with pytest.raises(ConfigError) as caught:
        check(TrainConfig(data=write("a.txt", "text"), **config), num_processes=1)
    assert told in str(caught.value)
    assert not issubclass(DPOConfig, MaxLogitFlags)
