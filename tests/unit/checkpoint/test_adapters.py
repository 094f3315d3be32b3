# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT 0.21.2 writes them: each is W + scale * B A of a scale worked out here, or refused. The expected values
were compared with PEFT's own logits once; the formulas are those of its `LoraLayer.update_layer`."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from pangu.config import OPEN_PANGU
from sporeloom.checkpoint.adapters import (
    Adapter,
    merge,
    put_side_by_side,
    read_adapter,
    write_adapter,
)
from sporeloom.core.errors import ConfigError
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.parts.experts import ExpertConfig

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 12}
MODEL = ModelConfig(**OPEN_PANGU, **SIZES)
OURS = {
    **{
        f"self_attn.{letter}_proj": f"attention.{name}"
        for letter, name in zip("qkvo", ("query", "key", "value", "output"), strict=True)
    },
    **{f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
}
Q, V = "self_attn.q_proj", "self_attn.v_proj"
EACH = [(layer, leaf) for layer in range(2) for leaf in (Q, V)]


def module(layer, leaf):
    return f"model.layers.{layer}.{leaf}"


def our_path(layer, leaf):
    return f"layers.{layer}.{OURS[leaf]}"


ABSENT = object()
"""A field that is not written."""


def written(folder, config=None, ranks=None, change=None, dtype=np.float32, model=MODEL):
    """A folder as PEFT writes it. `ranks`: (layer, leaf) -> rank; `change`: of its tensors."""
    draw, tensors, shapes = np.random.default_rng(3), {}, parameter_shapes(model)
    for (layer, leaf), rank in (ranks or dict.fromkeys(EACH, 4)).items():
        outer, inner = shapes[f"{our_path(layer, leaf)}.weight"]
        for end, shape in (("A", (rank, inner)), ("B", (outer, rank))):
            tensors[f"base_model.model.{module(layer, leaf)}.lora_{end}.weight"] = draw.normal(size=shape).astype(dtype)
    if change:
        change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    values = {name: value for name, value in {**plain, **(config or {})}.items() if value is not ABSENT}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return tensors


def base_weights():
    draw = np.random.default_rng(5)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(MODEL).items()}


