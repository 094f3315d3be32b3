# SPDX-License-Identifier: Apache-2.0
"""The original implementations' weights, converted and scored with the tools, give the reference implementation's numbers."""

import json

import numpy as np
import pytest
from conftest import shared, tool

from sporeloom.core.hashes import write_hashes

ACTIVATIONS = {"gelu": "", "gelu_tanh": "_act_tanh", "fast_gelu": "_act_fast"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
    archive = np.load(shared("golden/pangu_case_a.npz"))
    return {name.removeprefix("golden."): archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def golden_codegeex():
    archive = np.load(shared("golden/codegeex_case_a.npz"))
    return {name.removeprefix("golden."): archive[name] for name in archive.files}


def convert(*arguments, family="pangu"):
    outcome = tool("tools/convert_checkpoint.py", "--model", family, *arguments)
    assert outcome.code == 0, outcome.output


def checkpoint(folder, activation, family="pangu"):
    config = folder / "config_in.json"
    eod_id = {"pangu": 9, "codegeex": 100}[family]
    values = {"num_heads": 4, "activation": activation, "eod_id": eod_id}
    config.write_text(json.dumps(values if family == "pangu" else {**values, "loss_ignore_id": eod_id}))
    source = shared(f"golden/{family}_case_a.npz")
    convert(
        "--from",
        "megatron",
        "--to",
        "ours",
        "--config",
        config,
        source,
        folder / "checkpoint",
        family=family,
    )
    return folder / "checkpoint"


def score(folder, ids, *arguments):
    np.save(folder / "ids.npy", ids)
    logits = folder / "logits.npy"
    outcome = tool(
        "tools/score.py",
        "--checkpoint",
        folder / "checkpoint",
        "--ids",
        folder / "ids.npy",
        "--logits-out",
        logits,
        "--overwrite",
        *arguments,
    )
    assert outcome.code == 0, outcome.output
    return json.loads(outcome.output.strip().splitlines()[-1])["loss"], np.load(logits)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_logits_and_losses_are_the_originals(tmp_path, golden, activation):
    suffix = ACTIVATIONS[activation]
    checkpoint(tmp_path, activation)
    loss, logits = score(tmp_path, golden["tokens_plus_one"])
    np.testing.assert_allclose(logits, golden["logits" + suffix], rtol=0, atol=1e-4)
    assert loss == pytest.approx(float(golden["loss" + suffix]), abs=1e-5)
    loss, logits = score(tmp_path, golden["tokens_plus_one"], "--eod-id", 9)
    np.testing.assert_allclose(logits, golden["logits_eod_reset" + suffix], rtol=0, atol=1e-4)
    assert loss == pytest.approx(float(golden["loss_eod_reset_all_tokens" + suffix]), abs=1e-5)
    if activation == "gelu_tanh":
        loss, _ = score(tmp_path, golden["padded_tokens_plus_one"], "--eod-id", 9)
        assert loss == pytest.approx(float(golden["padded_loss_mindspore_convention_act_tanh"]), abs=1e-5)


def test_codegeex_gives_the_originals_logits_and_losses(tmp_path, golden_codegeex):
    golden = golden_codegeex
    checkpoint(tmp_path, "fast_gelu", "codegeex")
    loss, logits = score(tmp_path, golden["tokens_plus_one"], "--eod-id", 100)
    np.testing.assert_allclose(logits, golden["logits_eod_reset"], rtol=0, atol=1e-4)
    assert loss == pytest.approx(float(golden["loss_eod_masked"]), abs=1e-5)
    assert loss == pytest.approx(float(golden["loss_mindspore_convention"]), abs=1e-5)
    config = tmp_path / "checkpoint" / "config.json"
    config.write_text(config.read_text().replace('"loss_ignore_id": 100', '"loss_ignore_id": -1'))
    write_hashes(config.parent)
    loss, logits = score(tmp_path, golden["tokens_plus_one"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    assert loss == pytest.approx(float(golden["loss"]), abs=1e-5)


def test_the_network_of_the_originals_pipeline_mode(tmp_path, golden):
    config = checkpoint(tmp_path, "gelu_tanh") / "config.json"
    config.write_text(config.read_text().replace("before_query", "after_query"))
    write_hashes(config.parent)
    _, logits = score(tmp_path, golden["input_ids"])
    expected = golden["transcribed_logits_pipeline_final_ln_last_act_tanh"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["pangu", "codegeex"])
def test_both_published_namings_give_the_same_weights_and_come_back_unchanged(tmp_path, family):
    def convert_here(*arguments):
        convert(*arguments, family=family)

    ours = checkpoint(tmp_path, "fast_gelu", family)
    config = tmp_path / "config_in.json"
    from_mindspore = tmp_path / "from_mindspore"
    source = shared(f"golden/{family}_case_a_mindspore_names.npz")
    convert_here("--from", "mindspore", "--to", "ours", "--config", config, source, from_mindspore)
    assert (from_mindspore / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    for dialect, name in (("megatron", "m.npz"), ("mindspore", "m.ckpt"), ("mindspore", "n.npz")):
        convert_here("--from", "ours", "--to", dialect, ours, tmp_path / name)
        convert_here("--from", dialect, "--to", "ours", "--config", config, tmp_path / name, tmp_path / f"{name}.back")
        assert (tmp_path / f"{name}.back" / "model.safetensors").read_bytes() == (
            ours / "model.safetensors"
        ).read_bytes()
    original, written = np.load(source), np.load(tmp_path / "n.npz")
    assert set(original.files) == set(written.files)
    assert all((original[name] == written[name]).all() for name in written.files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "megatron", "--to", "ours", "IN", "OUT"), "weights do not determine the number of heads"),
        (
            ("--from", "mindspore", "--to", "ours", "--size", "tiny", "IN", "OUT"),
            "backbone.word_embedding.embedding_table is missing",
        ),
        (("--from", "megatron", "--to", "mindspore", "--size", "tiny", "IN", "OUT"), "written to a .npz or .ckpt file"),
        (
            ("--from", "megatron", "--to", "ours", "--size", "tiny", "nowhere.npz", "OUT"),
            "nowhere.npz: there is no such file",
        ),
        (("--from", "torch", "--to", "ours", "IN", "OUT"), "invalid choice: 'torch'"),
    ],
)
def test_what_cannot_be_converted_says_why_and_writes_nothing(tmp_path, arguments, message):
    places = {"IN": shared("golden/pangu_case_a.npz"), "OUT": tmp_path / "out"}
    outcome = tool("tools/convert_checkpoint.py", *(places.get(a, a) for a in arguments))
    assert outcome.code == 2
    assert message in outcome.output
    assert "Traceback" not in outcome.output
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_archive_is_named(tmp_path, write):
    broken = write("broken.npz", b"PK\x03\x04nothing")
    outcome = tool(
        "tools/convert_checkpoint.py", "--from", "megatron", "--to", "ours", "--size", "tiny", broken, tmp_path / "out"
    )
    assert outcome.code == 2
    assert "broken.npz: cannot be read" in outcome.output
