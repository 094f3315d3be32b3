# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT writes them, on published weights: logits, loss and gradients are the reference implementation's."""

import dataclasses
import json
import shutil

import mindspore as ms
import numpy as np
import pytest
from conftest import shared, tool
from mindspore import ParameterTuple, Tensor
from safetensors.numpy import load_file, save_file

from sporeloom.checkpoint.adapters import Adapter, merge, read_adapter, write_adapter
from sporeloom.checkpoint.huggingface import import_published, open_published
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import HASHES
from sporeloom.data.batch import Batch
from sporeloom.models.family import family_module
from sporeloom.models.parameters import parameter_shapes
from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.nn.lora import attach_adapters

CASES = ("attn_mlp", "attn_only")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    import_published(open_published(shared("golden_modern/openpangu_embedded_case_a/untied")), folder)
    return folder


@pytest.fixture(scope="module")
def opened(base):
    """case -> (golden, gradients, adapter, the model with it)."""
    ms.set_device("CPU")
    family, config = load_config(base)

    def build(case):
        source = shared(f"golden_modern/lora_case_a/{case}")
        adapter = read_adapter(source, family, config)
        model = family_module(family, "model").Model(config)
        attach_adapters(model, adapter.lora)
        weights = {**load_weights(base), **adapter.weights}
        for parameter in model.get_parameters():
            parameter.set_data(Tensor(weights.pop(parameter.name)))
        assert not weights
        return np.load(source / "golden.npz"), dict(np.load(source / "grads.npz")), adapter, model.set_train(False)

    return {case: build(case) for case in CASES}


def logits_of(model, ids):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).astype(np.int32)
    return model(Tensor(ids.astype(np.int32)), Tensor(positions)).asnumpy().reshape(*ids.shape, -1)


@pytest.mark.parametrize("case", CASES)
def test_logits_beside_the_base_and_merged(opened, base, case):
    golden, _, adapter, model = opened[case]
    ids = golden["input_ids"]
    np.testing.assert_allclose(logits_of(model, ids), golden["logits_after"], rtol=0, atol=2e-4)
    weights = merge(load_weights(base), adapter)
    for key in [key for key in golden.files if key.startswith("merged.")]:
        theirs = {"q_proj": "attention.query", "v_proj": "attention.value", "down_proj": "mlp.down"}
        layer, leaf = key.split(".")[3], key.split(".")[-2]
        ours = weights[f"layers.{layer}.{theirs[leaf]}.weight"]
        np.testing.assert_allclose(ours, golden[key], rtol=1e-6, atol=1e-6)
    family, config = load_config(base)
    plain = family_module(family, "model").Model(config).set_train(False)
    for parameter in plain.get_parameters():
        parameter.set_data(Tensor(weights[parameter.name]))
    np.testing.assert_allclose(logits_of(plain, ids), golden["logits_merged"], rtol=0, atol=2e-4)
    back = merge(weights, adapter, -1.0)
    for name, value in load_weights(base).items():
        np.testing.assert_allclose(back[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_rank_stabilized_scale(opened, base):
    golden, _, adapter, _ = opened["attn_only"]
    stable = Adapter(dataclasses.replace(adapter.lora, use_rslora=True), adapter.weights)
    family, config = load_config(base)
    plain, weights = family_module(family, "model").Model(config).set_train(False), merge(load_weights(base), stable)
    for parameter in plain.get_parameters():
        parameter.set_data(Tensor(weights[parameter.name]))
    np.testing.assert_allclose(logits_of(plain, golden["input_ids"]), golden["logits_rslora"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_adapters_alone(opened, base, case):
    golden, gradients, _, model = opened[case]
    ids = golden["input_ids"].astype(np.int32)
    rows, length = ids.shape
    labels, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    labels[:, :-1], weights[:, :-1] = ids[:, 1:], 1 / (rows * (length - 1))
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    batch = Batch(ids, labels, np.ascontiguousarray(positions), weights)
    net = DecoderWithLoss(model)
    trained = ParameterTuple(net.trainable_params())
    assert len(trained) == len(gradients)
    inputs = [Tensor(array) for array in batch]
    loss, found = ms.value_and_grad(net, None, trained)(*inputs)
    np.testing.assert_allclose(loss.asnumpy(), golden["loss_after"], rtol=1e-5)
    leaves = {"query": "self_attn.q_proj", "value": "self_attn.v_proj"}
    leaves |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for parameter, gradient in zip(trained, found, strict=True):
        layer, leaf, end = (parameter.name.split(".")[place] for place in (-4, -2, -1))
        key = f"base_model.model.model.layers.{layer}.{leaves[leaf]}.lora_{end[-1].upper()}.weight"
        wanted = gradients[key]
        np.testing.assert_allclose(gradient.asnumpy(), wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=key)


def test_a_folder_is_written_as_it_was_read(opened, base, tmp_path):
    family, config = load_config(base)
    for case in CASES:
        adapter = opened[case][2]
        write_adapter(tmp_path / case, adapter, family, config, base)
        source = shared(f"golden_modern/lora_case_a/{case}")
        theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (source, tmp_path / case))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_array_equal(ours[key], value)
        wanted, found = (
            json.loads((folder / "adapter_config.json").read_text()) for folder in (source, tmp_path / case)
        )
        for key in ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "task_type"):
            assert found[key] == wanted[key], key


def test_a_folder_of_adapters_is_a_checkpoint(opened, base, tmp_path):
    family, config = load_config(base)
    adapter = opened["attn_only"][2]
    write_adapter(tmp_path / "adapter", adapter, family, config, base)
    (tmp_path / "adapter/chat_template.jinja").write_text("{{ messages }}")
    assert load_config(tmp_path / "adapter") == (family, config)
    merged = merge(load_weights(base), adapter)
    done = tool("tools/export_checkpoint.py", tmp_path / "adapter", tmp_path / "merged")
    assert done.code == 0, done.output
    for folder in (tmp_path / "adapter", tmp_path / "merged"):
        weights = load_weights(folder)
        assert weights.keys() == merged.keys()
        for name, value in merged.items():
            np.testing.assert_array_equal(weights[name], value)
    beside = {path.name for path in (tmp_path / "merged").iterdir()} - {
        "model.safetensors",
        "config.json",
        "hashes.json",
    }
    assert beside == {"chat_template.jinja"}  # what the adapters were taught to answer


def test_what_matches_nothing_is_an_error(base, tmp_path):
    family, config = load_config(base)
    source = shared("golden_modern/lora_case_a/attn_only")
    folder = tmp_path / "adapter"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((4, 64), np.float32)},
              folder / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match=r"layers\.9\.self_attn\.q_proj\.lora_A\.weight \(4, 64\) matches no matrix"):
        read_adapter(folder, family, config)
    save_file(
        {k: v for k, v in tensors.items() if "lora_B" not in k or "layers.1" in k}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"attention\.query\.lora_b is None, the model needs \(64, 4\)"):
        read_adapter(folder, family, config)
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, "use_dora": True}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json: use_dora is True; only False is supported"):
        read_adapter(folder, family, config)


