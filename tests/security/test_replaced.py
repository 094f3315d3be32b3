# SPDX-License-Identifier: Apache-2.0
"""Killed before any step of writing to the disk, every place that replaces a folder or a file leaves the old one or the new
one whole: under its name where the file system can exchange two names, else at the latest after the next start."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from sporeloom.checkpoint.adapters import Adapter, write_adapter
from sporeloom.checkpoint.manifest import checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import load_config, load_weights, save_checkpoint
from sporeloom.checkpoint.sharded import LocalTensor, damage, finish, remove_leftovers, remove_old, write_parts
from sporeloom.core import files
from sporeloom.core.document import Document
from sporeloom.core.files import recover_folder, replaced_folder, write_text_atomically
from sporeloom.core.reader import fields_from
from sporeloom.data.rewrite import complete_or_absent
from sporeloom.data.sources import DocumentSource
from sporeloom.data.token_file import TokenFile, partial_folder
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.certificate import write_certificate
from sporeloom.strategy.tensor_slice import TensorSlice

WRITING = ("os.", "shutil.", "open", "tempfile.")
"""How the audit events begin that Python raises before a call that may change the file system."""
KILLED = 9
MODEL = fields_from(
    type(size_config("pangu", "tiny")),
    Document("test", {"vocab_size": 40, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "seq_len": 6}),
    size_config("pangu", "tiny"),
)
ABOUT = {"state": {}, "model": {}, "strategy": {}, "versions": {}}


def killed_at(number, work):
    """Do `work` in a process of its own that is gone before its `number`-th call that may write. Whether it came that far."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, KILLED), code
        return code == KILLED
    left = number

    def count(event, _):
        nonlocal left
        if event.startswith(WRITING):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    try:
        sys.addaudithook(count)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def weights(value):
    return {name: np.full(shape, value, np.float32) for name, shape in parameter_shapes(MODEL).items()}


def write_plain(folder, value):
    with replaced_folder(folder) as partial:
        for number in range(3):
            (partial / f"{number}").write_text(str(value))
        (partial / "below").mkdir()
        (partial / "below" / "file").write_text(str(value))


