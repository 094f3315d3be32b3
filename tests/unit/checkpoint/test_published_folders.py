# SPDX-License-Identifier: Apache-2.0
"""Published folders: what their config.json says is computed or refused, key by key, and they hold one set of weights. What
transformers 5.24 makes of the keys was compared with its logits once."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from codegeex.config import GLM
from palm.config import PALM
from pangu.config import OPEN_PANGU, PRO_MOE
from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.checkpoint.model_folder import copy_beside, load_config, load_weights, open_weights, save_checkpoint
from sporeloom.checkpoint.tensor_files import model_files
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import HASHES
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import config_with_file
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.strategy.tensor_slice import TensorSlice

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "head_dim": 8, "ffn_hidden_size": 32}
PANGU = ModelConfig(**OPEN_PANGU, **SIZES, num_kv_heads=2, tied_embedding=False, qkv_bias=False, output_bias=False)
CODEGEEX = ModelConfig(**GLM, **SIZES, num_kv_heads=2, tied_embedding=False, rope_dim=4, rope_theta=5e4)
PALMS = ModelConfig(**PALM, **SIZES)
EXPERTS = ExpertConfig(
    **PRO_MOE,
    num_experts=4,
    experts_per_token=2,
    ffn_hidden_size=6,
    shared_ffn_hidden_size=10,
    balance_loss=0.01,
    balance_over="batch",
)
MOE = dataclasses.replace(PANGU, experts=EXPERTS, qkv_bias=True, output_bias=True, ffn_hidden_size=6)
KINDS = {  # model_type: (family, model)
    "llama": ("pangu", PANGU),
    "PanguEmbedded": ("pangu", PANGU),
    "PanguProMoE": ("pangu", MOE),
    "glm": ("codegeex", CODEGEEX),
    "chatglm": ("codegeex", CODEGEEX),
    "palm": ("palm", PALMS),
}
CHANGES = {  # name: (model_types, what the model has otherwise)
    "plain": (KINDS, {}),
    "biases": (("llama", "PanguEmbedded"), {"qkv_bias": True, "output_bias": True}),
    "no biases": (("glm", "chatglm"), {"qkv_bias": False}),
    "tied": (("llama", "PanguEmbedded", "PanguProMoE", "glm", "chatglm"), {"tied_embedding": True}),
    "one key for all heads": (("llama", "glm"), {"num_kv_heads": 1}),
    "as many keys as queries": (("llama", "glm"), {"num_kv_heads": 4}),
    "another RoPE": (("llama", "PanguEmbedded", "PanguProMoE", "glm"), {"rope_theta": 1234567.8}),
    "another epsilon": (KINDS, {"layer_norm_epsilon": 1.5625e-07}),
    "several end tokens": (KINDS, {"eod_id": 3, "loss_ignore_id": 3, "stop_ids": (5, 7)}),
    "scaled logits": (("palm",), {"logits_scale": 0.25, "z_loss": 1e-4}),
    "no auxiliary loss": (("PanguProMoE",), {"experts": dataclasses.replace(EXPERTS, balance_loss=0.0)}),
    **{f"{dim} of a head's features turned": (("glm",), {"rope_dim": dim}) for dim in (2, 4, 6, 8)},
}
NOT_PUBLISHED = ("embedding_init_std", "qkv_init_std", "init_std", "output_init_std", "loss_ignore_id")
"""Fields of training, which no config.json has."""


def weights_of(model):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(model).items()}


def published(folder, model_type="llama", values=None, **change):
    """A folder as it is published, and the weights in it under our names."""
    family, model = KINDS[model_type]
    model = dataclasses.replace(model, **change)
    save_checkpoint(folder / "ours", weights_of(model), family, model)
    export_published(folder / "ours", folder / "theirs", model_type=model_type)
    (folder / "theirs" / HASHES).unlink()  # others have none
    edit(folder / "theirs", values or {})
    return folder / "theirs"


def edit(folder, values):
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **values}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("change", "model_type"), [(name, kind) for name in CHANGES for kind in CHANGES[name][0]])
def test_what_is_exported_and_converted_is_the_same_model(change, model_type, tmp_path):
    source = published(tmp_path, model_type, **CHANGES[change][1])
    import_published(open_published(source), tmp_path / "again")
    (family, before), (_, after) = load_config(tmp_path / "ours"), load_config(tmp_path / "again")
    assert family == KINDS[model_type][0] == load_config(tmp_path / "again")[0]
    for field in dataclasses.fields(before):
        if field.name not in NOT_PUBLISHED:
            wanted, found = getattr(before, field.name), getattr(after, field.name)
            assert found == wanted or (field.name == "rope_dim" and after.rotated == before.rotated), field.name
    first, second = load_weights(tmp_path / "ours"), load_weights(tmp_path / "again")
    assert {name: value.tobytes() for name, value in first.items()} == {n: v.tobytes() for n, v in second.items()}


@pytest.mark.parametrize("head_dim", [*range(2, 130, 2), 192, 256])
def test_every_share_of_a_head_is_read_as_it_is_written(head_dim):
    (way,) = [way for way in family_module("codegeex", "weights").PUBLISHED if way.model_type == "glm"]
    for rope_dim in range(2, head_dim + 1, 2):
        model = dataclasses.replace(CODEGEEX, head_dim=head_dim, rope_dim=rope_dim)
        written = way.write(model)
        assert int(head_dim * written["partial_rotary_factor"]) == rope_dim  # as transformers works it out
        assert way.read(written)["rope_dim"] == rope_dim


ROPE = {  # name: (keys of config.json, theta)
    "transformers 4": ({"rope_theta": 7e5}, 7e5),
    "transformers 5": ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, 7e5),
    "transformers 5, both": ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, 7e5),
    "the older word": ({"rope_theta": ..., "rope_parameters": {"type": "default", "rope_theta": 7e5}}, 7e5),
    "both words": ({"rope_theta": 7e5, "rope_scaling": {"type": "default", "rope_type": "default"}}, 7e5),
    "no word": ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7e5}}, 7e5),
    "a scaling that is none": ({"rope_theta": 7e5, "rope_scaling": {"rope_type": "default"}}, 7e5),
    "none by the older word": ({"rope_theta": 7e5, "rope_scaling": {"type": "default"}}, 7e5),
    "a factor of 1": ({"rope_theta": 7e5, "rope_scaling": {"type": "linear", "factor": 1.0}}, 7e5),
    "nothing": ({"rope_theta": 7e5, "rope_scaling": None, "rope_parameters": None}, 7e5),
    "empty": ({"rope_theta": 7e5, "rope_scaling": {}, "rope_parameters": {}}, 7e5),
    "entries that are empty": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "factor": None}}, 7e5
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "PanguEmbedded", "PanguProMoE", "glm"])
@pytest.mark.parametrize("case", ROPE)
def test_rotary_positions_wherever_they_are_said(case, model_type, tmp_path):
    values, theta = ROPE[case]
    extra = {"partial_rotary_factor": ...} if model_type == "glm" else {}
    model = open_published(published(tmp_path, model_type, {**values, **extra})).model
    assert (model.rope_theta, model.rotated) == (theta, 4 if model_type == "glm" else 8)


@pytest.mark.parametrize(
    ("values", "rotated"),
    [
        ({"partial_rotary_factor": 1.0}, 8),
        ({"partial_rotary_factor": 0.25}, 2),
        ({"partial_rotary_factor": ...}, 4),
        ({"partial_rotary_factor": ..., "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 5e4}}, 6),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}}, 6),
    ],
)
def test_how_much_of_a_head_glm_turns(values, rotated, tmp_path):
    assert open_published(published(tmp_path, "glm", values)).model.rotated == rotated


SCALED = {  # name: (keys, words)
    **{
        f"{place} {word} {kind}": ({place: {word: kind, "factor": 2.0}}, f"{place}.{word} is {kind!r}, which is not")
        for place in ("rope_parameters", "rope_scaling")
        for word in ("type", "rope_type")
        for kind in ("longrope", "su", "mrope", "proportional", "axial")
    },
    "no factor": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing; yarn scaling needs it"),
    "a factor of nothing": ({"rope_parameters": {"type": "default", "factor": 8.0}}, "rope_parameters.factor is 8.0"),
    "a factor alone": ({"rope_scaling": {"factor": 4}}, "rope_scaling.factor is 4"),
    "words that differ": ({"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2}}, "contradict each"),
    "of each kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "rope_parameters.full_attention is",
    ),
    "sections": ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "rope_scaling.mrope_section"),
    "no mapping": ({"rope_scaling": "linear"}, "rope_scaling must be a mapping of keys, got 'linear'"),
    "twice": (
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 2e4}},
        "rope_parameters.rope_theta 10000.0 and rope_scaling.rope_theta 20000.0 contradict each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("model_type", ["llama", "glm"])
def test_angles_that_are_not_computed_are_refused(case, model_type, tmp_path):
    values, words = SCALED[case]
    with pytest.raises(ConfigError) as error:
        open_published(published(tmp_path, model_type, values))
    assert words in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "theirs/config.json"))


FINE = {  # keys that a published config.json has and that change nothing
    **{"_name_or_path": "x/y", "transformers_version": "5.24.0", "dtype": "bfloat16", "use_cache": True},
    **{"auto_map": {"a": "b"}},
    **{"bos_token_id": 1, "pad_token_id": 0, "pretraining_tp": 2, "temperature": 0.6, "output_router_logits": False},
    **{"sliding_window": None, "use_sliding_window": False, "attention_chunk_size": None},
    **{"layer_types": ["full_attention"] * 2},
    **{"quantization_config": None, "final_logit_softcapping": None, "attn_logit_softcapping": None, "is_causal": True},
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0, "logit_scale": None, "qk_norm": False},
    **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "mlp_only_layers": [], "alibi": False, "clip_qkv": None},
}  # fmt: skip
CHANGING = {
    **{"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    **{"attention_chunk_size": 8192, "quantization_config": {"quant_method": "gptq"}, "quantization_bit": 4},
    **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "clip_qkv": 8.0},
    **{"attention_multiplier": 0.0156, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    **{"logit_scale": 0.0625, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "lm_head_multiplier": 0.5},
    **{"qk_norm": True, "use_qk_norm": True, "qk_layernorm": True, "alibi": True, "is_causal": False, "causal": False},
    **{"use_bidirectional_attention": True, "no_rope_layers": [1, 0], "rope_interleave": True, "rotary_pct": 0.25},
    **{"partial_rotary_factor": 0.5, "param_sink_number": 128, "sandwich_norm": True, "parallel_attn": True},
    **{"use_parallel_residual": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
    **{"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu", "mlp_bias": True, "per_layer_config": {"0": {}}},
    **{"add_cross_attention": True, "position_embedding_type": "alibi", "mlp_only_layers": [1], "use_logn_attn": True},
}  # fmt: skip


@pytest.mark.parametrize("model_type", KINDS)
def test_keys_that_change_nothing(model_type, tmp_path, capsys):
    source = published(tmp_path, model_type)
    capsys.readouterr()
    plain = open_published(source).model
    edit(source, FINE)
    assert open_published(source).model == plain
    assert "not known" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"rope_theta": True}, "rope_theta must be a number, got True"),
        ({"rope_theta": "10000"}, "rope_theta must be a number, got '10000'"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(values, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        open_published(published(tmp_path, "llama", values))


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_the_network_is_refused(key, model_type, tmp_path):
    if (key, model_type) == ("partial_rotary_factor", "glm"):
        return  # is computed
    with pytest.raises(ConfigError, match=r"theirs/config\.json: .*" + key.split("[")[0]):
        open_published(published(tmp_path, model_type, {key: CHANGING[key]}))


def test_all_of_them_are_told_at_once_and_a_window_that_is_off_is_none(tmp_path):
    with pytest.raises(ConfigError) as error:
        open_published(published(tmp_path, "llama", {"hidden_act": "gelu", "qk_norm": True, "clip_qkv": 8}))
    told = {problem.split(": ")[1].split(" ")[0] for problem in error.value.problems}
    assert told == {"hidden_act", "qk_norm", "clip_qkv"}
    edit(tmp_path / "theirs", {"hidden_act": "swish", "qk_norm": ..., "clip_qkv": ...})
    edit(tmp_path / "theirs", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2})
    assert open_published(tmp_path / "theirs")


def test_a_key_that_nobody_knows_is_not_passed_over_in_silence(tmp_path, capsys):
    source = published(tmp_path, "llama", {"warp_factor": 9, "unset": None, "_off": False})
    capsys.readouterr()
    open_published(source)
    assert "keys that are unknown and ignored: warp_factor\n" in capsys.readouterr().err


def test_two_sets_of_weights_are_not_chosen_between(tmp_path):
    source = published(tmp_path)
    tensors = load_file(source / "model.safetensors")
    index = {
        "weight_map": {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    }
    for file in sorted(set(index["weight_map"].values())):
        save_file({name: tensors[name] for name in tensors if index["weight_map"][name] == file}, source / file)

    def refused():
        with pytest.raises(ConfigError, match="two sets of weights") as error:
            open_published(source)
        return str(error.value)

    assert "model.safetensors" in refused() and "model-00001-of-00002.safetensors" in refused()  # no index yet
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json names model-00001-of-00002.safetensors" in refused()
    assert refused().endswith("there is model.safetensors; remove the one that is not the model's")
    (source / "model.safetensors").unlink()
    assert open_published(source).tensors.keys() == tensors.keys()
    save_file({"x": np.zeros(1)}, source / "model-00003-of-00003.safetensors")
    assert "besides it there is model-00003-of-00003.safetensors" in refused()
    (source / "model.safetensors.index.json").unlink()
    assert "model-00001-of-00002.safetensors" in refused()
    for file in source.glob("model-*"):
        file.unlink()
    save_file(tensors, source / "model.safetensors")
    save_file(
        {"x": np.zeros(1)}, source / "consolidated.safetensors"
    )  # another format's, which transformers leaves, too
    assert model_files(source) == [source / "model.safetensors"]


@pytest.mark.parametrize("model_type", ["llama", "PanguEmbedded", "glm", "chatglm"])
def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to(model_type, tmp_path):
    source = published(tmp_path, model_type, tied_embedding=True)
    word, head = {
        "chatglm": ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight")
    }.get(model_type, ("model.embed_tokens.weight", "lm_head.weight"))  # fmt: skip
    tensors = {
        name: value.astype(ml_dtypes.bfloat16) for name, value in load_file(source / "model.safetensors").items()
    }
    for dtype in (ml_dtypes.bfloat16, np.float32):
        save_file({**tensors, head: tensors[word].astype(dtype)}, source / "model.safetensors")
        found = open_published(source)
        assert head not in found.tensors and found.model.tied_embedding
    other = tensors[word].copy()
    other[-1, -1] += 1
    for wrong in (other, tensors[word][:-1]):
        save_file({**tensors, head: np.ascontiguousarray(wrong)}, source / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"tie_word_embeddings is true, but {head} is not {word}: remove it"):
            open_published(source)
    save_file({**tensors, head: other}, source / "model.safetensors")
    edit(source, {"tie_word_embeddings": False})
    assert head in open_published(source).tensors


@pytest.mark.parametrize("model_type", KINDS)
def test_a_published_folder_is_read_as_its_conversion_is(model_type, tmp_path):
    source = published(tmp_path, model_type)
    import_published(open_published(source), tmp_path / "converted")
    assert load_config(source) == load_config(tmp_path / "converted")
    here, there = open_weights(source), load_weights(tmp_path / "converted")
    assert here.shapes == {name: value.shape for name, value in there.items()}
    for name, value in there.items():
        np.testing.assert_array_equal(here.read(name, TensorSlice.full(value.shape)), value)
        shape = value.shape
        part = TensorSlice(tuple(n // 4 for n in shape), tuple(n - n // 4 * 2 for n in shape))  # the shard of a rank
        np.testing.assert_array_equal(here.read(name, part), value[part.slices])


def test_the_files_that_are_copied_from_a_published_folder_are_those_of_its_tokenizer(tmp_path):
    source = published(tmp_path)
    for name in ("tokenizer.model", "README.md", "pytorch_model.bin", "tokenizer_config.json"):
        (source / name).write_bytes(b"{}")
    (tmp_path / "copy").mkdir()
    copy_beside(source, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"tokenizer.model", "tokenizer_config.json"}


def test_what_a_published_configuration_has_too_many_or_too_few_is_logged_once(tmp_path, capsys):
    source = published(tmp_path, values={"eos_token_id": ..., "some_new_key": 3})
    load_config(source)
    load_config(source)
    logged = capsys.readouterr().err.splitlines()
    assert len(logged) == 3
    assert "Hugging Face folder (llama), read as a model of pangu" in " ".join(logged)
    assert "unknown and ignored: some_new_key" in " ".join(logged)
    assert "no eos_token_id" in " ".join(logged)


def test_a_published_configuration_replaces_all_fields_of_a_size_and_names_its_family(tmp_path):
    source, tiny = published(tmp_path, "glm"), size_config("codegeex", "tiny")
    for path in (source, source / "config.json"):
        assert config_with_file(path, tiny, "codegeex") == open_published(source).model
    with pytest.raises(ConfigError, match="a model of codegeex; give --model codegeex"):
        config_with_file(source, tiny, "pangu")


def test_a_model_type_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path):
    source = published(tmp_path, values={"model_type": "gpt2"})
    with pytest.raises(ConfigError, match=r"model_type 'gpt2' is unknown.*known: llama, .*glm"):
        load_config(source)
