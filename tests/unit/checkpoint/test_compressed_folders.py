# SPDX-License-Identifier: Apache-2.0
"""Folders of compressed-tensors: packed here by the definition of the format, read to the bit, held as they are, and refused
by the key where they are of another kind."""

import json
import shutil

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from packed_folders import word_of
from safetensors.numpy import load_file, save_file
from test_quantized_folders import damaged, ours, published

from sporeloom.checkpoint.model_folder import load_config, load_weights, open_weights, weight_problems
from sporeloom.core.errors import ConfigError
from sporeloom.inference.model import load_model
from sporeloom.inference.quantize import dequantized
from sporeloom.strategy.config import SINGLE_DEVICE

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "observer": "minmax", "dynamic": False}
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}


def settings(weights=INT4, form="pack-quantized", of_group=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, **(of_group or {})}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "global_compression_ratio": 1.2,
        **more,
    }


W8A8 = settings(INT8, "int-quantized", {"input_activations": PER_TOKEN})
OF_MLP = {"targets": ["re:.*mlp.*"], "weights": INT8, "format": "int-quantized", "input_activations": PER_TOKEN}
MIXED = settings(form="mixed-precision", of_group={"format": "pack-quantized"})
MIXED["config_groups"]["group_1"] = OF_MLP
KINDS = {
    "W4A16": settings(),
    "W4A16, zero points": settings({**INT4, "symmetric": False, "group_size": 64}),
    "W4A16, zero points of int8": settings({**INT4, "symmetric": False}),
    "W4A16, a scale for each row": settings({**INT4, "strategy": "channel", "group_size": None}),
    "W4A16, act order": settings({**INT4, "actorder": "group"}),
    "W4A16, act order of weights": settings({**INT4, "actorder": "weight"}),
    "W8A8": W8A8,
    "W8A8, zero points of 0": {**W8A8, "quantization_status": "frozen"},
    "W8A16": settings(INT8),
    "W8A16, groups": settings({**INT8, "strategy": "group", "group_size": 64}),
    "W8A16, zero points": settings({**INT8, "symmetric": False}, "naive-quantized"),
    "W8A16, one scale": settings({**INT8, "strategy": "tensor"}, "int-quantized"),
    "mixed": MIXED,
}


