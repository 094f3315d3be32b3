# SPDX-License-Identifier: Apache-2.0
"""The networks of MindFormers' files."""

import ast
import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import CONFIGS

from sporeloom.cli.translate import model_text
from sporeloom.core.errors import ConfigError
from sporeloom.dialects import Settings, translate
from sporeloom.integrations import trainer
from sporeloom.models.family import size_config
from sporeloom.strategy.config import SINGLE_DEVICE, Stages

RULES = CONFIGS / "rules" / "decoder.yaml"
NOTHING = Settings(SINGLE_DEVICE)


def fates(done):
    return {note.key: note.fate for note in done.notes}


GLM4 = """\
parallel_config: {data_parallel: 2, model_parallel: 1, pipeline_stage: 4, micro_batch_num: 64, use_seq_parallel: True}
trainer: {model_name: glm4_9b}
model:
  model_config:
    type: ChatGLM2Config
    num_layers: 40
    padded_vocab_size: 151552
    layernorm_epsilon: EPSILON
    rope_ratio: RATIO
    pre_seq_len: None
    eos_token_id: [151329, 151336, 151338]
    seq_length: 8192
    offset: [-1, 0, 2, -1]
"""


def glm(write, epsilon, ratio, to="ours", **options):
    path = write("glm.yaml", GLM4.replace("EPSILON", epsilon).replace("RATIO", ratio))
    return translate(path, to, RULES, path.parent / "out.yaml", NOTHING, **options)


def test_a_network_of_mindformers_is_the_size_it_equals(write):
    done = glm(write, "1.0e-5", "500")
    assert done.settings.model is None
    assert done.settings.train == {"model": "codegeex", "size": "4_9b", "seq_len": 8192}
    assert done.settings.network == ("codegeex", size_config("codegeex", "4_9b"))
    assert done.settings.strategy.pipeline.stages == Stages(num_layers=[9, 10, 12, 9])
    assert not done.settings.strategy.sequence_parallel
    assert fates(done)["parallel_config.use_seq_parallel"] == fates(done)["trainer.model_name"] == "no effect"


def test_a_network_of_mindformers_that_is_no_size_is_a_configuration(write, tmp_path):
    done = glm(write, "1.5625e-07", "1", config_out=tmp_path / "model.json")
    base = size_config("codegeex", "4_9b")
    assert done.settings.model == dataclasses.replace(
        base, seq_len=8192, layer_norm_epsilon=1.5625e-07, rope_theta=10000.0
    )
    assert f"--config {tmp_path / 'model.json'}" in done.text and "--size" not in done.text
    text = model_text(done.settings, Path("glm.yaml"))
    assert json.loads(text)["family"] == "codegeex" and json.loads(text)["rope_theta"] == 10000.0


def test_the_trainer_trains_the_network_its_file_describes(write, tmp_path, monkeypatch):
    class CheckedError(Exception):
        pass

    def check(config, _):
        raise CheckedError(*config.base_model())

    monkeypatch.setattr(trainer, "check_training", check)
    text = GLM4.replace("EPSILON", "1.5625e-07").replace("RATIO", "1") + "runner_config: {stop_step: 1}\n"
    built = trainer.Trainer(write("glm.yaml", text), train_dataset="x", output_dir=tmp_path / "out")
    with pytest.raises(CheckedError) as caught:
        built.train()
    assert caught.value.args == ("codegeex", built.settings.model)


def pangu(write, name, numbers=""):
    numbers += "" if "hidden_act" in numbers or "}" in numbers or name.startswith("codegeex") else ", hidden_act: gelu"
    text = (
        f"parallel_config: {{data_parallel: 1, model_parallel: 1}}\ntrainer: {{model_name: {name}}}\n"
        f"model:\n  model_config: {{type: PanguAlphaConfig, seq_length: 64{numbers}}}\nrunner_config: {{stop_step: 1}}\n"
    )
    return write("pangu.yaml", text)


