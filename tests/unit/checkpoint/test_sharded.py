# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from sporeloom.checkpoint.compare import compare
from sporeloom.checkpoint.content_hash import content_hash
from sporeloom.checkpoint.manifest import LATEST, checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.checkpoint.reshard import export, reshard
from sporeloom.checkpoint.sharded import (
    CheckpointReader,
    LocalTensor,
    damage,
    file_name,
    finish,
    remove_old,
    write_parts,
)
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import write_hashes
from sporeloom.strategy.tensor_slice import TensorSlice

ABOUT = {
    "state": {"data": {"seed": 1}},
    "model": {"family": "pangu", "vocab_size": 16, "hidden_size": 4, "num_layers": 2, "num_heads": 2},
    "strategy": {"pp": 1, "dp": 2, "tp": 2},
    "versions": {},
}
TENSORS = {
    "embedding": np.random.RandomState(0).standard_normal((24, 10)).astype(np.float32),
    "norm": np.random.RandomState(1).standard_normal(12).astype(np.float32),
    "adam_m.embedding": np.random.RandomState(2).standard_normal((24, 10)).astype(np.float32),
    "number": np.array(3.5, np.float32),
}


def grid(shape, rng, most=3):
    """A random cut into boxes."""
    cuts = [sorted({0, n, *rng.randint(0, n + 1, rng.randint(most)).tolist()}) for n in shape]
    return [tuple(slice(*b) for b in bounds) for bounds in itertools.product(*map(itertools.pairwise, cuts))]


def part_of(box):
    return TensorSlice(tuple(s.start for s in box), tuple(s.stop - s.start for s in box))


def save(root, step=1, seed=0, num_ranks=4, tensors=TENSORS):
    """A checkpoint whose parts are dealt out at random."""
    rng = np.random.RandomState(seed)
    held = [{} for _ in range(num_ranks)]
    for name, value in tensors.items():
        ranks = rng.permutation(num_ranks)
        boxes = grid(value.shape, rng, 2)
        for rank, box in zip(ranks, boxes, strict=False):
            held[rank][name] = LocalTensor(value[box], tuple(s.start for s in box), value.shape)
    partial = root / f".step-{step:08d}.partial"
    for rank in range(num_ranks):
        write_parts(partial, rank, held[rank])
    return finish(partial, root, num_ranks, step, ABOUT)


def part_file(folder, name="embedding"):
    return folder / read_manifest(folder).tensors[name].parts[0].file


@pytest.mark.parametrize("seed", range(5))
def test_any_part_can_be_read_of_any_cut(tmp_path, seed):
    folder = save(tmp_path, seed=seed)
    manifest = read_manifest(folder)
    reader, rng = CheckpointReader(folder, manifest), np.random.RandomState(seed)
    assert damage(folder, manifest) is None
    for name, value in TENSORS.items():
        assert manifest.tensors[name].hash == f"{content_hash(value):016x}"
        for box in grid(value.shape, rng):
            np.testing.assert_array_equal(reader.read(name, part_of(box)), value[box])


def test_the_files_are_plain_safetensors(tmp_path):
    folder = save(tmp_path, num_ranks=1, tensors=TENSORS)
    for name, value in load_file(folder / file_name(0)).items():
        assert value.dtype == TENSORS[name].dtype


def test_resharding_anyhow_keeps_every_hash(tmp_path):
    folder = save(tmp_path)
    before = read_manifest(folder)
    for seed in range(4):
        rng = np.random.RandomState(seed)
        cuts = {}
        for name, value in TENSORS.items():
            boxes = grid(value.shape, rng)
            cuts[name] = [(file_name(i), part_of(box)) for i, box in enumerate(boxes)]
        target = tmp_path / f"resharded-{seed}"
        after = reshard(folder, target, cuts, {"pp": seed})
        assert damage(target, read_manifest(target)) is None
        assert {n: e.hash for n, e in after.tensors.items()} == {n: e.hash for n, e in before.tensors.items()}
        assert compare(folder, before, target, after) == []
        assert after.strategy == {"pp": seed}
        folder, before = target, after