def compress(plain, target, kind):
    """A folder of a kind. Returns by published name: the matrices, their signed numbers, zero points and scales."""
    target.mkdir()
    tensors, draw, found = load_file(plain / "model.safetensors"), np.random.default_rng(6), {}
    config = KINDS[kind]
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        group = config["config_groups"]["group_1" if kind == "mixed" and ".mlp." in name else "group_0"]
        form, weights = group.get("format", config["format"]), group["weights"]
        bits, (out, columns), base = weights["num_bits"], tensors.pop(name).shape, name.removesuffix(".weight")
        size, half = weights.get("group_size") or columns, 2 ** (weights["num_bits"] - 1)
        groups = np.arange(columns) // size
        if weights.get("actorder") == "group":
            groups = draw.permutation(groups)
            tensors[f"{base}.weight_g_idx"] = groups.astype(np.int32)
        elif weights.get("actorder"):
            tensors[f"{base}.weight_g_idx"] = np.full(columns, -1, np.int32)
        q = draw.integers(-half, half, (out, columns))
        has_zeros = not weights["symmetric"]
        zero = draw.integers(-half, half, (out, columns // size)) * has_zeros
        scale = draw.normal(0, 0.03, zero.shape).astype(ml_dtypes.bfloat16)
        if weights["strategy"] == "tensor":
            scale[:] = scale[0, 0]
        tensors[f"{base}.weight_scale"] = scale[0] if weights["strategy"] == "tensor" else scale
        if form == "pack-quantized":
            per_word = 32 // bits

            def packed(rows, bits=bits, half=half, per_word=per_word):
                return [
                    [of_bits(row[at : at + per_word] + half, bits) for at in range(0, len(row), per_word)]
                    for row in rows
                ]

            tensors[f"{base}.weight_packed"] = np.asarray(packed(q), np.int32)
            tensors[f"{base}.weight_shape"] = np.asarray([out, columns])
            if has_zeros:
                as_words = np.asarray(packed(zero.T), np.int32).T
                as_bytes = zero.astype(np.int8)
                tensors[f"{base}.weight_zero_point"] = as_bytes if kind.endswith("of int8") else as_words
        else:
            tensors[f"{base}.weight"] = q.astype(np.int8)
            if has_zeros or kind.endswith("of 0"):
                tensors[f"{base}.weight_zero_point"] = zero.astype(np.int8)
        exact = ((q - zero[:, groups]) * scale[:, groups].astype(np.float64)).astype(np.float32)
        found[name] = exact, q, zero, scale.astype(np.float32)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, target / "model.safetensors")
    write_config(plain, target, config)
    return found


def of_bits(numbers, bits):
    """Numbers in 32 bits, the first one lowest."""
    if bits == 4:
        return word_of(numbers)
    return int.from_bytes(bytes(int(number) for number in numbers), "little", signed=False) - (
        1 << 32 if len(numbers) == 4 and numbers[-1] > 127 else 0
    )


def write_config(plain, target, values):
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": values}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return published(tmp_path_factory.mktemp("plain"), num_layers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_what_was_packed(plain, tmp_path, kind):
    packed = compress(plain, tmp_path / "q", kind)
    assert load_config(tmp_path / "q") == load_config(plain)
    before, found, weights = load_weights(plain), load_weights(tmp_path / "q"), open_weights(tmp_path / "q")
    assert found.keys() == before.keys() and len(packed) == 14
    for name in before.keys() - {ours(name) for name in packed}:
        np.testing.assert_array_equal(found[name], before[name])
        assert weights.read_int8(name) is None
    for name, (exact, q, _, scale) in packed.items():
        np.testing.assert_array_equal(found[ours(name)], exact, err_msg=name)
        as_it_is = weights.read_int8(ours(name))
        if kind in ("W8A8", "W8A8, zero points of 0", "W8A16", "W8A16, one scale") or (
            kind == "mixed" and ".mlp." in name
        ):
            np.testing.assert_array_equal(as_it_is.q, q)
            np.testing.assert_array_equal(as_it_is.scale, scale[:, 0])
            continue
        assert as_it_is is None
        if kind == "W4A16, act order":
            with pytest.raises(ConfigError, match=r"weight_g_idx: columns of a group are not neighbours"):
                weights.read_int4(ours(name))
        elif "W8" not in kind:
            np.testing.assert_array_equal(dequantized(weights.read_int4(ours(name))), exact)
    assert bool(weight_problems("int4", tmp_path / "q", load_config(plain)[1])) == (kind == "W4A16, act order")


@pytest.mark.parametrize(("kind", "weights"), [("W8A8", "w8a8"), ("mixed", "int4")])
def test_a_model_holds_the_numbers_of_the_folder(plain, tmp_path, kind, weights):
    ms.set_device("CPU")
    packed = compress(plain, tmp_path / "q", kind)
    net = load_model(tmp_path / "q", *load_config(tmp_path / "q"), SINGLE_DEVICE, weights=weights)
    held = {parameter.name: parameter.asnumpy() for parameter in net.get_parameters()}
    eights = 0
    for name, (_, q, _, scale) in packed.items():
        if q.min() < -8:
            assert q.min() == -128
            np.testing.assert_array_equal(held[ours(name)], q)
            np.testing.assert_array_equal(held[ours(name).replace(".weight", ".scale")].reshape(-1), scale[:, 0])
            eights += 1
        else:
            np.testing.assert_array_equal(held[ours(name).replace(".weight", ".scale")], scale)
    assert eights == (14 if kind == "W8A8" else 6)


ACTIVATIONS = "activations are rounded to int8, each token by itself"
OTHERS = [
    (settings(form="float-quantized"), "format is 'float-quantized'; only pack-quantized, int-quantized, naive-quantized"),
    (settings(form="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    (settings(form="marlin-24"), "format is 'marlin-24'"),
    (settings(form=None), "format is None"),
    (settings({**INT8, "type": "float"}, "naive-quantized"), "config_groups.group_0.weights.type is 'float'; only int"),
    (settings({**INT4, "num_bits": 3}), "weights.num_bits is 3; only 4 and 8 are read"),
    (settings({**INT4, "group_size": "32"}), "weights.group_size is '32'"),
    (settings({**INT4, "strategy": "block", "group_size": None}), "weights.strategy is 'block' with group_size None"),
    (settings({**INT4, "group_size": None}), "weights.strategy is 'group' with group_size None"),
    (settings(INT8, of_group={"input_activations": {**PER_TOKEN, "dynamic": False}}), f"dynamic is False; {ACTIVATIONS}"),
    (settings(INT8, of_group={"input_activations": {"num_bits": 8}}), "input_activations.strategy is None"),
    (settings(INT8, of_group={"input_activations": {**PER_TOKEN, "num_bits": 4}}), "input_activations.num_bits is 4"),
    (settings(INT8, of_group={"input_activations": {**PER_TOKEN, "type": "float"}}), "input_activations.type is 'float'"),
    (settings(INT8, of_group={"output_activations": PER_TOKEN}), "output_activations are rounded"),
    (settings(of_group={"weights": None}), "config_groups.group_0 is"),
    (settings(of_group={"format": "float-quantized"}), "config_groups.group_0.format is 'float-quantized'"),
    (settings(form="mixed-precision"), "config_groups.group_0.format is None"),
    (settings(config_groups={}), "config_groups is {}"),
    (settings(quantization_status="calibration"), "quantization_status is 'calibration'; only compressed, frozen are read"),
    (settings(kv_cache_scheme={"num_bits": 8, "type": "float"}), "kv_cache_scheme is {'num_bits': 8"),
    (settings(sparsity_config={"format": "sparse-bitmask", "ignore": []}), "sparsity_config is {'format': 'sparse-bitmask'"),
    (settings(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config is"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), OTHERS)
def test_another_kind_is_refused_by_its_key(plain, tmp_path, values, message):
    write_config(plain, tmp_path, values)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert message in str(caught.value)


def test_empty_settings_of_what_is_not_read_are_fine(plain, tmp_path):
    dense = {"format": "dense", "ignore": ["lm_head"], "targets": ["Linear"]}
    write_config(plain, tmp_path, settings(sparsity_config=dense, transform_config={"config_groups": {}}))
    assert load_config(tmp_path)


NAME = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "no scale": ("W4A16", {"weight_scale": None}, r"q_proj.weight_packed is there, but .*q_proj.weight_scale is missing"),
    "no shape": ("W4A16", {"weight_shape": None}, r"q_proj.weight_shape is missing"),
    "another type": ("W4A16", {"weight_packed": np.zeros((64, 8), np.int64)}, r"weight_packed is int64; numbers are packed"),
    "other groups": ("W4A16", {"weight_scale": np.ones((64, 3), np.float16)}, r"weight_scale \(64, 3\).* are not as config"),
    "zero points that none announced": (
        "W4A16", {"weight_zero_point": np.zeros((64, 3), np.int8)}, r"are not as config_groups say \(4 bits, groups of 32",
    ),
    "no zero points": ("W8A16, zero points", {"weight_zero_point": None}, r"are not as config_groups say \(8 bits, a scale"),
    "two matrices": ("W4A16", {"weight": np.ones((64, 64), np.float32)}, r"both .*q_proj.weight and .*q_proj.weight_packed"),
    "a scale of activations": ("W8A8", {"input_scale": np.ones(1, np.float32)}, r"q_proj.input_scale"),
    "a group that is not there": ("W4A16, act order", {"weight_g_idx": 9}, r"weight_g_idx: groups 9 .. 9 of"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_what_does_not_go_together_is_named(plain, tmp_path, case):
    kind, changes, message = DAMAGE[case]
    compress(plain, tmp_path / "q", kind)

    def change(tensors):
        for part, value in changes.items():
            old = tensors.pop(f"{NAME}.{part}", None)
            if value is not None:
                tensors[f"{NAME}.{part}"] = np.full_like(old, value) if isinstance(value, int) else value

    damaged(tmp_path / "q", change)
    with pytest.raises(ConfigError, match=message):
        load_weights(tmp_path / "q")


def test_a_folder_without_the_configuration_or_the_matrices_is_refused(plain, tmp_path):
    compress(plain, tmp_path / "q", "W4A16")
    write_config(plain, tmp_path / "q", None)
    with pytest.raises(ConfigError, match=r"weight_packed is quantized, but config.json has no quantization_config"):
        load_weights(tmp_path / "q")
    shutil.copy(plain / "model.safetensors", tmp_path)
    write_config(plain, tmp_path, settings())
    with pytest.raises(ConfigError, match=r"no quantized tensor is named \*.weight_packed or \*.weight"):
        load_weights(tmp_path)