@pytest.mark.parametrize(
    ("name", "numbers", "size", "fields"),
    [
        ("pangualpha_tiny", "", "tiny", {}),
        ("pangualpha_2_6b", ", num_layers: 32, hidden_size: 2560, ffn_hidden_size: 10240", "2.6b", {}),
        ("pangualpha_13b", ", vocab_size: 40000, hidden_dropout_rate: 0.1, attention_dropout_rate: 0.1", "13b", {}),
        ("pangualpha_embedded_tiny", ", num_layers: 4, hidden_act: silu", "embedded_tiny", {}),
        ("pangualpha_tiny", ", num_layers: 2", None, {"num_layers": 2}),
        ("pangualpha_tiny", ", hidden_size: 64, num_heads: 2", None, {"hidden_size": 64, "num_heads": 2}),
        (
            "pangualpha_tiny",
            ", ffn_hidden_size: 100, vocab_size: 999",
            None,
            {"ffn_hidden_size": 100, "vocab_size": 999},
        ),
        ("pangualpha_tiny", ", dropout_rate: 0.3", None, {"dropout_rate": 0.3}),
        ("codegeex_13b", ", num_layers: 39", None, {"num_layers": 39}),
        ("pangualpha_tiny", ", hidden_act: gelu", "tiny", {}),
        ("pangualpha_tiny", ", hidden_act: fast_gelu", None, {"activation": "fast_gelu"}),
        ("pangualpha_switch_tiny", ", hidden_act: gelu}\nmoe_config: {expert_num: 8", "switch_tiny", {}),
    ],
)
def test_numbers_beside_a_size_are_those_of_the_network(write, tmp_path, name, numbers, size, fields):
    done = translate(pangu(write, name, numbers), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.train.get("size") == size
    base = size_config("codegeex" if name.startswith("codegeex") else "pangu", size or name.partition("_")[2])
    assert done.settings.model == (dataclasses.replace(base, **fields) if fields else None)
    assert not done.losses
    for key in fields:
        theirs = "hidden_act" if key == "activation" else key
        note = next(note for note in done.notes if note.key == f"model.model_config.{theirs}")
        assert note.text == f"--config: write it with --config-out FILE; --size {name.partition('_')[2]} has " + str(
            base.ffn_size if key == "ffn_hidden_size" else getattr(base, key)
        )


def test_numbers_that_no_network_here_has_are_named(write, tmp_path):
    with pytest.raises(ConfigError, match=r"pangu\.yaml:4: model\.model_config: hidden_size 128 is not divisible"):
        translate(pangu(write, "pangualpha_tiny", ", num_heads: 7"), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    for name, numbers, lost in (
        ("pangualpha", ", num_layers: 2, hidden_act: gelu", {"num_layers", "hidden_act"}),
        ("pangualpha_tiny", ", hidden_act:", {"hidden_act"}),  # fast_gelu is MindFormers' default
        (
            "pangualpha_tiny",
            ", hidden_dropout_rate: 0.1, attention_dropout_rate: 0.0",
            {"hidden_dropout_rate", "attention_dropout_rate"},
        ),
        (
            "pangualpha_tiny",
            ", hidden_act: relu, post_layernorm_residual: True",
            {"hidden_act", "post_layernorm_residual"},
        ),
        (
            "pangualpha_tiny",
            ", hidden_act: gelu, use_moe: True}\nmoe_config: {expert_num: 8",
            {"use_moe", "expert_num"},
        ),
        (
            "pangualpha_gshard_tiny",
            ", hidden_act: gelu}\nmoe_config: {expert_num: 4, num_experts_chosen: 1, capacity_factor: 9.0",
            {"expert_num", "num_experts_chosen", "capacity_factor"},
        ),
    ):
        done = translate(pangu(write, name, numbers), "ours", RULES, tmp_path / "out.yaml", NOTHING)
        assert {note.key.rpartition(".")[2] for note in done.losses} == lost


def test_the_trainer_trains_no_other_model_where_a_file_names_none(write, tmp_path):
    built = trainer.Trainer(pangu(write, "pangualpha"), train_dataset="x", output_dir=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"pangu\.yaml names no model of a size known here: give size="):
        built.train()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("pre_seq_len: None", "pre_seq_len: 128"), "pre_seq_len is 128; only None is supported"),
        (("pre_seq_len: None", "post_mlp_layernorm: True"), "post_mlp_layernorm is True; only False"),
        (("rope_ratio", "multi_query_attention: False\n    rope_ratio"), "multi_query_attention is False; only True"),
    ],
)
def test_another_network_of_mindformers_is_not_expressible(write, tmp_path, change, why):
    path = write("glm.yaml", GLM4.replace("EPSILON", "1.0e-5").replace("RATIO", "500").replace(*change))
    done = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    note = next(note for note in done.notes if note.key == "model.model_config.type")
    assert note.fate == "not expressible" and why in note.text
    assert done.settings.network is None
    with pytest.raises(ConfigError, match="describes no model"):
        model_text(done.settings, path)


