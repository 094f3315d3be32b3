# SPDX-License-Identifier: Apache-2.0
"""A model with experts made of a dense one computes what that one did, and trains on."""

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT, in_process, tool

from sporeloom.checkpoint.manifest import checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.checkpoint.sharded import damage

CORPUS = ROOT / "examples" / "small_town.txt"
NARROW = ("--optimizer-state-dtype", "bfloat16")
SHORT = ("--batch-size", 2, "--seq-len", 32)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A dense run of two steps: its weights, and the state it could be resumed from."""
    folder = tmp_path_factory.mktemp("dense") / "out"
    small = folder.parent / "small.json"
    small.write_text('{"num_layers": 3, "hidden_size": 64}')
    told = ("--config", small, "--steps", 2, "--save-every", 2, *NARROW, *SHORT, "--output-dir", folder)
    outcome = tool("tools/train.py", "--data", CORPUS, *told)
    assert outcome.code == 0, outcome.output
    return folder


def test_every_expert_is_a_copy_and_the_logits_stay(run, tmp_path):
    out = tmp_path / "moe"
    outcome = tool(
        "tools/upcycle.py",
        "--checkpoint",
        run / "checkpoint",
        "--num-experts",
        4,
        "--layer-frequency",
        2,
        "--out",
        out,
        "--verify",
    )
    assert outcome.code == 0 and "within 1e-05" in outcome.output, outcome.output
    dense, weights = load_weights(run / "checkpoint"), load_weights(out)
    _, config = load_config(out)
    assert [config.has_experts(layer) for layer in range(3)] == [False, True, False]
    name = "layers.1.mlp.experts.up.weight"
    assert weights[name].shape == (4, *dense["layers.1.mlp.up.weight"].shape)
    assert (weights[name] == dense["layers.1.mlp.up.weight"]).all()
    assert (weights["layers.0.mlp.up.weight"] == dense["layers.0.mlp.up.weight"]).all()
    assert (out / "tokenizer.model").exists()


def test_noise_tells_the_experts_apart_and_verify_tells_when_weights_do_not_add_up(run, tmp_path):
    arguments = ("tools/upcycle.py", "--checkpoint", run / "checkpoint", "--num-experts", 4, "--out")
    assert in_process(*arguments, tmp_path / "noisy", "--noise", 0.01).code == 0
    first, second, *_ = load_weights(tmp_path / "noisy")["layers.0.mlp.experts.up.weight"]
    assert np.std(first - second) == pytest.approx(0.01 * 2**0.5, rel=0.05)
    outcome = tool(*arguments, tmp_path / "unnormalized", "--normalize", "none", "--verify")
    assert outcome.code == 1 and "--normalize none" in outcome.output


def test_a_training_checkpoint_keeps_its_moments_and_is_resumed(run, tmp_path):
    out = tmp_path / "out" / "checkpoints" / "step-00000002"
    outcome = in_process(
        "tools/upcycle.py",
        "--checkpoint",
        run / "checkpoints",
        "--num-experts",
        2,
        "--layer-frequency",
        2,
        "--out",
        out,
        "--carry-optimizer",
    )
    assert outcome.code == 0, outcome.output
    manifest = read_manifest(out)
    assert damage(out, manifest) is None
    dense = read_manifest(checkpoints(run / "checkpoints")[0])
    name = "adam_m.layers.1.mlp.{}up.weight"
    assert manifest.tensors[name.format("experts.")].shape == (2, *dense.tensors[name.format("")].shape)
    assert {
        name.split(".")[0]: entry.dtype for name, entry in manifest.tensors.items() if "_" in name.split(".")[0]
    } == {name.split(".")[0]: entry.dtype for name, entry in dense.tensors.items() if "_" in name.split(".")[0]}
    assert manifest.tensors[name.format("experts.")].dtype == "bfloat16"
    told = (
        "--config",
        out / "config.json",
        *NARROW,
        *SHORT,
        "--steps",
        3,
        "--resume",
        "--output-dir",
        tmp_path / "out",
    )
    outcome = tool("tools/train.py", "--data", CORPUS, *told)
    assert outcome.code == 0, outcome.output
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 3 and line["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (("--num-experts", 2, "--experts-per-token", 3), "experts_per_token 3 is more than the num_experts 2"),
        (("--num-experts", 5, "--router", "grouped"), "is not divisible by the experts_per_token 2"),
        (("--num-experts", 4, "--capacity-factor", 0), "--capacity-factor must be above 0"),
        (("--num-experts", 0), "--num-experts must be at least 1"),
        (("--num-experts", 4, "--verify", "--noise", 0.1), "with --noise the logits of both models differ"),
        (("--num-experts", 4, "--carry-optimizer"), "a model folder has no optimizer state to carry"),
        (("--num-experts", 4, "--first-dense-layers", 9), "none of the 3 layers has any"),
    ],
)
def test_bad_input(run, tmp_path, told, message):
    outcome = in_process("tools/upcycle.py", "--checkpoint", run / "checkpoint", "--out", tmp_path / "moe", *told)
    assert outcome.code == 2 and message in outcome.output, outcome.output
    assert not list(tmp_path.iterdir())


def test_a_model_with_experts_is_no_dense_one(run, tmp_path):
    first = in_process(
        "tools/upcycle.py", "--checkpoint", run / "checkpoint", "--num-experts", 2, "--out", tmp_path / "moe"
    )
    assert first.code == 0
    again = in_process(
        "tools/upcycle.py", "--checkpoint", tmp_path / "moe", "--num-experts", 2, "--out", tmp_path / "more"
    )
    assert again.code == 2 and "has 2 experts already" in again.output
    shutil.rmtree(tmp_path / "moe")
