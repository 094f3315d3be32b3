# SPDX-License-Identifier: Apache-2.0
"""Documents in object storage are those of files, byte for byte; what cannot be opened is told in a line."""

import gzip
import json

import pytest
from conftest import ROOT, in_process

from sporeloom.models.family import family_module

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
memory = pytest.importorskip("fsspec.implementations.memory")
UPath = pytest.importorskip("upath").UPath

TEXT = (ROOT / "examples/small_town.txt").read_text(encoding="utf-8")
PARAGRAPHS = [part for part in TEXT.split("\n\n") if part.strip()] or TEXT.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of several kinds."""
    folder = tmp_path_factory.mktemp("files") / "documents"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(PARAGRAPHS[:40])).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[: len(lines) // 2].rpartition(b"\n")[0] + b"\n"))
    pyarrow.parquet.write_table(pyarrow.table({"text": PARAGRAPHS[:10]}), folder / "c.parquet")
    (folder / "deep").mkdir()
    (folder / "deep/d.py").write_text("print('a town')\n" * 5)
    (folder / ".hidden").write_text("never read")
    return folder


@pytest.fixture(scope="module")
def store(folder):
    """The same in a store that lies in memory."""
    root = UPath("memory://bucket/documents")
    for path in folder.rglob("*"):
        if path.is_file():
            target = root / path.relative_to(folder).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return str(root)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(family_module("pangu", "tokenizer").train_tokenizer(TEXT.splitlines(), 500))
    return path


@pytest.mark.parametrize("verb", ["filter", "dedup", "tokenize"])
def test_objects_are_read_as_files_are(folder, store, tmp_path, verb, tokenizer):
    made = {}
    for name, place in (("files", folder), ("memory", store), ("local", f"file://{folder}")):
        out = tmp_path / name
        more = {"filter": ("--min-chars", 3), "dedup": (), "tokenize": ("--tokenizer", tokenizer)}[verb]
        target = out / "kept.jsonl" if verb == "filter" else out
        outcome = in_process("tools/preprocess.py", verb, place, *more, "--out", target, "--workers", 1)
        assert not outcome.code, outcome.output
        kinds = (".jsonl", ".bin", ".tokens", ".ends")
        found = {p.name: p.read_bytes() for p in sorted(out.rglob("*")) if p.suffix in kinds}
        made[name] = {file: content.replace(str(place).encode(), b"") for file, content in found.items()}
    assert made["files"] and sum(map(len, made["files"].values())) > 1000
    assert made["memory"] == made["files"] == made["local"]


def test_a_store_that_cannot_be_opened_is_told_in_a_line(store, tmp_path):
    def said(*arguments):
        outcome = in_process("tools/preprocess.py", "filter", *arguments, "--min-chars", 3)
        assert outcome.code == 2 and not list(tmp_path.iterdir())
        return outcome.output

    out = ("--out", tmp_path / "kept.jsonl")
    assert "s9://bucket: " in said("s9://bucket", *out)
    assert "memory://bucket/nothing: there is no such file" in said("memory://bucket/nothing", *out)
    assert "s9://bucket: " in said(store, "--out", "s9://bucket")
    assert "expected a file or folder of this machine" in said(store, *out, "--scratch", "memory://bucket")


@pytest.mark.parametrize(
    ("verb", "engine"), [("filter", "local"), ("filter", "ray"), ("dedup", "local"), ("tokenize", "local")]
)
def test_what_is_made_for_a_store_is_what_is_made_for_a_folder(folder, tmp_path, verb, engine, tokenizer):
    def make(root):
        out, more = f"{root}/kept.jsonl" if verb == "filter" else str(root), ()
        if verb == "filter":
            more = ("--min-chars", 60, "--removed", f"{root}/removed.jsonl.gz", "--samples", f"{root}/samples.txt")
        elif verb == "tokenize":
            more = ("--tokenizer", tokenizer)
        more = (*more, "--workers", 2, "--engine", engine, "--scratch", scratch)
        return in_process("tools/preprocess.py", verb, folder, *more, "--out", out)

    scratch, root = tmp_path / "scratch", f"memory://made/{verb}/{engine}"
    scratch.mkdir()
    for place in (tmp_path / "here", root, f"file://{tmp_path}/there"):
        outcome = make(place)
        assert not outcome.code, outcome.output
    assert not list(scratch.iterdir())
    here, there = ({p.name: p for p in (tmp_path / name).rglob("*") if p.is_file()} for name in ("here", "there"))
    assert len(here) > 1 and here.keys() == there.keys() == {path.name for path in UPath(root).iterdir()}
    for name, path in here.items():
        if name != "info.json":  # which has the time
            assert path.read_bytes() == there[name].read_bytes() == (UPath(root) / name).read_bytes(), name
    outcome = make(root)
    assert outcome.code == 2 and "is there already; remove it or give another name" in outcome.output
    assert not list(scratch.iterdir())


def test_what_a_store_does_not_take_stays_in_the_folder(folder, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(memory.MemoryFileSystem, "put_file", refuse)
    outputs = ("--out", "memory://refused/kept.jsonl", "--removed", "memory://refused/removed.jsonl")
    outcome = in_process("tools/preprocess.py", "filter", folder, *outputs, "--min-chars", 3, "--scratch", tmp_path)
    removed, made = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith("-kept.jsonl"))
    told = "memory://refused/removed.jsonl: cannot be written: PermissionError: Access Denied; the output stays in "
    assert outcome.code == 2 and f"{told}{removed}, {made}" in outcome.output
    assert len(made.read_text(encoding="utf-8").splitlines()) > 40