def read_plain(folder):
    (value,) = {path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert len(list(folder.rglob("*"))) == 5
    return float(value)


def write_model(folder, value):
    save_checkpoint(folder, weights(value), "pangu", MODEL)


def read_model(folder):
    assert load_config(folder) == ("pangu", MODEL)
    (value,) = {float(v) for array in load_weights(folder).values() for v in array.reshape(-1)}
    return value


def write_adapters(folder, value):
    lora = LoRAConfig(r=1)
    values = {name: np.full(shape, value, np.float32) for name, shape in lora.shapes(MODEL).items()}
    if not (folder.parent / "base").exists():
        write_model(folder.parent / "base", 0.0)
    write_adapter(folder, Adapter(lora, values), "pangu", MODEL, folder.parent / "base")


def read_adapters(folder):
    from sporeloom.checkpoint.adapters import read_adapter  # noqa: PLC0415

    (value,) = {float(v) for array in read_adapter(folder, "pangu", MODEL).weights.values() for v in array.reshape(-1)}
    return value


def write_state(folder, value):
    """A checkpoint of a step that there is one of already, as after a spike of the loss."""
    remove_leftovers(folder.parent)
    partial = folder.parent / ".step-00000001.7.partial"
    write_parts(partial, 0, {"a": LocalTensor(np.full((4, 3), value, np.float32), (0, 0), (4, 3))})
    finish(partial, folder.parent, 1, 1, ABOUT)


def read_state(folder):
    (found,) = checkpoints(folder.parent)
    assert found == folder
    manifest = read_manifest(folder)
    assert damage(folder, manifest) is None
    assert (folder.parent / "latest").read_text() == "step-00000001\n"
    from sporeloom.checkpoint.sharded import CheckpointReader  # noqa: PLC0415

    return float(CheckpointReader(folder, manifest).read("a", TensorSlice((0, 0), (1, 1)))[0, 0])


FOLDERS = {
    "plain": ("folder", write_plain, read_plain),
    "model": ("checkpoint", write_model, read_model),
    "adapters": ("checkpoint", write_adapters, read_adapters),
    "state": ("step-00000001", write_state, read_state),
}


ASIDE = ("plain", "state")
"""Models and adapters are replaced in the same way as plain folders; a state is not."""


@pytest.mark.parametrize(
    ("kind", "exchanges"), [*((kind, True) for kind in FOLDERS), *((kind, False) for kind in ASIDE)]
)
def test_a_replaced_folder_is_the_old_or_the_new_one(tmp_path, monkeypatch, kind, exchanges):
    name, write, read = FOLDERS[kind]
    if not exchanges:
        monkeypatch.setattr(files, "_rename_at", None)
    folder, number, seen = tmp_path / name, 0, []
    write(folder, 1.0)
    while True:
        was_killed = killed_at(number, lambda: write(folder, 2.0))
        if exchanges:
            assert folder.is_dir()
        recover_folder(folder)
        seen.append(read(folder))
        write(folder, 1.0)  # the next run: what was left behind is in nobody's way
        assert read(folder) == 1.0
        assert not list(tmp_path.glob(".*.replaced"))
        if not was_killed:
            break
        number += 1
    assert number > 8 and seen[0] == 1.0 and seen[-1] == 2.0
    assert seen == sorted(seen)  # never back again


def test_an_error_while_a_folder_takes_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_rename_at", None)
    write_plain(tmp_path / "folder", 1)
    real = os.rename

    def rename(source, target):
        if str(source).endswith(".partial"):
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="No space left"):
        write_plain(tmp_path / "folder", 2)
    assert read_plain(tmp_path / "folder") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_reader_that_recovers_while_a_folder_is_replaced_does_not_stop_that(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_rename_at", None)
    write_plain(tmp_path / "folder", 1)
    real, times = os.rename, []

    def rename(source, target):
        if str(source).endswith(".partial") and not times:
            times.append(1)
            recover_folder(tmp_path / "folder")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    write_plain(tmp_path / "folder", 2)
    assert times and read_plain(tmp_path / "folder") == 2


def test_old_checkpoints_are_whole_or_gone(tmp_path):
    number = 0
    while True:
        shutil.rmtree(tmp_path, ignore_errors=True)
        for step in (1, 2, 3):
            partial = tmp_path / f".step-{step:08d}.7.partial"
            write_parts(partial, 0, {"a": LocalTensor(np.zeros((4, 3), np.float32), (0, 0), (4, 3))})
            finish(partial, tmp_path, 1, step, ABOUT)
        was_killed = killed_at(number, lambda: remove_old(tmp_path, 1))
        found = checkpoints(tmp_path)
        assert found and all(damage(folder, read_manifest(folder)) is None for folder in found)
        if not was_killed:
            break
        number += 1
    assert number > 4 and len(found) == 1


def test_token_files_are_complete_or_gone_on_with(tmp_path):
    """Killed at any step, the same command makes the same files."""
    from codegeex.tokenizer import train_tokenizer  # noqa: PLC0415

    text = ROOT / "examples" / "small_town.txt"
    vocabulary, out = tmp_path / "tokenizer.json", tmp_path / "out"
    vocabulary.write_bytes(train_tokenizer([text.read_text(encoding="utf-8")], 400))
    job = TokenizeJob(DocumentSource((text,)), "codegeex", vocabulary)

    def work():
        tokenize(job, out, workers=0, show_progress=False)

    work()
    wanted = TokenFile(out).info.content
    for number in range(0, 10_000):
        shutil.rmtree(out, ignore_errors=True)
        was_killed = killed_at(number, work)
        if was_killed and not out.exists():
            work()
        assert TokenFile(out).info.content == wanted
        assert not partial_folder(out).exists()
        if not was_killed:
            break
    assert number > 10


def compressed(path, text):
    with complete_or_absent(path) as write:
        write(text.encode())


FILES = {
    "text": write_text_atomically,
    "lines": compressed,
    "certificate": lambda path, text: write_certificate(path, {"text": text}),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path, kind):
    write, path, number = FILES[kind], tmp_path / "file.jsonl", 0
    write(path, "new" * 1000)
    new = path.read_bytes()
    write(path, "old" * 1000)
    old = path.read_bytes()
    while killed_at(number, lambda: write(path, "new" * 1000)):
        assert hashlib.sha256(path.read_bytes()).digest() in {hashlib.sha256(each).digest() for each in (old, new)}
        write(path, "old" * 1000)
        number += 1
    assert number > 1 and path.read_bytes() == new


def test_what_is_no_folder_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="a file, which no folder replaces"):
        write_plain(tmp_path / "file", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_is_read_by_any_of_its_names(tmp_path, monkeypatch):
    write_model(tmp_path / "model", 1.0)
    monkeypatch.chdir(tmp_path / "model")
    for name in (".", "../model", str(tmp_path / "model") + "/"):
        assert read_model(Path(name)) == 1.0


def test_what_a_link_leads_to_is_replaced_there(tmp_path):
    (tmp_path / "disk").mkdir()
    write_plain(tmp_path / "disk" / "folder", 1)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    write_plain(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink() and read_plain(tmp_path / "disk" / "folder") == 2
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["folder"]
