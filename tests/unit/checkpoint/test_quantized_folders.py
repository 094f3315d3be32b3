# SPDX-License-Identifier: Apache-2.0
"""Folders of GPTQ and AWQ: packed here by the definition of the formats, read to the bit, and refused by name where they
are of another kind."""

import dataclasses
import json

import numpy as np
import pytest
from packed_folders import AUTOGPTQ, AWQ, GPTQ, quantized
from safetensors.numpy import load_file, save_file

from sporeloom.checkpoint.huggingface import export_published
from sporeloom.checkpoint.model_folder import load_config, load_weights, open_weights, save_checkpoint, weight_problems
from sporeloom.checkpoint.packed_matrix import PackedMatrix
from sporeloom.checkpoint.published_folder import open_published
from sporeloom.core.errors import ConfigError
from sporeloom.inference.model import build_model, load_model
from sporeloom.inference.quantize import dequantized, quantized_weights
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.weight_formats import WeightFormat
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.tensor_slice import TensorSlice

KINDS = {
    "GPTQ": GPTQ,
    "GPTQ, a group for each row": {**GPTQ, "group_size": -1},
    "GPTQ, version 2": {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 64},
    "GPTQ, version 2 in upper case": {**GPTQ, "checkpoint_format": "GPTQ_V2"},
    "GPTQ, of AutoGPTQ": AUTOGPTQ,
    "GPTQ, act order": {**GPTQ, "desc_act": True},
    "AWQ": AWQ,
    "AWQ, upper case": {**AWQ, "version": "GEMM", "modules_to_not_convert": ["down_proj"]},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return published(tmp_path_factory.mktemp("plain"), num_layers=2)


def published(root, **sizes):
    """A published folder of floating-point numbers."""
    sizes = {"num_layers": 1, "vocab_size": 64, "seq_len": 32, **sizes}
    config = dataclasses.replace(size_config("pangu", "embedded_tiny"), **sizes)
    draw = np.random.default_rng(3)
    weights = {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in parameter_shapes(config).items()}
    save_checkpoint(root / "ours", weights, "pangu", config)
    export_published(root / "ours", root / "hf")
    return root / "hf"


NAMES = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def ours(name):
    for theirs, here in NAMES.items():
        name = name.replace(theirs, here)
    return name.removeprefix("model.")


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_what_was_packed(plain, tmp_path, kind):
    exact = quantized(plain, tmp_path / "q", KINDS[kind])
    assert load_config(tmp_path / "q") == load_config(plain)
    before, found = load_weights(plain), load_weights(tmp_path / "q")
    assert found.keys() == before.keys() and len(exact) in (12, 14)
    for name, value in exact.items():
        np.testing.assert_array_equal(found[ours(name)], value, err_msg=name)
    changed = {ours(name) for name in exact}
    for name in before.keys() - changed:
        np.testing.assert_array_equal(found[name], before[name])
    weights = open_weights(tmp_path / "q")
    assert weights.packed.exact & {"layers.1.mlp.down"} == ({"layers.1.mlp.down"} if len(exact) == 12 else set())
    for name, value in exact.items():
        if KINDS[kind].get("desc_act"):
            with pytest.raises(
                ConfigError, match=r"g_idx: columns of a group are not neighbours .* use --weights int8 or float32"
            ):
                weights.read_int4(ours(name))
        else:
            np.testing.assert_array_equal(dequantized(weights.read_int4(ours(name))), value)


OTHERS = [
    ({**GPTQ, "bits": 3}, "quantization_config.bits is 3; only 4 is read: use the folder of the unquantized model"),
    ({**GPTQ, "bits": 8}, "quantization_config.bits is 8; only 4 is read"),
    ({**GPTQ, "group_size": "128"}, "quantization_config.group_size is '128'"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; only gptq and gptq_v2 are read"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is true; matrices packed for Marlin"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic gives some matrices settings of their own"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16'; only int32 is read"),
    ({**AWQ, "version": "gemv"}, "version is 'gemv'; only gemm is read"),
    ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'; only autoawq is read"),
    ({"quant_method": "exl2", "bits": 4}, "quant_method is exl2; only gptq, awq and compressed-tensors are read"),
    ({"quant_method": "fp8"}, "quant_method is fp8; only gptq, awq and compressed-tensors are read"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is bitsandbytes; only gptq, awq and"),
    ({"bits": 4}, "quant_method is missing"),
    ("gptq", "quantization_config must be a mapping of keys"),
]


@pytest.mark.parametrize(("settings", "message"), OTHERS)
def test_another_kind_is_refused_by_name(plain, tmp_path, settings, message):
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert message in str(caught.value)


def damaged(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_does_not_go_together_is_named(plain, tmp_path):
    folder, name = tmp_path / "q", "model.layers.0.self_attn.q_proj"
    quantized(plain, folder, GPTQ)
    damaged(folder, lambda tensors: tensors.update({f"{name}.g_idx": np.full(64, 9, np.int32)}))
    with pytest.raises(
        ConfigError, match=r"q_proj.g_idx is \(64,\); with qweight \(\d+, \d+\) and group_size 32 it is"
    ):
        load_weights(folder)
    size = load_config(plain)[1].hidden_size
    damaged(folder, lambda tensors: tensors.update({f"{name}.g_idx": np.full(size, 99, np.int32)}))
    with pytest.raises(ConfigError, match=r"q_proj.g_idx: groups 99 .. 99 of \d"):
        load_weights(folder)
    damaged(folder, lambda tensors: tensors.pop(f"{name}.scales"))
    with pytest.raises(ConfigError, match=r"q_proj.qweight is there, but .*q_proj.scales is missing"):
        load_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ConfigError, match=r"qweight is quantized, but config.json has no quantization_config"):
        load_weights(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 2, "group_size": 32}))
    with pytest.raises(ConfigError, match=r"quantize_config.json.bits is 2; only 4 is read"):
        load_config(folder)


