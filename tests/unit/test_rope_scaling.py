# SPDX-License-Identifier: Apache-2.0
"""Scaled RoPE is that of float64 formulas and of transformers, and what a config.json says of it is read and written."""

import dataclasses
import json

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from mindspore import Tensor

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.published import read_rope
from sporeloom.models.rope_scaling import RopeScaling, frequencies, written_scaling
from sporeloom.nn.decoder import Decoder
from sporeloom.nn.rotary import Angles

GOLDEN = "golden_v3/yarn/case_a"
SETS = (
    *("plain", "linear_4", "dynamic_2", "yarn_default", "yarn_deepseek_v3", "yarn_qwen", "yarn_attention_factor"),
    *("llama3_1", "partial_yarn", "fixed_ntk_4"),
)


def described(name):
    (found,) = [
        entry for entry in json.loads(shared(f"{GOLDEN}/config.json").read_text())["sets"] if entry["name"] == name
    ]
    return found


def model_of(entry):
    rope = read_rope(
        {
            "rope_theta": entry["theta"],
            "max_position_embeddings": entry["max"],
            "rope_scaling": entry["rope"],
        }
    )
    width = entry.get("head", entry["dim"])
    return ModelConfig(
        vocab_size=16,
        hidden_size=width,
        num_layers=1,
        num_heads=1,
        query_layer=False,
        position="rotary",
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_dim=entry["dim"],
        seq_len=4 * entry["max"],
    )


@pytest.mark.parametrize("name", SETS)
def test_frequencies_and_angles_are_the_published_ones(name):
    ms.set_device("CPU")
    entry, golden = described(name), np.load(shared(f"{GOLDEN}/golden.npz"))
    model = model_of(entry)
    scaling, dim = model.rope_scaling, entry["dim"]
    for length in entry["lengths"] or [None]:
        prefix = f"{name}." + (f"length_{length}." if length else "")
        wanted = golden[f"{prefix}inv_freq"]
        np.testing.assert_allclose(frequencies(model.rope_theta, dim, scaling, length), wanted, rtol=1e-12)
        positions = golden[f"{prefix}positions"]
        fed = np.arange(length) if length else positions  # a document of that length
        places = np.searchsorted(fed, positions)
        cos, sin = (t.asnumpy()[0, :, 0][places] for t in Angles(model)(Tensor(fed[None].astype(np.int32))))
        bound = 2e-6 + 4e-7 * positions[:, None]
        assert (np.abs(cos[:, : dim // 2] - golden[f"{prefix}cos"]) <= bound).all()
        assert (np.abs(sin[:, dim // 2 : dim] - golden[f"{prefix}sin"]) <= bound).all()
        assert (sin[:, : dim // 2] == -sin[:, dim // 2 : dim]).all()
        assert (cos[:, dim:] == 1).all() and (sin[:, dim:] == 0).all()
    assert (scaling.of_angles if scaling else 1.0) == pytest.approx(entry["attention_factor"], rel=1e-12)
    if factor := entry.get("deepseek_softmax_scale_factor"):
        assert scaling.of_latent_scores == pytest.approx(factor, rel=1e-12)


def test_dynamic_scaling_depends_on_a_tokens_own_document_only():
    ms.set_device("CPU")
    model = model_of(described("dynamic_2"))
    packed = np.concatenate([np.arange(96), np.arange(32)])[None].astype(np.int32)
    both = [t.asnumpy()[0] for t in Angles(model)(Tensor(packed))]
    alone = [
        [t.asnumpy()[0] for t in Angles(model)(Tensor(np.arange(length)[None].astype(np.int32)))] for length in (96, 32)
    ]
    for which in (0, 1):
        np.testing.assert_array_equal(both[which][:96], alone[0][which])
        np.testing.assert_array_equal(both[which][96:], alone[1][which])
    with pytest.raises(ConfigError, match="longer than original_seq_len 64"):
        Decoder(model).attach_caches(1, 256)
    short = dataclasses.replace(model, seq_len=64)
    Decoder(short).attach_caches(1, 128)


@pytest.mark.parametrize("name", [name for name in SETS if name != "plain"])
def test_what_is_written_is_read_again(name):
    entry = described(name)
    scaling = model_of(entry).rope_scaling
    again = read_rope({"max_position_embeddings": entry["max"], **written_scaling(scaling)}).scaling
    assert RopeScaling(**again) == scaling


def test_yarn_without_whole_limits_is_written_and_read():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_seq_len=64, truncate=False)
    assert RopeScaling(**read_rope(written_scaling(scaling)).scaling) == scaling
    whole = frequencies(1e4, 32, dataclasses.replace(scaling, truncate=True))
    found = frequencies(1e4, 32, scaling)
    low, high = (32 * np.log(64 / (2 * np.pi * n)) / (2 * np.log(1e4)) for n in (32, 1))
    ramp = np.clip((np.arange(16) - max(low, 0)) / (high - max(low, 0)), 0, 1)
    plain = 1e4 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(found, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-12)
    assert found != whole


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_type": "yarn"}, "rope_scaling.factor is missing; yarn scaling needs it"),
        ({"rope_type": "longrope", "factor": 2}, "rope_scaling.rope_type is 'longrope', which is not supported"),
        ({"rope_type": "llama3", "factor": 8}, "rope_scaling.original_max_position_embeddings is missing"),
        (
            {"rope_type": "linear", "factor": 2, "beta_fast": 4},
            "rope_scaling.beta_fast is 4; linear scaling has no such",
        ),
        ({"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor must be a number, got '4'"),
        ({"rope_type": "yarn", "factor": 4, "truncate": 0}, "rope_scaling.truncate must be true or false, got 0"),
        (
            {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 32},
            "starts from max_position_embed",
        ),
    ],
)
def test_what_is_no_scaling_is_refused_by_its_key(given, words):
    with pytest.raises(ConfigError) as error:
        read_rope({"max_position_embeddings": 64, "rope_scaling": given})
    assert words in str(error.value)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1.6e7])
def test_plain_frequencies_are_correctly_rounded(theta):
    """NumPy's float32 powers are not, and have other bits where the result follows on the exponents in memory."""
    ms.set_device("CPU")
    config = model_of({"theta": theta, "max": 128, "rope": None, "dim": 64})
    exponents = np.arange(0, 64, 2, dtype=np.float32) / np.float32(64)
    powers = (np.longdouble(theta) ** exponents.astype(np.longdouble)).astype(np.float32)
    np.testing.assert_array_equal(Angles(config).frequency.asnumpy(), np.tile(np.float32(1) / powers, 2))
