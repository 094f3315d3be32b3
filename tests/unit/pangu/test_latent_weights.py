# SPDX-License-Identifier: Apache-2.0
"""Published folders with latent attention: both generations of keys, tensors that are stored twice, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import CONFIGS, shared
from safetensors.numpy import load_file, save_file

from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import Batch, mtp_targets
from sporeloom.models.config import NO_LABEL
from sporeloom.models.family import family_module, size_config
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.loader import load_strategy

ULTRA = "golden_v3/pangu_ultra_moe/case_a"


def folder_of(tmp_path, config, tensors):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def ultra():
    return json.loads(shared(f"{ULTRA}/config.json").read_text()), load_file(shared(f"{ULTRA}/model.safetensors"))


def test_the_first_releases_keys_are_the_same_model(tmp_path):
    _, tensors = ultra()
    first = json.loads(shared(f"{ULTRA}/config_v1_names.json").read_text())
    assert "attention_kv_lora_dim" in first and "kv_lora_rank" not in first
    assert open_published(folder_of(tmp_path, first, tensors)).model == open_published(shared(ULTRA)).model


def test_tensors_that_are_stored_twice_are_compared(tmp_path):
    config, tensors = ultra()
    copies = {
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"],
    }
    (tmp_path / "same").mkdir()
    found = open_published(folder_of(tmp_path / "same", config, {**tensors, **copies}))
    assert not copies.keys() & found.tensors.keys()
    import_published(found, tmp_path / "ours")
    export_published(tmp_path / "ours", tmp_path / "again", model_type="pangu_ultra_moe")
    again = load_file(tmp_path / "again/model.safetensors")
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in {**tensors, **copies}.items()}
    copies["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"layers.3.embed_tokens.weight is not model.embed_tokens.weight"):
        open_published(folder_of(tmp_path / "other", config, {**tensors, **copies}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sandwich_norm": False}, "sandwich_norm is False; only True is supported"),
        ({"attention_kv_lora_dim": 12}, "kv_lora_rank 11 and attention_kv_lora_dim 12 contradict each other"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1; latent attention has as many as num_attention_heads 3"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"use_mome": True}, "use_mome is True; only False is supported"),
        ({"param_sink_number": 128}, "param_sink_number is 128; only False is supported"),
        ({"index_topk": 2048}, "index_topk is 2048; only None is supported"),
        ({"sliding_window_list": [512]}, "sliding_window_list is [512]; only None is supported"),
    ],
)
def test_networks_that_are_not_built_are_refused_by_their_keys(change, words, tmp_path):
    config, tensors = ultra()
    with pytest.raises(ConfigError) as error:
        open_published(folder_of(tmp_path, {**config, **change}, tensors))
    assert words in str(error.value)


def test_a_deepseek_model_may_consist_of_mlps():
    (way,) = [way for way in family_module("pangu", "weights").PUBLISHED if way.model_type == "deepseek_v3"]
    values = json.loads(shared("golden_v3/deepseek_mla/case_a/plain/config.json").read_text())
    assert way.read(values)["experts"]["correction_bias"]
    all_dense = way.read({**values, "first_k_dense_replace": values["num_hidden_layers"]})
    assert all_dense["experts"] is None


def test_further_predictions_stay_within_documents():
    tokens = np.array([[5, 6, 9, 7, 8, 4]], np.int32)
    labels = np.array([[6, 9, 7, 8, 4, 3]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2]], np.int32)
    weights = np.array([[1, 1, 0, 1, 1, 1]], np.float32) / 5
    first, of_first, second, of_second = mtp_targets(Batch(tokens, labels, positions, weights), 2)
    no = NO_LABEL
    np.testing.assert_array_equal(first, [[9, 7, no, 4, 3, no]])
    np.testing.assert_allclose(of_first, np.array([[1, 0, 0, 1, 1, 0]]) / 5 * 6 / 5, rtol=1e-6)
    np.testing.assert_array_equal(second, [[7, no, no, 3, no, no]])
    np.testing.assert_allclose(of_second, np.array([[0, 0, 0, 1, 0, 0]]) / 5 * 6 / 4, rtol=1e-6)
    whole = Batch(tokens, labels, np.arange(6, dtype=np.int32)[None], np.full((1, 6), 1 / 6, np.float32))
    assert [float(w.sum()) for w in mtp_targets(whole, 2)[1::2]] == pytest.approx([1, 1])
    assert not mtp_targets(whole, 7)[-1].any()


def test_only_a_pipeline_of_mindspore_refuses_further_predictions():
    strategy = load_strategy(CONFIGS / "pangu_tiny_dp2_pp2.yaml")
    config = dataclasses.replace(size_config("pangu", "ultra_moe_tiny"), experts=None)
    assert not model_problems(strategy, config)
    theirs = dataclasses.replace(strategy, engine="mindspore")
    assert "the last of mesh.pp = 2 stages uses the embedding" in "\n".join(model_problems(theirs, config))
    assert not model_problems(theirs, dataclasses.replace(config, num_mtp_layers=0))


TWO = "golden_v3/openpangu2/case_a"


def two(**changes):
    (way,) = [way for way in family_module("pangu", "weights").PUBLISHED if way.model_type == "openpangu_v2"]
    return way, {**json.loads(shared(f"{TWO}/config.json").read_text()), **changes}


def test_windows_are_those_of_the_lists_further_predictions_among_them():
    way, values = two(swa_layers=[0, 2, 5], sliding_window_list=[4, 6, 9], dsa_layers=[1])
    assert way.read(values)["windows"] == [4, 0, 6, 0, 0, 9, 0]
    values["sliding_window_list"] = None
    assert way.read(values)["windows"] == [5, 0, 5, 0, 0, 5, 0]
    assert way.read({**values, "swa_layers": []})["windows"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window_list": [5]}, "sliding_window_list has 1 entries for the 5 of swa_layers"),
        ({"swa_layers": [1, 2, 4, 5, 7]}, "swa_layers: there is no layer 7; the last one is 6"),
        ({"sliding_window_list": [5, 5, 7, 7, 0]}, "0 is not a window for layer 6"),
        ({"sandwich_norm": False}, "sandwich_norm is False; only True is supported"),
        ({"param_sink_with_value": False}, "param_sink_with_value is False; only True is supported"),
        ({"use_mhc": False}, "block_post_layernorm_idx is for use_mhc true"),
    ],
)
def test_networks_of_openpangu_2_that_are_not_built_are_refused_by_their_keys(changes, words):
    way, values = two(**changes)
    with pytest.raises(ConfigError, match=words):
        way.read(values)