HONOURED = {  # name: (configuration, (layer, leaf) -> (rank, alpha), or one for all)
    "plain": ({}, (4, 8)),
    "defaults of PEFT": ({"r": ABSENT, "lora_alpha": ABSENT}, (8, 8)),
    "a null that is false": ({"rank_pattern": None, "alpha_pattern": None, "layers_to_transform": None}, (4, 8)),
    "alpha of a matrix": ({"alpha_pattern": {"v_proj": 6}}, {Q: (4, 8), V: (4, 6)}),
    "the first of two patterns, the narrow one": (
        {"alpha_pattern": {"layers.0.self_attn.q_proj": 64, "q_proj": 16}},
        {(0, Q): (4, 64), (1, Q): (4, 16), V: (4, 8)},
    ),
    "the first of two patterns, the broad one": (
        {"alpha_pattern": {"q_proj": 16, "layers.0.self_attn.q_proj": 64}},
        {Q: (4, 16), V: (4, 8)},
    ),
    "the first of two ranks": (
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3}},
        {(0, Q): (2, 8), (1, Q): (3, 8), V: (4, 8)},
    ),
    "ranks and alphas by patterns of their own": (
        {"rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 6}, "alpha_pattern": {"v_proj": 7}},
        {(0, Q): (4, 8), (1, Q): (6, 8), V: (2, 7)},
    ),
    "a pattern from the start of the path": ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 3}}, {(1, Q): (4, 3)}),
    "a pattern with a choice": ({"alpha_pattern": {r"layers\.[1-9]\.self_attn\.(q|k)_proj": 3}}, {(1, Q): (4, 3)}),
    "a pattern that ends within a name": ({"alpha_pattern": {"proj": 3, "_proj": 5, "q_pro": 7}}, (4, 8)),
    "a name of ours, which PEFT does not know": ({"alpha_pattern": {"attention.query": 3}}, (4, 8)),
    "layers that are not written": ({"layers_to_transform": []}, (4, 8)),
    "every layer": ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, (4, 8)),
    "targets by a regular expression": ({"target_modules": r".*\.self_attn\.(q|v)_proj"}, (4, 8)),
    "targets by whole paths": ({"target_modules": [module(*each) for each in EACH]}, (4, 8)),
    "an exclusion of others": ({"exclude_modules": ["down_proj"]}, (4, 8)),
    **{
        f"drawn {init}": ({"init_lora_weights": init}, (4, 8))
        for init in (True, False, "gaussian", "eva", "orthogonal", "mica")
    },
    "settings of training and of what is off": (
        {
            **{"lora_dropout": 0.5, "megatron_config": {"a": 1}, "eva_config": {"rho": 2.0}, "loftq_config": {}},
            **{"velora_config": {"num_groups": 4}, "qalora_group_size": 32, "inference_mode": True, "bias": "none"},
            **{"peft_version": "0.21.2", "auto_mapping": None, "revision": None, "use_dora": False},
        },
        (4, 8),
    ),
    "unknown, but not set": ({"use_new_thing": False, "new_config": None, "new_list": []}, (4, 8)),
}  # fmt: skip


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("case", HONOURED)
def test_merged_weights_are_the_formula(case, use_rslora, tmp_path):
    config, expected = HONOURED[case]
    table = dict.fromkeys(EACH, expected) if isinstance(expected, tuple) else {
        each: expected.get(each, expected.get(each[1], (4, 8))) for each in EACH
    }  # fmt: skip
    tensors = written(tmp_path, {**config, "use_rslora": use_rslora}, {each: rank for each, (rank, _) in table.items()})
    weights = base_weights()
    merged = merge(weights, read_adapter(tmp_path, "pangu", MODEL))
    changed = {our_path(*each) + ".weight" for each in EACH}
    for each, (rank, alpha) in table.items():
        a, b = (tensors[f"base_model.model.{module(*each)}.lora_{end}.weight"].astype(np.float64) for end in "AB")
        wanted = weights[our_path(*each) + ".weight"] + alpha / (math.sqrt(rank) if use_rslora else rank) * b @ a
        np.testing.assert_allclose(merged[our_path(*each) + ".weight"], wanted, rtol=1e-5, atol=1e-5, err_msg=str(each))
    for name, value in weights.items():
        if name not in changed:
            np.testing.assert_array_equal(merged[name], value)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_adapters_of_other_types(dtype, tmp_path):
    tensors = written(tmp_path, dtype=dtype)
    found = read_adapter(tmp_path, "pangu", MODEL)
    key = f"base_model.model.{module(1, Q)}.lora_B.weight"
    np.testing.assert_array_equal(found.weights["layers.1.attention.query.lora_b"], tensors[key].astype(np.float32))


def without(name):
    return lambda tensors: tensors.pop(f"base_model.model.{name}.weight")


def put(name, value, place=(0, 0)):
    def change(tensors):
        tensors[f"base_model.model.{name}.weight"][place] = value

    return change


