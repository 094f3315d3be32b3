# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of its parameters is what the Cells make; how models are published, in both directions."""

import dataclasses
import math
import re

import numpy as np
import pytest
from conftest import ROOT

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import FAMILIES, family_module, size_config
from sporeloom.models.parameters import decoder_specs, num_parameters, parameter_shapes, parameter_specs
from sporeloom.models.parts.spec import ParameterSpec

COUNTS = {  # facts of the published models
    ("pangu", "embedded_1b"): 1_155_912_192,
    ("pangu", "embedded_7b"): 8_030_887_936,
    ("codegeex", "2_6b"): 6_243_584_000,
    ("codegeex", "4_9b"): 9_399_951_360,
}
SIZES = [(family, size) for family in FAMILIES for size in family_module(family, "config").SIZES]
BASE = {"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "query_layer": False}
LATENT = {"kv_width": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
TWO_OF_FOUR = {"num_experts": 4, "experts_per_token": 2}
HASH = {"num_experts": 4, "experts_per_token": 1, "router": "hash"}


@pytest.mark.parametrize(("family", "size"), COUNTS)
def test_parameter_counts_are_the_published_ones(family, size):
    assert num_parameters(size_config(family, size)) == COUNTS[family, size]


def test_ultra_moe_is_as_large_as_printed():
    config = dataclasses.replace(size_config("pangu", "ultra_moe_718b"), num_mtp_layers=0)
    embedding = config.vocab_size * config.hidden_size
    assert num_parameters(config) == 719_093_767_680
    assert (num_parameters(config) - embedding) / 1e9 == pytest.approx(718, abs=0.2)


@pytest.mark.parametrize(("size", "whole", "active"), [("2_flash", 91.60, 5.78), ("2_pro", 504.60, 18.18)])
def test_openpangu_2_is_as_large_as_printed(size, whole, active):
    config = size_config("pangu", size)
    counts = {name: math.prod(shape) for name, shape in parameter_shapes(config).items() if not name.startswith("mtp.")}
    unused = 1 - config.mixture.experts_per_token / config.mixture.num_experts
    experts = sum(count for name, count in counts.items() if ".mlp.experts." in name)
    assert sum(counts.values()) / 1e9 == pytest.approx(whole, abs=0.01)
    assert (sum(counts.values()) - experts * unused) / 1e9 == pytest.approx(active, abs=0.005)


def test_palm_is_as_large_as_printed():
    billions = [num_parameters(size_config("palm", size)) / 1e9 for size in ("8b", "62b", "540b")]
    assert billions == pytest.approx([8.63, 62.50, 540.35], abs=0.01)


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_the_cells_have_the_parameters_that_the_configuration_says(family, size):
    from mindspore.nn.utils import no_init_parameters  # noqa: PLC0415

    whole = size_config(family, size)
    first = next((layer for layer in range(whole.num_layers) if whole.has_experts(layer)), 0)
    config = whole.with_layers(max(2, first + 1 + whole.query_layer))
    with no_init_parameters():
        net = family_module(family, "model").Model(config)
    assert {parameter.name: tuple(parameter.shape) for parameter in net.get_parameters()} == parameter_shapes(config)
    assert net.config.layers[-1] in dict(net.cells_and_names())


def test_a_parameter_cannot_be_declared_without_its_initial_value():
    with pytest.raises(TypeError, match="init"):
        ParameterSpec("weight", (4,))


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_every_declared_parameter_has_a_number_for_its_initial_value(family, size):
    config = size_config(family, size)
    specs = decoder_specs(config)
    assert specs.keys() == parameter_shapes(config).keys()
    assert all(isinstance(spec.init.number, float) for spec in specs.values())
    outputs = [spec.init.value for name, spec in specs.items() if name.endswith((".output.weight", ".down.weight"))]
    given = config.output_init_std
    assert set(outputs) == {config.init_std / math.sqrt(2 * config.num_layers) if given is None else given}


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *(("pangu", size) for size in ("tiny", "embedded_tiny", "pro_moe_tiny", "ultra_moe_tiny", "2_tiny")),
        *(("codegeex", "4_tiny"), ("palm", "tiny")),
    ],
)
def test_a_new_model_begins_with_the_values_that_its_parts_declare(family, size):
    import mindspore as ms  # noqa: PLC0415

    config = size_config(family, size).with_layers(2)
    if config.block == "sandwich":
        config = dataclasses.replace(config, sandwich_gains=(0.25, 0.5))
    ms.set_seed(1)
    specs, found = decoder_specs(config), set()
    for parameter in family_module(family, "model").Model(config).get_parameters():
        init, value = specs[parameter.name].init, parameter.asnumpy()
        if init.kind == "constant":
            assert (value == np.float32(init.value)).all(), parameter.name
        else:
            error = 5 / math.sqrt(value.size)  # five standard deviations of an estimate
            assert value.std() == pytest.approx(init.value, rel=error), parameter.name
            assert abs(value.mean()) <= error * init.value, parameter.name
            digest = value.tobytes()
            assert digest not in found, f"{parameter.name}: the values of another"
            found.add(digest)


