# SPDX-License-Identifier: Apache-2.0
"""A run that was saved under one mesh goes on under another as if nothing had happened: losses, weights, moments."""

import json
import shutil
from itertools import permutations

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, call, fewer_microbatches, tool

from sporeloom.checkpoint.manifest import FOLDER, read_manifest
from sporeloom.checkpoint.sharded import CheckpointReader
from sporeloom.strategy.tensor_slice import TensorSlice

SHIPPED = ("one_device", "pangu_tiny_dp2_tp2_zero", "pangu_tiny_tp2_pp2", "pangu_tiny_dp2_pp2")
MESHES = SHIPPED
MODEL = {"num_layers": 2, "hidden_size": 64, "vocab_size": 512, "seq_len": 32, "dropout_rate": 0.1}
WORKER = "tests/parity/resume_worker.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Every mesh has trained and saved, then gone on from what every other one saved."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "model.json").write_text(json.dumps(MODEL))
    text = ROOT / "examples" / "small_town.txt"
    outcome = tool(
        *("tools/train.py", "--data", text, "--config", folder / "model.json", "--steps", 1),
        *("--output-dir", folder / "first"),
    )
    assert outcome.code == 0, outcome.output
    shutil.copy(folder / "first" / "checkpoint" / "tokenizer.model", folder / "tokenizer.model")
    strategies = [fewer_microbatches(CONFIGS / f"{mesh}.yaml", folder) for mesh in SHIPPED[1:]]
    call(WORKER, "run", folder, ["save"], ["one_device"])
    call(
        WORKER,
        "run",
        folder,
        ["save", "resume"],
        [str(path) for path in strategies],
        processes=4,
        timeout=900,
        fresh=True,
    )
    call(WORKER, "run", folder, ["resume"], ["one_device"])
    return folder


def losses(out, mesh, source):
    return json.loads((out / f"{mesh}.from_{source}.json").read_text())


def tensors(folder):
    manifest = read_manifest(folder)
    reader = CheckpointReader(folder, manifest)
    return {name: reader.read(name, TensorSlice.full(entry.shape)) for name, entry in manifest.tensors.items()}


@pytest.mark.parametrize(("source", "target"), list(permutations(MESHES, 2)))
def test_the_run_goes_on_as_on_one_device(out, source, target):
    expected = losses(out, "one_device", "the_start")
    np.testing.assert_allclose(losses(out, target, source), expected[2:], rtol=1e-5)
    whole, found = tensors(out / "one_device_from_the_start"), tensors(out / f"{target}_from_{source}")
    assert set(found) == set(whole)
    for kind in ("adam_m.", "adam_v.", ""):
        names = [name for name in whole if name.startswith(kind) and (kind or not name.startswith("adam_"))]
        largest = max(np.abs(whole[name]).max() for name in names)
        for name in names:  # the bias of keys has no gradient but rounding
            atol = 1e-4 * np.abs(whole[name]).max() + 1e-7 * largest
            np.testing.assert_allclose(found[name], whole[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_on_the_same_mesh_not_a_bit_differs(out, mesh):
    assert losses(out, mesh, mesh) == losses(out, mesh, "the_start")[2:]
    whole, resumed = (read_manifest(out / f"{mesh}_from_{source}") for source in ("the_start", mesh))
    assert {n: e.hash for n, e in resumed.tensors.items()} == {n: e.hash for n, e in whole.tensors.items()}


def test_one_device_resumes_bit_for_bit(tmp_path):
    text = ROOT / "examples" / "small_town.txt"
    arguments = ("tools/train.py", "--data", text, "--seq-len", 32, "--steps", 6, "--learning-rate", 1e-3)
    for name, more in (("whole", ()), ("resumed", ("--resume",))):
        if name == "resumed":
            shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
            shutil.rmtree(tmp_path / "resumed" / "checkpoints" / FOLDER.format(6))
            shutil.rmtree(tmp_path / "resumed" / "checkpoint")
        outcome = tool(*arguments, "--save-every", 3, "--output-dir", tmp_path / name, *more)
        assert outcome.code == 0, outcome.output
    first, second = (read_manifest(tmp_path / name / "checkpoints" / FOLDER.format(6)) for name in ("whole", "resumed"))
    assert {n: e.hash for n, e in first.tensors.items()} == {n: e.hash for n, e in second.tensors.items()}
    whole, resumed = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "resumed")
    )
    assert len(whole) == 6
    assert resumed == whole


def test_resharded_to_every_mesh_and_back_every_hash_is_kept(out, tmp_path):
    start = out / "middle" / "pangu_tiny_dp2_tp2_zero"
    source = start
    for mesh in (*SHIPPED, "pangu_tiny_dp2_tp2_zero"):
        how = ("--full",) if mesh == "one_device" else ("--strategy", CONFIGS / f"{mesh}.yaml")
        target = tmp_path / f"{mesh}_from_{source.name}"
        outcome = tool("tools/reshard_checkpoint.py", source, target, *how, "--verify")
        assert outcome.code == 0, outcome.output
        source = target
    first, last = read_manifest(start), read_manifest(source)
    assert {n: e.hash for n, e in last.tensors.items()} == {n: e.hash for n, e in first.tensors.items()}
    assert {n: e.parts for n, e in last.tensors.items()} == {n: e.parts for n, e in first.tensors.items()}
