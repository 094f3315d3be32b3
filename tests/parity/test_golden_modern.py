# SPDX-License-Identifier: Apache-2.0
"""openPangu-Embedded, CodeGeeX2, CodeGeeX4 and PaLM, read as they are published, give what reference implementations gave."""

import dataclasses
import json
import shutil

import mindspore as ms
import numpy as np
import pytest
from conftest import shared, tool
from golden_cases import importer, training_network
from mindspore import Tensor
from safetensors.numpy import load_file

from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.data.batch import document_positions
from sporeloom.inference.decoding import CachedDecoder
from sporeloom.inference.model import load_model
from sporeloom.inference.requests import Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import generate
from sporeloom.inference.uncached import UncachedDecoder
from sporeloom.models.family import family_module
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

pytestmark = pytest.mark.slow

CASES = {
    "tied": "openpangu_embedded_case_a/tied",
    "untied": "openpangu_embedded_case_a/untied",
    "codegeex2": "codegeex2_case_a",
    "codegeex4": "codegeex4_case_a",
    "palm": "palm_case_a",
    "pro_moe": "pangu_pro_moe_case_a",
}
FAMILY = {
    "tied": "pangu",
    "untied": "pangu",
    "codegeex2": "codegeex",
    "codegeex4": "codegeex",
    "palm": "palm",
    "pro_moe": "pangu",
}
SUFFIX = {"palm": "_scaled"}
TOTAL = {"palm": "total_loss_scaled", "pro_moe": "total_loss"}
"""With what models add to the cross-entropy."""
GRADIENTS = {"palm": "total_scaled.", "pro_moe": "total."}


@pytest.fixture(scope="module")
def engine():
    ms.set_device("CPU")
    return Engine.start(SINGLE_DEVICE)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    return importer("golden_modern", CASES, tmp_path_factory)


