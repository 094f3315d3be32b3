# SPDX-License-Identifier: Apache-2.0
"""`sporeloom audit` of an honest run, and of runs whose records, checkpoints, weights or data were changed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, tool
from safetensors.numpy import load_file, save_file

from sporeloom.checkpoint.content_hash import content_hash
from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.core.hashes import write_hashes
from sporeloom.runtime.launch import STOPPED
from sporeloom.train.audit_chain import FILE, FIRST, linked, state_of_checkpoint

TEXT = ROOT / "examples" / "small_town.txt"
ARGUMENTS = ("--config", TWO_LAYERS, "--seq-len", 32, "--batch-size", 4, "--steps", 6, "--save-every", 2)
WEIGHT = "layers.0.mlp.up.weight"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def train(out, data, *arguments, processes=1):
    return tool(*("tools/train.py", "--data", data, *ARGUMENTS, "--output-dir", out, *arguments), processes=processes)


def audit(folder, *arguments):
    return tool("tools/audit.py", folder, *arguments)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run on one device, which skips a step that it saves, with its text beside it."""
    root = tmp_path_factory.mktemp("honest")
    shutil.copy(TEXT, root / "text.txt")
    outcome = train(root / "out", root / "text.txt", "--audit-every", 1, "--skip-steps", 2)
    assert outcome.code == 0, outcome.output
    return root / "out"


@pytest.fixture
def run(honest, tmp_path):
    """A copy of its folder that a test may change."""
    return shutil.copytree(honest, tmp_path / "run")


def change_weight(folder):
    """Change one weight of a checkpoint, and its hashes, so that nothing in the folder shows it."""
    manifest = read_manifest(folder)
    name = next(name for name in manifest.tensors if name.endswith(WEIGHT) and not name.startswith("adam"))
    entry = manifest.tensors[name]
    path = folder / entry.parts[0].file
    tensors = load_file(path)
    values = tensors[name].copy()
    values.flat[5] = np.nextafter(values.flat[5], np.float32(1))
    save_file({**tensors, name: values}, path)
    hash = f"{content_hash(values):016x}"
    parts = (dataclasses.replace(entry.parts[0], hash=hash),)
    tensors = {**manifest.tensors, name: dataclasses.replace(entry, hash=hash, parts=parts)}
    dataclasses.replace(manifest, tensors=tensors).write(folder)
    write_hashes(folder)
    return name


def forge(run, change):
    """Change records, and link the chain anew."""
    previous, lines = FIRST, []
    for line in (run / FILE).read_text().splitlines():
        record = {name: value for name, value in json.loads(line).items() if name not in ("previous", "hash")}
        change(record)
        record = linked(record, previous)
        previous = record["hash"]
        lines.append(json.dumps(record))
    (run / FILE).write_text("\n".join(lines) + "\n")


def test_an_honest_run_on_a_mesh_and_then_on_one_device_runs_again_bit_for_bit(tmp_path):
    out = tmp_path / "out"
    strategy = CONFIGS / "pangu_tiny_dp2.yaml"
    outcome = train(out, TEXT, "--audit-every", 3, "--strategy", strategy, "--stop-after", 4, processes=2)
    assert outcome.code == STOPPED, outcome.output
    outcome = train(out, TEXT, "--audit-every", 3, "--resume")
    assert outcome.code == 0, outcome.output
    outcome = audit(out, "--segments", 1, "--seed", 0)
    assert outcome.code == 0, outcome.output
    assert f"{out / 'checkpoint'}: the weights after step 6, as recorded\n" in outcome.output
    assert "checkpoints: 3 of 3 that were saved are there with the recorded content" in outcome.output
    assert "1 of 3 stretches run again, chosen with --seed 0" in outcome.output
    assert "steps 3 to 4: bit for bit as recorded" in outcome.output