REFUSED = {  # name: (configuration, change of the tensors, words)
    **{
        f"init {init}": ({"init_lora_weights": init}, None, "weights were changed when their training began")
        for init in ("pissa", "pissa_niter_4", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga")
    },
    "an unknown init": ({"init_lora_weights": "nova"}, None, "init_lora_weights is 'nova', which is unknown"),
    **{
        name: ({name: value}, None, f"{name} is {value!r}; only")
        for name, value in {
            **{"peft_type": "LOHA", "bias": "all", "use_dora": True, "use_qalora": True, "lora_bias": True},
            **{"fan_in_fan_out": True, "use_bdlora": {"nblocks": 2}, "layer_replication": [[0, 2]], "kasa_config": {}},
            **{"target_parameters": ["x"], "trainable_token_indices": [1], "alora_invocation_tokens": [5]},
            **{"arrow_config": {"top_k": 3}, "monteclora_config": {"num_samples": 8}},
        }.items()
    },
    "other modules": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is ['lm_head']"),
    "an unknown field that is set": ({"use_new_thing": True}, None, "use_new_thing is True, an unknown field"),
    **{
        f"alpha_pattern {value!r}": ({"alpha_pattern": {".*q_proj": value}}, None, f"alpha_pattern: .*q_proj {words}, got")
        for value, words in {
            **{"nan": "must be a number", "16": "must be a number", True: "must be a number"},
            **{0: "must be above 0 and finite", -8: "must be above 0 and finite"},
        }.items()
    },
    "no mapping": ({"alpha_pattern": [8]}, None, "alpha_pattern must be a mapping of patterns, got [8]"),
    "alpha as a text": ({"lora_alpha": "nan"}, None, "lora_alpha must be a number, got 'nan'"),
    "alpha 0": ({"lora_alpha": 0}, None, "lora_alpha must be above 0"),
    "a rank that is none": ({"rank_pattern": {"q_proj": 2.5}}, None, "rank_pattern: q_proj must be a whole number"),
    "no regular expression": ({"alpha_pattern": {"(q_proj": 3}}, None, "'(q_proj' is not a regular expression"),
    "targets that are none": ({"target_modules": 3}, None, "target_modules must be a text or a list of texts, got 3"),
    "another r": ({"r": 8}, None, "layers.0.attention.query.lora_a is (4, 8), the model needs (8, 8) at rank 8 of"),
    "no r": ({"r": ABSENT}, None, "the model needs (8, 8) at rank 8 of"),
    **{
        f"{name} null": ({name: None}, None, f"adapter_config.json: {name} is null")
        for name in ("r", "lora_alpha", "lora_dropout")
    },
    **{
        f"{name} {text[:9]}": (values, None, f"adapter_config.json: {name} is {text}; float32 ends at 3.4e+38")
        for name, text, values in (
            ("lora_alpha", "1e+39", {"lora_alpha": 1e39}),
            ("lora_alpha", "3.5e+38", {"lora_alpha": 3.5e38}),
            ("lora_alpha", "1" + "0" * 36 + "...", {"lora_alpha": 10**45}),
            ("alpha_pattern: q_proj", "1e+39", {"alpha_pattern": {"q_proj": 1e39}}),
        )
    },
    "an integer that no float holds": ({"lora_alpha": 10**400}, None, "lora_alpha must be a finite number"),
    "an integer of a pattern": ({"alpha_pattern": {"q_proj": 10**400}}, None, "q_proj must be above 0 and finite, got 1000"),
    "a change that norms cannot square": ({"lora_alpha": 1e30}, None, "lora_alpha and rank 4 make a scale of 2.5e+29, and"),
    "another rank of a matrix": ({"rank_pattern": {"v_proj": 2}}, None, "layers.1.attention.value.lora_b is (8, 4), the"),
    "targets without one": ({"target_modules": ["q_proj"]}, None, f"leave out {module(0, V)}, {module(1, V)}, of which"),
    "targets with another": (
        {"target_modules": ["q_proj", "v_proj", "o_proj"]}, None, f"names {module(0, 'self_attn.o_proj')}, "
    ),
    "one layer of two": ({"layers_to_transform": 1}, None, f"leave out {module(0, Q)}, {module(0, V)}, of"),
    "another pattern of layers": (
        {"layers_to_transform": [0, 1], "layers_pattern": ["h"]}, None, "leave out " + module(0, Q)
    ),
    "excluded": ({"exclude_modules": r".*\.1\..*"}, None, f"leave out {module(1, Q)}, {module(1, V)}, of"),
    "no B": ({}, without(f"{module(0, Q)}.lora_B"), "layers.0.attention.query.lora_b is None"),
    "twice": (
        {}, lambda tensors: tensors.update({f"base_model.model.{module(0, Q)}.lora_A.default.weight": np.ones((4, 8))}),
        "layers.0.attention.query.lora_a is given twice",
    ),
    "NaN": ({}, put(f"{module(1, V)}.lora_B", np.nan, (2, 3)), "lora_B.weight (1 NaN of 32, the first at [2, 3])"),
    "infinity": ({}, put(f"{module(0, V)}.lora_A", -np.inf), "lora_A.weight (1 infinite of 32, the first at [0, 0])"),
    "a scale beyond float32": ({"lora_alpha": 1e300}, None, "lora_alpha is 1e+300; float32 ends at 3.4e+38"),
    "a scale that is nothing": ({"lora_alpha": 1e-60}, None, "lora_alpha and rank 4 make a scale of 2.5e-61"),
    "B too large with its scale": ({"lora_alpha": 1e38}, put(f"{module(0, Q)}.lora_B", 1e5), "in A or scale * B; float32"),
    "a product beyond float32": (
        {}, lambda t: [t[f"base_model.model.{module(0, Q)}.lora_{end}.weight"].fill(1e20) for end in "AB"],
        "layers.0.attention.query: lora_alpha and rank 4 make a scale of 2, and scale * B A is up to 8e+40; norms square",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_computes_otherwise_is_refused(case, tmp_path):
    config, change, words = REFUSED[case]
    written(tmp_path, config, change=change)
    with pytest.raises(ConfigError) as error:
        read_adapter(tmp_path, "pangu", MODEL)
    assert words in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_all_mistakes_of_a_configuration_are_told_at_once(tmp_path):
    written(
        tmp_path,
        {"use_dora": True, "bias": "all", "r": -1, "alpha_pattern": {"q": "nan"}, "init_lora_weights": "olora"},
    )
    with pytest.raises(ConfigError) as error:
        read_adapter(tmp_path, "pangu", MODEL)
    for word in ("use_dora", "bias", "r must be", "alpha_pattern", "init_lora_weights"):
        assert word in str(error.value), word


def test_numbers_too_large_for_the_type_that_is_computed_in(tmp_path):
    written(tmp_path, change=put(f"{module(0, Q)}.lora_A", 7e4))
    assert read_adapter(tmp_path, "pangu", MODEL)
    with pytest.raises(ConfigError, match=r"numbers up to 7e\+04 in A or scale \* B; float16 ends at 6\.55e\+04"):
        read_adapter(tmp_path, "pangu", ModelConfig(**OPEN_PANGU, **SIZES, compute_dtype="float16"))


def test_a_sum_that_is_too_large_is_not_merged():
    lora = LoRAConfig(r=1, lora_alpha=1.0, target_modules=("attention.query",))
    ones = np.ones((1, 8), np.float32)
    change = {"layers.0.attention.query.lora_a": ones * 2e19, "layers.0.attention.query.lora_b": ones.T * 1e19}
    weights = {**base_weights(), "layers.0.attention.query.weight": np.full((8, 8), 2e38, np.float32)}
    with np.errstate(over="ignore"), pytest.raises(ConfigError, match="with its adapter merged in is not finite"):
        merge(weights, Adapter(lora, change))


def test_parameters_of_several_adapters_are_finite():
    path = "layers.0.attention.query"
    lora = LoRAConfig(r=1, lora_alpha=1.0, target_modules=("attention.query",))
    adapter = Adapter(lora, {f"{path}.lora_a": np.ones((1, 8), np.float32), f"{path}.lora_b": np.full((8, 1), np.nan)})
    with pytest.raises(ConfigError, match=r"attention\.query\.lora_b \(8 NaN of 8, the first at \[0, 0\]\)"):
        put_side_by_side([adapter])


def test_what_is_written_is_what_peft_reads_back(tmp_path):
    """Target names must not name more modules of the published model than have adapters: those of experts among them."""
    experts = ExpertConfig(
        num_experts=4,
        experts_per_token=2,
        router="grouped",
        router_scale=True,
        ffn_hidden_size=6,
        shared_ffn_hidden_size=6,
    )
    model = ModelConfig(**OPEN_PANGU, **SIZES, experts=experts)
    lora = LoRAConfig(r=2, target_modules=("mlp.shared.down", "attention.query"), ranks={"layers.1.attention.query": 3})
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=shape).astype(np.float32) for name, shape in lora.shapes(model).items()}
    write_adapter(tmp_path / "out", Adapter(lora, weights), "pangu", model, tmp_path)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == [
        *(f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in range(2)),
        "q_proj",
    ]
    assert config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 3}
    found = read_adapter(tmp_path / "out", "pangu", model)
    assert found.weights.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(found.weights[name], value)
    assert [found.lora.scale(f"layers.{layer}.attention.query") for layer in range(2)] == [4.0, 8 / 3]