def test_mindformers_names(opened, base, tmp_path):
    family, config = load_config(base)
    adapter = opened["attn_only"][2]
    leaves = {"attention.query": "wq", "attention.value": "wv"}
    tensors = {}
    for name, value in adapter.weights.items():
        _, layer, *path, end = name.split(".")
        tensors[f"model.layers.{layer}.attention.{leaves['.'.join(path)]}.tk_delta_lora_{end[-1]}"] = value
    tmp_path.joinpath("adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    found = read_adapter(tmp_path, family, config)
    assert found.weights.keys() == adapter.weights.keys()
    assert found.lora.scale("layers.0.attention.query") == 2.0


def test_adapters_of_a_reward_model_are_written_as_peft_does(opened, base, tmp_path):
    """PEFT keeps a sequence classifier's head as modules_to_save, which is `score` in transformers."""
    family, config = load_config(base)
    adapter, head = opened["attn_only"][2], np.linspace(-1, 1, config.hidden_size, dtype=np.float32)[None]
    folder = tmp_path / "adapter"
    write_adapter(folder, Adapter(adapter.lora, {**adapter.weights, "head.weight": head}), family, config, base)
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = load_file(folder / "adapter_model.safetensors")
    np.testing.assert_array_equal(tensors["base_model.model.score.weight"], head)
    assert load_config(folder) == (family, config.with_value_head())
    weights = load_weights(folder)
    assert {name: value.shape for name, value in weights.items()} == parameter_shapes(config.with_value_head())
    np.testing.assert_array_equal(weights["head.weight"], head)
    save_file({k: v for k, v in tensors.items() if "score" not in k}, folder / "adapter_model.safetensors")
    (folder / HASHES).unlink()
    with pytest.raises(ConfigError, match=r"task_type is SEQ_CLS, .*score\.weight \(1, 64\) is not there"):
        load_weights(folder)