def test_zeros_that_autogptq_adds_as_biases_are_left_out(plain, tmp_path):
    folder, name = tmp_path / "q", "model.layers.0.mlp.up_proj"
    quantized(plain, folder, GPTQ)
    width = load_config(plain)[1].ffn_size
    damaged(folder, lambda tensors: tensors.update({f"{name}.bias": np.zeros(width, np.float16)}))
    assert load_weights(folder).keys() == load_weights(plain).keys()
    damaged(folder, lambda tensors: tensors.update({f"{name}.bias": np.ones(width, np.float16)}))
    with pytest.raises(ConfigError, match=r"up_proj.bias \(\d+,\) is not known"):
        load_weights(folder)


def test_another_int4_than_the_folder_has_is_refused(plain, tmp_path):
    quantized(plain, tmp_path / "q", GPTQ)
    _, model = load_config(tmp_path / "q")
    assert not weight_problems("int4", tmp_path / "q", model) and not weight_problems("int8", tmp_path / "q", model)
    (problem,) = weight_problems("int4-g64", tmp_path / "q", model)
    assert "--weights int4 computes with them, got int4-g64" in problem


OTHERWISE = "use --weights int8 or float32"
UNFIT = {  # the folder's settings, its model's sizes -> why --weights int4 is refused
    "groups of 16": ({**GPTQ, "group_size": 16}, {}, f"groups of 16 columns are not a multiple of 32; {OTHERWISE}"),
    "groups of 48": (
        {**GPTQ, "group_size": 48},
        {"hidden_size": 96, "num_heads": 6, "ffn_hidden_size": 192},
        f"groups of 48 columns are not a multiple of 32; {OTHERWISE}",
    ),
    "48 columns": (
        {**AWQ, "group_size": -1},
        {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 3},
        f"groups of 32 do not divide the 48 columns of layers.0.attention.query; {OTHERWISE}",
    ),
    "a group of 64 columns, several of 128": (
        {**GPTQ, "group_size": 128},
        {"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 256},
        f"groups of 64 and 128 columns in one folder, where int4 needs groups of one size; {OTHERWISE}",
    ),
    "groups that do not divide": (
        {**GPTQ, "group_size": 128},
        {"hidden_size": 128, "ffn_hidden_size": 320},
        f"down_proj: groups of 128 do not divide its 320 columns, as int4 needs; {OTHERWISE}",
    ),
    "act order": ({**GPTQ, "desc_act": True}, {}, f"(desc_act), which int4 needs; {OTHERWISE}"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_groups_that_int4_cannot_take_are_refused_before_loading(tmp_path, kind):
    settings, sizes, message = UNFIT[kind]
    exact = quantized(published(tmp_path, **sizes), tmp_path / "q", settings)
    family, model = load_config(tmp_path / "q")
    found = load_weights(tmp_path / "q")
    for name, value in exact.items():
        np.testing.assert_array_equal(found[ours(name)], value, err_msg=name)
    problems = weight_problems("int4", tmp_path / "q", model)
    assert any(each.startswith("--weights int4: ") and message in each for each in problems), problems
    assert not weight_problems("int8", tmp_path / "q", model)
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path / "q", family, model, SINGLE_DEVICE, weights="int4")
    assert message in str(caught.value)


def test_shards_that_do_not_fit_have_int8_or_fewer_ranks(plain, tmp_path):
    quantized(plain, tmp_path / "q", {**GPTQ, "group_size": -1})
    _, model = load_config(tmp_path / "q")
    assert not weight_problems("int4", tmp_path / "q", model)
    (problem,) = weight_problems("int4", tmp_path / "q", model, tp=2)
    assert problem.endswith("; use --weights int8 or float32, or a smaller tensor parallel degree")


def test_scales_that_the_model_has_no_place_for_are_named(plain, tmp_path):
    quantized(plain, tmp_path / "q", GPTQ)
    family, model = load_config(tmp_path / "q")
    weights, whole_rows = open_weights(tmp_path / "q"), WeightFormat("int4", 4, has_zeros=True)
    net = build_model(family, model, SINGLE_DEVICE, weights=whole_rows)
    read, name = quantized_weights(net, weights.read, whole_rows, weights.read_int4), "layers.0.mlp.up.weight"
    with pytest.raises(
        ConfigError, match=r"mlp.up.scale: the checkpoint's is \(\d+, 4\) in int4, the model's \(\d+, 1\)"
    ):
        read(name, TensorSlice.full((1,)))


def test_zeros_in_place_of_groups_are_no_order(plain, tmp_path):
    folder = tmp_path / "q"
    exact = quantized(plain, folder, GPTQ)
    damaged(folder, lambda found: found.update({n: np.zeros_like(v) for n, v in found.items() if n.endswith("g_idx")}))
    found, weights = load_weights(folder), open_weights(folder)
    for name, value in exact.items():
        np.testing.assert_array_equal(found[ours(name)], value, err_msg=name)
        np.testing.assert_array_equal(dequantized(weights.read_int4(ours(name))), value, err_msg=name)


@pytest.mark.parametrize("row", [6, 7])
def test_zero_points_that_were_lost_are_refused(plain, tmp_path, row):
    """AutoGPTQ packs a 0 as -1, all bits of which are 1: the last row of a word is read, else those after it are lost."""
    folder, name = tmp_path / "q", "model.layers.0.self_attn.q_proj"
    exact = quantized(plain, folder, AUTOGPTQ)[f"{name}.weight"]

    def pack_a_zero(tensors):
        tensors[f"{name}.qzeros"][0, 0] |= np.int32(-1 << (4 * row))

    before = (load_file(folder / "model.safetensors")[f"{name}.qzeros"].view(np.uint32)[0, 0] >> 28) + 1
    damaged(folder, pack_a_zero)
    if row == 6:
        with pytest.raises(
            ConfigError, match=r"q_proj.qzeros: a zero point of 0 that AutoGPTQ wrote over those of the"
        ):
            load_weights(folder)
        return
    scale = load_file(folder / "model.safetensors")[f"{name}.scales"][0, 7].astype(np.float64)
    exact[7, :32] = np.rint(exact[7, :32] / scale + before) * scale  # its zero point is 0 now
    np.testing.assert_array_equal(load_weights(folder)["layers.0.attention.query.weight"], exact)


FUSED = ("query_key_value.weight", "dense_h_to_4h.weight", "self_attention.dense.weight", "dense_4h_to_h.weight")


@pytest.mark.parametrize("kind", ["fused", "experts"])
def test_a_matrix_is_unpacked_once_for_all_parameters_that_have_rows_of_it(tmp_path, monkeypatch, kind):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "vocab_size": 64}
    family, size, others = "codegeex", "4_tiny", {"ffn_hidden_size": 64, "rope_dim": 4}
    if kind == "experts":
        family, size = "pangu", "pro_moe_tiny"
        experts = dataclasses.replace(size_config(family, size).experts, ffn_hidden_size=32, shared_ffn_hidden_size=64)
        others = {"ffn_hidden_size": 32, "experts": experts}
    config = dataclasses.replace(size_config(family, size), **sizes, **others)
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(config).items()}
    save_checkpoint(tmp_path / "ours", weights, family, config)
    export_published(tmp_path / "ours", tmp_path / "hf")
    exact = quantized(tmp_path / "hf", tmp_path / "q", GPTQ, ("_proj.weight", *FUSED))
    found, source = load_weights(tmp_path / "q"), open_published(tmp_path / "q")
    unpacked, numbers = [], PackedMatrix.numbers
    monkeypatch.setattr(PackedMatrix, "numbers", lambda self: unpacked.append(self.name) or numbers(self))
    names = [name for name in source.shapes if name.removesuffix(".weight") not in source.weights.exact]
    names = [name for name in names if source.rows()[name][0][0].name in source.packed]
    assert len(exact) >= 8 and (kind == "experts" or len(names) > len(exact))
    for name in names:
        np.testing.assert_array_equal(dequantized(source.read_int4(name)), found[name], err_msg=name)
    assert sorted(unpacked) == sorted(name.removesuffix(".weight") for name in exact)
