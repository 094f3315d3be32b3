# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction of folders of DeepSeek-V3's shape: each depth is a model of one layer on inputs computed here."""

import dataclasses
import json

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from golden_cases import training_network
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.core.errors import ConfigError
from sporeloom.models.family import family_module, size_config

SOURCE = "golden_v3/deepseek_mla/case_a/plain"
DEPTHS = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case():
    """config.json and tensors with two layers of multi-token prediction, and the reference's outputs without them."""
    source, draw = shared(SOURCE), np.random.default_rng(4)
    config = json.loads((source / "config.json").read_text())
    tensors, layers, d = load_file(source / "model.safetensors"), config["num_hidden_layers"], config["hidden_size"]
    for depth in range(DEPTHS):
        own = f"model.layers.{layers + depth}."
        for name in [name for name in tensors if name.startswith(f"model.layers.{layers - 1}.")]:
            tensors[own + name.split(".", 3)[3]] = tensors[name] * np.float32(1.1 - 0.3 * depth)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{own}{name}.weight"] = draw.uniform(0.5, 1.5, d).astype(np.float32)
        tensors[f"{own}eh_proj.weight"] = (draw.normal(size=(d, 2 * d)) / np.sqrt(2 * d)).astype(np.float32)
        tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"]
    golden = dict(np.load(source / "golden.npz"))
    return {**config, "num_nextn_predict_layers": DEPTHS}, tensors, golden


def imported(folder, config, tensors):
    (folder / "published").mkdir(parents=True)
    (folder / "published/config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "published/model.safetensors")
    import_published(open_published(folder / "published"), folder / "ours")
    return folder / "ours"


def normed(x, weight, epsilon):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon) * weight


def one_layer(folder, config, tensors, depth, inputs):
    """Logits of the layer of a depth on rows (T, D), which are the embeddings of the tokens 0 to T - 1."""
    own = f"model.layers.{config['num_hidden_layers'] + depth}."
    table = np.zeros_like(tensors["model.embed_tokens.weight"])
    table[: len(inputs)] = inputs
    dense = config["first_k_dense_replace"] > config["num_hidden_layers"] + depth
    of_layer = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    alone = {
        **{f"model.layers.0.{name.removeprefix(own)}": tensors[name] for name in tensors if name.startswith(own)},
        "model.norm.weight": tensors[f"{own}shared_head.norm.weight"],
        "model.embed_tokens.weight": table,
        "lm_head.weight": tensors["lm_head.weight"],
    }
    alone = {n: a for n, a in alone.items() if "layers" not in n or n.split(".", 3)[3].startswith(of_layer)}
    told = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": int(dense)}
    *_, net = training_network(imported(folder, {**config, **told}, alone))
    tokens = Tensor(np.arange(len(inputs), dtype=np.int32)[None])
    return net.model(tokens, tokens).asnumpy(), net.model.hidden(tokens, tokens)[0].asnumpy()


def test_each_depth_reads_the_normed_state_before_it(case, tmp_path):
    config, tensors, golden = case
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        _, model, net = training_network(imported(tmp_path / "all", config, tensors))
        assert (model.num_mtp_layers, model.mtp_input) == (DEPTHS, "after_norm")
        assert model.mtp_repeats_embedding and model.mtp_repeats_head
        ids = golden["input_ids"][:1].astype(np.int32)
        places = Tensor(np.arange(ids.shape[1], dtype=np.int32)[None])
        later = [np.pad(ids[:, depth:], ((0, 0), (0, depth)), constant_values=-1) for depth in range(1, DEPTHS + 1)]
        logits, _ = net.model.logits_of_depths(Tensor(ids), places, [Tensor(tokens) for tokens in later])
        np.testing.assert_allclose(logits[0].asnumpy(), golden["logits"][0], rtol=0, atol=2e-4)
        hidden, epsilon = net.model.hidden(Tensor(ids), places)[0].asnumpy(), config["rms_norm_eps"]
        for depth in range(DEPTHS):
            own = f"model.layers.{config['num_hidden_layers'] + depth}."
            embedded = tensors["model.embed_tokens.weight"][np.maximum(later[depth][0], 0)]
            both = [normed(embedded, tensors[f"{own}enorm.weight"], epsilon)]
            both += [normed(hidden, tensors[f"{own}hnorm.weight"], epsilon)]
            inputs = np.concatenate(both, 1) @ tensors[f"{own}eh_proj.weight"].T
            expected, hidden = one_layer(tmp_path / str(depth), config, tensors, depth, inputs.astype(np.float32))
            np.testing.assert_allclose(logits[depth + 1].asnumpy(), expected, rtol=0, atol=2e-4)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


def test_what_is_written_back_is_what_was_published(case, tmp_path):
    config, tensors, _ = case
    folder = imported(tmp_path, config, tensors)
    assert export_published(folder, tmp_path / "again", model_type="deepseek_v3")[0] == "deepseek_v3"
    again = load_file(tmp_path / "again/model.safetensors")
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in tensors.items()}
    assert json.loads((tmp_path / "again/config.json").read_text())["num_nextn_predict_layers"] == DEPTHS


def test_a_model_that_reads_other_states_is_not_written_so():
    ways = {way.model_type: way for way in family_module("pangu", "weights").PUBLISHED}
    ultra = size_config("pangu", "ultra_moe_tiny")
    assert ways["pangu_ultra_moe"].write(ultra)["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigError, match="Pangu Ultra MoE: mtp_input 'after_norm' instead of 'before_norm'"):
        ways["pangu_ultra_moe"].write(dataclasses.replace(ultra, mtp_input="after_norm"))
    experts = dataclasses.replace(ultra.experts, correction_bias=True)
    deepseek = dataclasses.replace(ultra, block="sequential", experts=experts)
    with pytest.raises(ConfigError, match="DeepSeek-V3: mtp_input 'before_norm' instead of 'after_norm'"):
        ways["deepseek_v3"].write(deepseek)