def batch(golden, prefix=""):
    """Inputs of the training network whose loss is the reference's: the last column is a label only."""
    ids = golden[f"{prefix}input_ids"]
    if prefix:
        positions, mask = golden["packed_position_ids"], golden["packed_loss_mask"]
    else:
        positions, mask = np.broadcast_to(np.arange(ids.shape[1]), ids.shape), np.ones((ids.shape[0], ids.shape[1] - 1))
    labels = np.concatenate([ids[:, 1:], ids[:, :1]], 1)
    weights = np.concatenate([mask / mask.sum(), np.zeros((len(ids), 1))], 1)
    return [Tensor(a.astype(np.int32)) for a in (ids, labels, positions)] + [Tensor(weights.astype(np.float32))]


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(engine, imported, name):
    folder, golden = imported(name)
    suffix = SUFFIX.get(name, "")
    family, config, net = training_network(folder)
    assert family == FAMILY[name]
    for prefix in ("", "packed_"):
        tokens, _, positions, _ = batch(golden, prefix)
        logits = net.model(tokens, positions).asnumpy().reshape(*tokens.shape, -1)
        np.testing.assert_allclose(logits, golden[f"{prefix}logits{suffix}"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(
        document_positions(golden["packed_input_ids"], config.eod_id), golden["packed_position_ids"]
    )
    weights = net.set_train().trainable_params()
    with_gradients = ms.value_and_grad(net, None, weights)
    plain = (
        without_auxiliary_losses(net, family, config) if name in TOTAL else lambda *inputs: with_gradients(*inputs)[0]
    )
    for prefix in ("", "packed_"):
        assert float(plain(*batch(golden, prefix))) == pytest.approx(float(golden[f"{prefix}loss{suffix}"]), abs=1e-5)
    loss, gradients = with_gradients(*batch(golden))
    if name in TOTAL:
        assert float(loss) == pytest.approx(float(golden[TOTAL[name]]), abs=1e-5)
    if name != "untied":
        check_gradients(name, weights, config, gradients)


def without_auxiliary_losses(net, family, config):
    experts = config.experts and dataclasses.replace(config.experts, balance_loss=0.0)
    plain = family_module(family, "model").ModelWithLoss(dataclasses.replace(config, z_loss=0.0, experts=experts))
    for mine, theirs in zip(plain.get_parameters(), net.get_parameters(), strict=True):
        mine.set_data(theirs)
    return plain


def check_gradients(name, weights, config, found):
    reference = np.load(shared(f"golden_modern/{CASES[name]}/grads.npz"))
    found = {w.name.removeprefix("model."): g.asnumpy() for w, g in zip(weights, found, strict=True)}
    (way, *_) = [w for w in family_module(FAMILY[name], "weights").PUBLISHED if w.model_type == model_type(name)]
    prefix = GRADIENTS.get(name, "")
    wanted = {theirs: reference[prefix + theirs] for theirs in way.tensors(config)}
    largest = max(np.abs(value).max() for value in wanted.values())
    for theirs, parts in way.tensors(config).items():
        whole = np.concatenate([found[p.name] if p.expert is None else found[p.name][p.expert] for p in parts])
        assert np.abs(whole - wanted[theirs]).max() <= 1e-4 * largest, theirs


def model_type(name):
    return json.loads(shared(f"golden_modern/{CASES[name]}/config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("untied", "codegeex2")])  # as tied, codegeex4
def test_greedy_tokens_with_a_cache_and_without(engine, imported, name):
    folder, golden = imported(name)
    family, config = load_config(folder)
    prompts = [golden[f"prompt_{j}"].tolist() for j in range(3)]
    sampler = Sampler(SamplingConfig(), (), config.vocab_size)
    slots = 128
    ways = [
        CachedDecoder(engine, load_model(folder, family, config, SINGLE_DEVICE, (3, slots)), config, 3, slots),
        UncachedDecoder(engine, load_model(folder, family, config, SINGLE_DEVICE), config, 3),
    ]
    assert ways[0].cache_bytes == 2 * config.num_layers * 3 * slots * config.kv_heads * config.head_size * 4
    for decoding, count in zip(ways, (3, 2), strict=True):  # without a cache texts of up to 16 tokens: one graph
        tokens = {j: [] for j in range(count)}
        requests = [Request(prompt, 8, sampler, lambda found: False, j) for j, prompt in enumerate(prompts[:count])]
        for new in generate(decoding, engine, requests):
            tokens[new.request].append(new.token)
        for j in range(count):
            assert tokens[j] == golden[f"greedy_tokens_{j}"].tolist(), (type(decoding).__name__, j)


@pytest.mark.parametrize("name", ["codegeex2", "codegeex4"])
def test_the_other_naming_is_the_same_model(imported, name, tmp_path):
    folder, _ = imported(name)
    source = tmp_path / "glm"
    source.mkdir()
    published = shared(f"golden_modern/{CASES[name]}")
    (source / "config.json").write_text((published / "config_glm.json").read_text())
    (source / "model.safetensors").write_bytes((published / "model_glm_names.safetensors").read_bytes())
    import_published(open_published(source), tmp_path / "again")
    first, second = load_weights(folder), load_weights(tmp_path / "again")
    assert {name: value.tobytes() for name, value in first.items()} == {n: v.tobytes() for n, v in second.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_back_is_what_was_published(imported, name, tmp_path):
    folder, _ = imported(name)
    assert export_published(folder, tmp_path / "published", model_type=model_type(name))[0] == model_type(name)
    first = load_file(shared(f"golden_modern/{CASES[name]}/model.safetensors"))
    second = load_file(tmp_path / "published/model.safetensors")
    assert {n: v.tobytes() for n, v in first.items() if "inv_freq" not in n} == {
        n: v.tobytes() for n, v in second.items()
    }
    kept = json.loads((tmp_path / "published/config.json").read_text())
    original = json.loads(shared(f"golden_modern/{CASES[name]}/config.json").read_text())
    for key in kept.keys() & original.keys() - {"architectures"}:
        assert kept[key] == original[key], key


def test_bfloat16_keeps_what_has_few_bits(imported, tmp_path):
    """The reference's weights have 6 significant bits."""
    folder, _ = imported("codegeex4")
    source = open_published(shared(f"golden_modern/{CASES['codegeex4']}"))
    assert import_published(source, tmp_path / "narrow", "bfloat16") * 2 == import_published(source, tmp_path / "wide")
    first, second = load_weights(folder), load_weights(tmp_path / "narrow")
    assert {n: v.tobytes() for n, v in first.items()} == {n: v.tobytes() for n, v in second.items()}


def test_the_tool_reads_writes_and_refuses(imported, tmp_path):
    published, ours = shared(f"golden_modern/{CASES['untied']}"), tmp_path / "ours"
    outcome = tool("tools/convert_checkpoint.py", "--from", "huggingface", published, ours)
    assert outcome.code == 0 and "81,408 parameters of pangu" in outcome.output, outcome.output
    outcome = tool("tools/convert_checkpoint.py", "--from", "ours", "--to", "huggingface", ours, tmp_path / "back")
    assert outcome.code == 0 and "as llama" in outcome.output, outcome.output
    x = tmp_path / "x"
    cases = [
        ("--from huggingface", tmp_path / "absent", x, "there is no such folder"),
        ("--from huggingface", published, ours, "is there already"),
        ("--from huggingface", ours, x, "model_type 'pangu' is unknown"),
        ("--from huggingface --model codegeex", published, x, "model_type 'PanguEmbedded' is unknown"),
        ("--from huggingface --to megatron", published, x, "needs --to ours, not --to megatron"),
        ("--from ours --to huggingface --model-type glm", ours, x, "known: llama, PanguEmbedded"),
        ("--from huggingface --size tiny", published, x, "--size: the folder's config.json says it all"),
        ("--from ours --to huggingface --model palm", ours, x, "holds a model of pangu"),
        ("--from ours --to megatron", ours, x.with_suffix(".npz"), "model with a top query layer"),
    ]
    for flags, source, target, words in cases:
        outcome = tool("tools/convert_checkpoint.py", *flags.split(), source, target)
        assert outcome.code == 2 and words in outcome.output, (flags, outcome.output)
        assert "Traceback" not in outcome.output
    assert not x.exists()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("untied", "pangu_tiny_tp2_pp2"),
        ("codegeex4", "pangu_tiny_dp2_tp2_zero"),
        ("pro_moe", "pangu_pro_moe_tiny_ep2_pp2"),
    ],
)
def test_published_weights_come_straight_into_the_files_of_ranks(imported, name, strategy, tmp_path):
    folder, _ = imported(name)
    source, shards = shared(f"golden_modern/{CASES[name]}"), tmp_path / "shards"
    outcome = tool("tools/convert_checkpoint.py", "--from", "huggingface", source, shards, "--strategy", strategy)
    assert outcome.code == 0, outcome.output
    assert "in 4 files" in outcome.output
    found, expected = load_weights(shards), load_weights(folder)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    held = [sum(value.size for value in load_file(path).values()) for path in shards.glob("rank-*.safetensors")]
    assert sum(held) == sum(value.size for value in expected.values())  # nothing twice
    assert max(held) < 0.6 * sum(held)
    assert load_config(shards) == load_config(folder)


def test_a_checkpoint_of_weights_alone_is_started_from_and_not_resumed(tmp_path):
    source, out = tmp_path / "published", tmp_path / "out"
    shutil.copytree(shared(f"golden_modern/{CASES['untied']}"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))  # a new tokenizer's
    (tmp_path / "text.txt").write_text("a b c d e f g " * 200)
    flags = ("--data", tmp_path / "text.txt", "--steps", 2, "--batch-size", 4, "--seq-len", 16)
    losses = {}
    for name, sharded in {"whole": (), "shards": ("--strategy", "pangu_tiny_tp2_pp2")}.items():
        made = tool("tools/convert_checkpoint.py", "--from", "huggingface", source, tmp_path / name, *sharded)
        assert made.code == 0, made.output
        trained = ("--from-checkpoint", tmp_path / name, "--output-dir", out / name, *sharded)
        outcome = tool("tools/train.py", *flags, *trained, processes=4 if sharded else 1)
        assert outcome.code == 0, outcome.output
        lines = (out / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    np.testing.assert_allclose(losses["shards"], losses["whole"], rtol=1e-5)
    (out / "whole" / "checkpoints").mkdir()
    (tmp_path / "shards").rename(out / "whole" / "checkpoints" / "step-00000009")
    flags = (*flags, "--model", "pangu", "--config", out / "whole" / "checkpoint" / "config.json")
    outcome = tool("tools/train.py", *flags, "--output-dir", out / "whole", "--resume")
    assert outcome.code == 2
    assert "only weights, no training state to resume; start from them with --from-checkpoint" in outcome.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--from", "ours", "--to", "ours"), "sporeloom reshard-checkpoint"),
        (("--from", "huggingface", "--dtype", "bfloat16"), "--dtype and --strategy do not go together"),
        (("--from", "huggingface", "--ranks-of", "pangu_tiny_tp2"), "--ranks-of and --strategy do not go together"),
    ],
)
def test_what_shards_cannot_be_is_refused(flags, message, tmp_path):
    source = shared(f"golden_modern/{CASES['untied']}")
    outcome = tool("tools/convert_checkpoint.py", *flags, source, tmp_path / "out", "--strategy", "pangu_tiny_tp2")
    assert outcome.code == 2 and message in outcome.output
    assert not (tmp_path / "out").exists()