def test_only_one_module_draws_initial_values_of_model_parts():
    drawing = re.compile(r"\b(Normal|TruncatedNormal|Uniform|HeNormal|XavierUniform)\b")
    for path in sorted((ROOT / "sporeloom/nn").glob("*.py")):
        if path.name != "parameter.py":
            assert not drawing.search(path.read_text(encoding="utf-8")), path


PRODUCTS = ("MatMul", "BatchMatMul")


@pytest.mark.parametrize(
    ("family", "size"),
    [("pangu", "tiny"), ("pangu", "embedded_tiny"), ("pangu", "pro_moe_tiny"), ("pangu", "2_tiny"), ("palm", "tiny")],
)
def test_a_parameter_that_is_declared_as_a_matrix_is_a_factor_of_a_product(family, size):
    from mindspore.nn.utils import no_init_parameters  # noqa: PLC0415

    from sporeloom.parallel.operators import operators, parameter_uses  # noqa: PLC0415

    config = size_config(family, size)
    with no_init_parameters():
        net = family_module(family, "model").Model(config)
    uses: dict[str, set[str]] = {}
    for use in parameter_uses(operators(net)):
        uses.setdefault(use.parameter.name, set()).add(use.operator.primitive.name)
    factors = {name for name, kinds in uses.items() if kinds & set(PRODUCTS)}
    assert factors == {spec.name for spec in parameter_specs(config) if spec.use == "matrix"}


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_every_size_has_a_learning_rate_and_survives_json(family, size):
    config = size_config(family, size)
    assert size in family_module(family, "config").LEARNING_RATES
    assert ModelConfig(**config.to_dict()) == config


def test_a_model_with_fewer_layers_keeps_what_belongs_to_them():
    small = size_config("pangu", "2_flash").with_layers(4)
    assert (small.windows, small.indexer.layers, small.streams.norm_layers) == (
        (0, 512, 512, 0, *[2048] * 3),
        (0, 3),
        (),
    )
    assert size_config("pangu", "2_flash").with_layers(5).streams.norm_layers == (4,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"windows": [4]}, "windows has 1 entries for num_layers 4 and num_mtp_layers 1"),
        (
            {"indexer": {"layers": [7], "top_k": 1, "num_heads": 1, "head_dim": 16}},
            "indexer.layers: there is no layer 7",
        ),
        ({"indexer": {"layers": [0], "top_k": 1, "num_heads": 1, "head_dim": 8}}, "indexer.head_dim 8 is less than"),
        ({"block": "sequential"}, "streams is for block sandwich, not sequential"),
        ({"streams": {"num_streams": 2, "norm_layers": [9]}}, "streams.norm_layers: there is no layer 9"),
        ({"latent": {**LATENT, "query_width": 8, "conv_width": 1}}, "latent.conv_width 1 sees no token before"),
        ({"latent": None}, "windows is for models with latent"),
    ],
)
def test_parts_of_openpangu_2_that_do_not_fit_are_refused(change, words):
    fields = size_config("pangu", "2_tiny").to_dict()
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**{**fields, **change})


@pytest.mark.parametrize("size", ["embedded_tiny", "pro_moe_tiny", "4_tiny", "tiny"])
def test_a_published_configuration_is_read_as_it_is_written(size):
    family = {"4_tiny": "codegeex", "tiny": "palm"}.get(size, "pangu")
    config = size_config(family, size)
    config = dataclasses.replace(config, head_dim=config.head_size)
    if config.experts:
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, balance_over="batch"))
    for way in family_module(family, "weights").PUBLISHED:
        needs_latent = way.model_type in ("deepseek_v3", "pangu_ultra_moe", "openpangu_v2")
        if needs_latent or (way.model_type == "PanguProMoE") != bool(config.experts):
            with pytest.raises(ConfigError, match="not a network that can be written"):
                way.write(config)
            continue
        again = dataclasses.replace(config, **way.read(way.write(config)))
        untold = ("loss_ignore_id", "embedding_init_std", "qkv_init_std", "init_std", "output_init_std")
        for field in dataclasses.fields(config):
            if field.name not in untold:
                assert getattr(again, field.name) == getattr(config, field.name), (way.model_type, field.name)
        assert way.problems(way.shapes(config), config) == []