def test_differences_are_named_and_measured(tmp_path):
    changed = {**TENSORS, "norm": TENSORS["norm"].copy()}
    changed["norm"][3] += 0.5
    del changed["number"]
    first, second = save(tmp_path / "a"), save(tmp_path / "b", tensors=changed)
    norm, number = compare(first, read_manifest(first), second, read_manifest(second))
    assert (norm.name, norm.count, norm.largest) == ("norm", 1, pytest.approx(0.5, abs=1e-6))
    assert "only in" in number.problem


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 30])
def test_an_export_holds_the_weights_whole(tmp_path, max_bytes):
    folder = save(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"tokenizer")
    export(folder, tmp_path / "model", max_bytes)
    found = load_weights(tmp_path / "model")
    assert set(found) == {"embedding", "norm", "number"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, TENSORS[name])
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (max_bytes < 1 << 30)
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == b"tokenizer"
    family, config = load_config(tmp_path / "model")
    assert {"family": family, **config.to_dict()}.items() >= ABOUT["model"].items()


def test_only_the_newest_are_kept_and_latest_names_one(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    remove_old(tmp_path, 2)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000005", "step-00000004"]
    assert (tmp_path / LATEST).read_text() == "step-00000005\n"


def flip(folder):
    path = part_file(folder)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def truncate(folder):
    path = part_file(folder)
    path.write_bytes(path.read_bytes()[:-10])


def edit(**changes):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        write_hashes(folder)

    return change


DAMAGE = {
    "a flipped bit": (flip, "the content is not what was written"),
    "a truncated file": (truncate, "it was cut off or overwritten"),
    "a missing file": (lambda folder: part_file(folder).unlink(), "missing; it contains"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "the checkpoint is not complete"),
    "half a manifest": (
        lambda f: (f / "manifest.json").write_text('{"format": "mind'),
        "manifest.json: 16 bytes, written",
    ),
    "an edited manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"step": 1', '"step": 2')),
        "manifest.json: not as it was written (its hash differs)",
    ),
    "another version": (edit(version=2), "format version 2; this release reads version 1"),
    "another format": (edit(format="x"), "not a manifest of a training checkpoint"),
    "a lost tensor's part": (
        edit(tensors={"a": {"shape": [2], "dtype": "float32", "hash": "0" * 16, "parts": []}}),
        "hold 0 of its 2",
    ),
    "a header that lies": (
        lambda f: part_file(f).write_bytes(b"\xff" * part_file(f).stat().st_size),
        "not as it was written (its hash differs)",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_by_file_and_tensor(tmp_path, case):
    harm, words = DAMAGE[case]
    folder = save(tmp_path)
    harm(folder)
    try:
        problem = damage(folder, read_manifest(folder))
    except ConfigError as error:
        problem = error.problems[0]
    assert words in problem
    assert str(folder) in problem
    with pytest.raises(ConfigError):
        export(folder, tmp_path / "model", 1 << 30)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".model*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_any_moment_a_complete_checkpoint_is_left(tmp_path):
    """Seeded moments; at most the step that was being saved is lost."""
    rng = random.Random(5)
    worker = Path(__file__).with_name("kill_worker.py")
    saved = 0
    for _ in range(50):
        process = subprocess.Popen([sys.executable, worker, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.0, 0.15))
        process.kill()
        steps = [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        newest = next(f for f in checkpoints(tmp_path)) if steps or saved else None
        if newest is None:
            continue
        manifest = read_manifest(newest)
        assert damage(newest, manifest) is None
        assert manifest.step >= max([saved, *steps])
        assert manifest.step <= max([saved, *steps]) + 1
        expected = np.random.RandomState(manifest.step).standard_normal((64, 2000)).astype(np.float32)
        assert manifest.tensors["a"].hash == f"{content_hash(expected):016x}"
        saved = manifest.step
    assert saved >= 10  # a busy machine saves few


def test_bfloat16_is_read_as_one_type_whichever_library_gave_numpy_its_name(tmp_path, monkeypatch):
    """MindSpore has a second type of that name, which no array of the first is cast to; NumPy finds the one imported last."""
    value = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
    whole, cut = (save(tmp_path / str(seed), seed=seed, tensors={"w": value}) for seed in (3, 0))
    assert [len(read_manifest(folder).tensors["w"].parts) for folder in (whole, cut)] == [1, 4]
    other = ms.Tensor([1.0], ms.bfloat16).asnumpy().dtype
    monkeypatch.setitem(np.sctypeDict, "bfloat16", other.type)
    assert np.dtype("bfloat16") == other != value.dtype
    for folder in (whole, cut):
        reader = CheckpointReader(folder, read_manifest(folder))
        for part in (TensorSlice.full((4, 6)), TensorSlice((1, 2), (2, 3))):
            read = reader.read("w", part)
            assert read.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(read, value[part.slices])