def test_adapters_that_are_not_finite_are_not_written(tmp_path):
    lora = LoRAConfig(r=1, target_modules=("attention.query",))
    weights = {name: np.ones(shape, np.float32) for name, shape in lora.shapes(MODEL).items()}
    weights["layers.1.attention.query.lora_b"][3] = np.inf
    with pytest.raises(ConfigError, match=r"layers\.1\.attention\.query\.lora_b \(1 infinite of 8"):
        write_adapter(tmp_path / "out", Adapter(lora, weights), "pangu", MODEL, tmp_path)
    assert not (tmp_path / "out").exists()


def exported_targets(folder, model, *targets):
    """`target_modules` of the adapters that are written for --lora-targets."""
    lora = LoRAConfig(r=1, target_modules=targets)
    weights = {name: np.ones(shape, np.float32) for name, shape in lora.shapes(model).items()}
    write_adapter(folder / "out", Adapter(lora, weights), "pangu", model, folder)
    return json.loads((folder / "out/adapter_config.json").read_text())["target_modules"]


ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        *((name, [name]) for name in ALL),
        ("all-linear", ALL),
        ("self_attn.q_proj", ["q_proj"]),
        ("mlp.up_proj", ["up_proj"]),
        ("q_proj|v_proj", ["q_proj", "v_proj"]),
        ("layers.*.self_attn.k_proj", ["k_proj"]),
        ("model.layers.1.self_attn.q_proj", ["model.layers.1.self_attn.q_proj"]),
        ("gate_up_proj", ["gate_proj", "up_proj"]),
        ("query_key_value", ["k_proj", "q_proj", "v_proj"]),
        ("c_attn", ["k_proj", "q_proj", "v_proj"]),
        ("c_proj", ["down_proj", "o_proj"]),
        ("attention.*", ["k_proj", "o_proj", "q_proj", "v_proj"]),
    ],
)
def test_names_of_hugging_face_are_exported_as_they_were_given(given, written, tmp_path):
    assert exported_targets(tmp_path, MODEL, given) == written


def test_latent_attention_and_shared_experts_have_their_names(tmp_path):
    model = size_config("pangu", "ultra_moe_tiny")
    paths = LoRAConfig(target_modules=("q_a_proj", "kv_b_proj", "up_proj")).targets(model)
    ends = {path.partition(".")[2].partition(".")[2] for path in paths}
    assert ends == {"attention.query_down", "attention.kv_up", "mlp.up", "mlp.shared.up"}
    paths = LoRAConfig(target_modules=("shared_experts.up_proj",)).targets(model)
    assert {path.partition(".")[2].partition(".")[2] for path in paths} == {"mlp.shared.up"}


def test_a_name_of_hugging_face_that_the_model_has_no_matrix_for_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"gate matches no matrix; there are attention\.key, .*mlp\.up"):
        LoRAConfig(target_modules=("gate_proj",)).targets(size_config("pangu", "tiny"))