def test_a_wrong_number_of_a_network_is_named(write):
    with pytest.raises(ConfigError, match=r"model\.model_config: num_heads 7 is not divisible"):
        glm(write, "1.0e-5", "500\n    num_attention_heads: 7")
    with pytest.raises(ConfigError, match="layer_norm_epsilon"):
        glm(write, "small", "500")


LLAMA = """\
parallel_config: {data_parallel: 2, model_parallel: 4}
model:
  model_config: {type: LlamaConfig, KEYS}
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "hidden_size: 4096",
            {"ffn_hidden_size": 11008, "num_kv_heads": None, "qkv_bias": False, "output_bias": False},
        ),
        (
            "hidden_size: 8192, num_heads: 64, n_kv_heads: 8, ffn_dim_multiplier: 1.3, multiple_of: 4096",
            {"ffn_hidden_size": 28672, "num_kv_heads": 8},
        ),
        (
            "intermediate_size: 12800, qkv_has_bias: True, attn_proj_has_bias: True, theta: 16000000.0",
            {"ffn_hidden_size": 12800, "qkv_bias": True, "output_bias": True, "rope_theta": 16000000.0},
        ),
        (
            "qkv_has_bias: True, max_position_embedding: 32768",
            {"qkv_bias": True, "output_bias": False, "seq_len": 32768},
        ),
    ],
)
def test_a_llama_of_mindformers_has_the_widths_mindformers_would_give_it(write, tmp_path, keys, expected):
    path = write("llama.yaml", LLAMA.replace("KEYS", keys))
    family, model = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING).settings.network
    assert family == "pangu"
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(("family", "size"), [("codegeex", "2_6b"), ("codegeex", "4_9b"), ("pangu", "embedded_7b")])
def test_sizes_come_back_from_mindformers_as_networks(family, size, tmp_path):
    known = Settings(SINGLE_DEVICE, {"model": family, "size": size}, None)
    there = translate(CONFIGS / "pangu_13b_dp4_tp8_pp2.yaml", "mindformers1", RULES, tmp_path / "x", known)
    (tmp_path / "theirs.yaml").write_text(there.text)
    back = translate(tmp_path / "theirs.yaml", "ours", RULES, tmp_path / "x", NOTHING)
    original = size_config(family, size)
    found_family, found = back.settings.network
    assert (found_family, dataclasses.replace(found, seq_len=original.seq_len)) == (family, original)


def test_no_key_of_mindformers_own_networks_is_unknown(write, tmp_path):
    package = find_spec("mindformers")
    if package is None:
        pytest.skip("mindformers is not installed")
    models = Path(package.submodule_search_locations[0]) / "models"
    for name, place in {"ChatGLM2Config": "glm2/glm2_config.py", "LlamaConfig": "llama/llama_config.py"}.items():
        tree = ast.parse((models / place).read_text(encoding="utf-8"))
        found = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        defaults = dict(zip([a.arg for a in found.args.args[1:]], map(ast.unparse, found.args.defaults), strict=True))
        assert len(defaults) > 50
        plain = {key: value for key, value in defaults.items() if not value.startswith("default_")}
        lines = "".join(f"    {key}: {value}\n" for key, value in plain.items())
        text = f"parallel_config: {{data_parallel: 2}}\nmodel:\n  model_config:\n    type: {name}\n{lines}"
        done = translate(write(f"{name}.yaml", text), "ours", RULES, tmp_path / "out.yaml", NOTHING)
        assert [note.key for note in done.notes if note.fate == "unknown"] == []
        assert done.settings.network is not None