def test_a_stretch_of_a_dpo_run_begins_at_a_checkpoint(honest, tmp_path):
    pairs = [
        {"prompt": "小城", "chosen": "小河", "rejected": "大山"},
        {"prompt": "山", "chosen": "河", "rejected": "城"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    arguments = (
        "--data",
        tmp_path / "pairs.jsonl",
        "--seq-len",
        32,
        "--batch-size",
        2,
        "--steps",
        2,
        "--save-every",
        1,
    )
    out = tmp_path / "out"
    more = ("--from-checkpoint", honest / "checkpoint", "--audit-every", 1, "--output-dir", out)
    outcome = tool("tools/dpo.py", *arguments, *more)
    assert outcome.code == 0, outcome.output
    outcome = audit(out, "--segments", 1, "--seed", 0)
    assert outcome.code == 0, outcome.output
    assert "steps 2 to 2: bit for bit as recorded" in outcome.output
    (out / "reference.npy").unlink()
    outcome = audit(out, "--segments", 1, "--seed", 0)
    assert outcome.code == 2, outcome.output
    assert "steps 2 to 2 cannot run again" in outcome.output


def test_a_changed_record_is_named_and_nothing_runs(run):
    text = (run / FILE).read_text().splitlines()
    record = json.loads(text[4])
    text[4] = json.dumps({**record, "loss": record["loss"] / 2})
    (run / FILE).write_text("\n".join(text) + "\n")
    outcome = audit(run)
    assert outcome.code == 1
    assert f"{FILE}:5: step 4: the record was changed" in outcome.output
    assert "run again" not in outcome.output


def test_a_changed_weight_of_a_checkpoint_with_adjusted_hashes_is_named(run):
    folder = run / "checkpoints" / "step-00000004"
    name = change_weight(folder)
    assert tool("tools/checkpoint_info.py", folder, "--verify").code == 0  # nothing in the folder shows it
    outcome = audit(run, "--segments", 0)
    assert outcome.code == 1, outcome.output
    assert f"step 4, tensor {name}: not the content that the chain recorded" in outcome.output
    assert "checkpoints: 2 of 3" in outcome.output


def test_a_forged_chain_is_caught_by_running_again(run):
    """A weight was changed in the middle, and the checkpoint and all records from there agree with it."""
    folder = run / "checkpoints" / "step-00000004"
    name = change_weight(folder)
    state = state_of_checkpoint(folder, read_manifest(folder))
    head = json.loads((run / FILE).read_text().splitlines()[-1])["hash"]
    forge(run, lambda record: record.update(state=state) if record["step"] == 4 else None)
    assert audit(run, "--segments", 0).code == 0
    outcome = audit(run, "--segments", 1, "--seed", 0)
    assert outcome.code == 1, outcome.output
    assert "steps 3 to 4" in outcome.output and f"step 4, tensor {name}: hash" in outcome.output
    assert audit(run, "--segments", 0, "--head", head).code == 1


def test_changed_data_are_named_and_missing_data_are_refused(honest):
    text = honest.parent / "text.txt"
    before = text.read_text(encoding="utf-8")
    try:
        text.write_text(before.replace("小城", "大城", 1), encoding="utf-8")
        outcome = audit(honest, "--segments", 1, "--seed", 0)
        assert outcome.code == 1, outcome.output
        assert "datasets was" in outcome.output
        text.unlink()
        outcome = audit(honest, "--segments", 1)
        assert outcome.code == 2, outcome.output
        assert f"--data {text}: not there" in outcome.output
    finally:
        text.write_text(before, encoding="utf-8")


def test_a_run_without_checkpoints_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    outcome = audit(run)
    assert outcome.code == 2, outcome.output
    assert "no checkpoint to run steps from; train with --save-every N" in outcome.output


def test_a_resumed_run_must_continue_its_chain(run):
    refused = train(run, TEXT, "--resume")
    assert refused.code == 2
    assert "would end here; give --audit-every as before" in refused.output


def test_changed_exported_weights_are_named(run):
    path = run / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(WEIGHT))
    save_file({**tensors, name: np.zeros_like(tensors[name])}, path)
    (run / "checkpoint" / "hashes.json").unlink()  # nothing in the folder shows it
    outcome = audit(run, "--segments", 0)
    assert outcome.code == 1, outcome.output
    assert f"{run / 'checkpoint'}: tensor {name}: not the content recorded after step 6" in outcome.output
    shutil.rmtree(run / "checkpoint")
    outcome = audit(run, "--segments", 0)
    assert outcome.code == 0, outcome.output
    assert f"not verified: {run / 'checkpoint'}: not there" in outcome.output