def test_published_tensors_that_do_not_fit_are_named_all_at_once():
    config, (way, *_) = size_config("pangu", "embedded_tiny"), family_module("pangu", "weights").PUBLISHED
    shapes = {**way.shapes(config), "model.extra.weight": (3,), "model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    del shapes["model.norm.weight"]
    shapes["model.layers.1.mlp.up_proj.weight"] = (1, 2)
    assert way.problems(shapes, config) == [
        "model.norm.weight (128,) is missing",
        "model.layers.1.mlp.up_proj.weight is (1, 2), its config.json makes it (384, 128)",
        "model.extra.weight (3,) is not known",
    ]


def test_networks_that_are_not_built_here_are_refused():
    (way, *_) = family_module("pangu", "weights").PUBLISHED
    values = way.write(size_config("pangu", "embedded_tiny"))
    with pytest.raises(ConfigError, match="sink tokens"):
        way.read({**values, "param_sink_number": 128})
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'; only 'silu' is supported"):
        way.read({**values, "hidden_act": "gelu"})
    scaled = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="rope_type is 'longrope', which is not supported"):
        way.read({**values, **scaled})
    assert way.read({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})["rope_theta"] == 5e5
    with pytest.raises(
        ConfigError, match="not a network that can be written as openPangu-Embedded: norm 'layer' instead of 'rms'"
    ):
        way.write(size_config("pangu", "tiny"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"position": "rotary", "rope_dim": 7}, "rope_dim 7 must be even and at most the 16 of a head"),
        ({"position": "rotary", "rope_dim": 18}, "rope_dim 18 must be even and at most the 16 of a head"),
        ({"block": "serial"}, "block must be one of sequential, parallel, sandwich, got 'serial'"),
        ({"query_layer": True, "position": "rotary"}, "query_layer needs learned positions"),
        ({"sandwich_gains": (1.0,)}, "sandwich_gains takes 2 numbers, got 1"),
        ({"stop_ids": (128,)}, "stop_ids: 128 is outside the vocabulary of 128"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"experts": {**TWO_OF_FOUR, "experts_per_token": 5}}, "experts_per_token 5 is more than the num_experts 4"),
        (
            {"experts": {**TWO_OF_FOUR, "router": "grouped", "num_experts": 5}},
            "5 is not divisible by the experts_per_token",
        ),
        ({"experts": {**TWO_OF_FOUR, "capacity_factor": 0.0}}, "experts.capacity_factor must be above 0, got 0"),
        ({"experts": {**TWO_OF_FOUR, "capacity_group": 0}}, "experts.capacity_group must be at least 1"),
        (
            {"experts": {**TWO_OF_FOUR, "router": "top"}},
            "experts.router must be one of softmax, grouped, sigmoid, hash",
        ),
        ({"experts": {**TWO_OF_FOUR, "router": "hash"}}, "experts_per_token must be 1 with router: hash, got 2"),
        ({"experts": {**HASH, "num_domains": 3}}, "num_experts 4 is not divisible by the num_domains 3"),
        ({"experts": {**HASH, "num_domains": 2, "domain": 2}}, "domain 2: num_domains is 2, counted from 0"),
        ({"experts": {**HASH, "domain": 1}}, "domain 1: num_domains is 1"),
        ({"experts": {**TWO_OF_FOUR, "num_domains": 2}}, "num_domains and domain are for router: hash"),
        ({"experts": {**TWO_OF_FOUR, "normalize": "after_drop"}}, "without capacity_factor nothing is dropped"),
        ({"latent": LATENT}, "latent needs position rotary and norm rms, not learned and layer"),
        ({"latent": LATENT, "num_kv_heads": 2}, "num_kv_heads: latent attention has its own sizes"),
        ({"latent": {**LATENT, "rope_dim": 5}}, "latent.rope_dim 5 must be even"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}}, "rope_scaling is for position rotary, not learned"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}},
            "rope_scaling.original_seq_len is missing; yarn needs it",
        ),
        ({"experts": {**TWO_OF_FOUR, "num_groups": 3}}, "num_experts 4 do not make num_groups 3 equal groups"),
        (
            {"experts": {**TWO_OF_FOUR, "num_groups": 2, "groups_per_token": 3}},
            "groups_per_token 3 is more than the num_groups 2",
        ),
        (
            {"experts": {**TWO_OF_FOUR, "num_groups": 2, "experts_per_token": 3}},
            "experts_per_token 3 is more than the 2 experts of groups_per_token 1 groups",
        ),
        (
            {"experts": {**TWO_OF_FOUR, "router": "grouped", "num_groups": 2}},
            "num_groups is for router: sigmoid or softmax",
        ),
        ({"experts": {**TWO_OF_FOUR, "first_dense_layers": 2}}, "none of the 2 layers has any"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**BASE, **change})


def test_all_parts_know_the_phase_that_is_compiled():
    net = family_module("pangu", "model").Model(size_config("pangu", "tiny"))
    for phase in ("one", "two", "two", "one"):
        net.compile_phase = phase
        assert {cell.compile_phase for _, cell in net.cells_and_names()} == {phase}
