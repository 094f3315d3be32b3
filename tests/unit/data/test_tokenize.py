# SPDX-License-Identifier: Apache-2.0
"""Token files of real and of broken text."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, shared

from codegeex.tokenizer import CodeGeeXTokenizer
from pangu.tokenizer import PanGuTokenizer
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import write_hashes
from sporeloom.data.sources import DocumentSource
from sporeloom.data.token_file import ENDS, INFO, TOKENS, TokenFile, partial_folder
from sporeloom.data.tokenize import TokenizeJob, tokenize

TEXT = ROOT / "examples" / "small_town.txt"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A small CodeGeeX tokenizer, which is lossless."""
    from codegeex.tokenizer import train_tokenizer  # noqa: PLC0415

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer([TEXT.read_text(encoding="utf-8")], 1000))
    return path


def make(out, inputs, vocabulary, workers=0, family="codegeex", **more):
    return tokenize(
        TokenizeJob(DocumentSource(tuple(inputs), **more), family, vocabulary), out, workers, show_progress=False
    )


def files(folder):
    return {name: (folder / name).read_bytes() for name in (TOKENS, ENDS, INFO)}


def texts(folder, tokenizer):
    tokens = TokenFile(folder)
    return [tokenizer.decode(tokens.document(i).tolist()) for i in range(tokens.info.num_documents)]


def test_every_kind_of_file_gives_its_documents_back(tmp_path, write, vocabulary):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(
        json.dumps({"text": f"line {i} \u4e2d\u6587 <|endoftext|>\r\n", "id": i}) + "\n" for i in range(3)
    ).encode()
    inputs = [
        write("a.jsonl", b"\xef\xbb\xbf" + lines),
        write("b.jsonl.gz", gzip.compress(lines) + gzip.compress(lines)),
        write("c.jsonl.zst", zstandard.compress(lines) + zstandard.compress(lines)),
        write("d.txt", "one\nmore\r\n\r\n\n\ntwo\n"),
        tmp_path / "e.parquet",
        write("folder/z.py", "z = 1\r\n").parent,
    ]
    write("folder/sub/a.txt", "whole\n\nfile\n")
    write("folder/.hidden/b.txt", "no")
    write("folder/empty.py", "")
    parquet.write_table(arrow.table({"n": [1, 2], "text": ["row one", "row two"]}), inputs[4])
    report = make(tmp_path / "out", inputs, vocabulary)
    expected = [json.loads(line)["text"] for line in lines.decode().splitlines()]
    expected = [*expected * 5, "one\nmore", "two", "row one", "row two", "whole\n\nfile\n", "z = 1\r\n"]
    assert texts(tmp_path / "out", CodeGeeXTokenizer(vocabulary)) == expected
    assert report["documents"] == len(expected)
    assert report["skipped"] == {"empty": 1}
    assert report["text_bytes"] == sum(len(text.encode()) for text in expected)
    tokens = TokenFile(tmp_path / "out")
    assert (tokens.tokens[np.asarray(tokens.ends) - 1] == tokens.info.eod_id).all()
    assert (tokens.tokens == tokens.info.eod_id).sum() == len(expected)  # a name in the text is no token


def test_the_standard_library_comes_back_unchanged(tmp_path):
    vocabulary = shared("golden/codegeex_tokenizer")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        library / name for name in ("asyncio", "ctypes", "email", "encodings", "importlib", "json", "unittest", "xml")
    ]
    make(tmp_path / "out", sources, vocabulary, suffixes=(".py",))
    expected = [path.read_bytes().decode() for source in sources for path in sorted(source.rglob("*.py"))]
    assert sum(map(len, expected)) > 2_000_000
    assert texts(tmp_path / "out", CodeGeeXTokenizer(vocabulary)) == [text for text in expected if text.strip()]


def test_poems_come_back_as_the_vocabulary_normalizes_them(tmp_path):
    poems, vocabulary = shared("data/zh_poetry.jsonl"), shared("golden/pangu_vocab.model")
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"".join(poems.read_bytes().splitlines(keepends=True)[:2000]))
    make(tmp_path / "out", [few], vocabulary, workers=1, family="pangu")
    tokenizer, originals = PanGuTokenizer(vocabulary), [json.loads(line)["text"] for line in few.open(encoding="utf-8")]
    found = texts(tmp_path / "out", tokenizer)
    assert found == [tokenizer.decode(tokenizer.encode(text)) for text in originals]
    punctuation = str.maketrans("\uff0c\uff1f\uff01\uff1a\uff1b\uff08\uff09", ",?!:;()")  # full width folds to half
    known = [
        (text, back) for text, back in zip(originals, found, strict=True) if "\u2047" not in back
    ]  # no unknown sign
    assert len(known) > 200
    same = sum(text.translate(punctuation).strip() == back.strip() for text, back in known)
    assert same / len(known) > 0.99


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    poems, vocabulary = shared("data/zh_poetry.jsonl"), shared("golden/pangu_vocab.model")
    some = tmp_path / "some.jsonl"
    some.write_bytes(b"\n".join(poems.read_bytes().split(b"\n")[:8000]))
    for workers in (0, 1, 5):
        make(tmp_path / str(workers), [some], vocabulary, workers, family="pangu")
    expected = files(tmp_path / "0")
    assert all(files(tmp_path / str(workers)) == expected for workers in (1, 5))


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path):
    poems, vocabulary = shared("data/zh_poetry.jsonl"), shared("golden/pangu_vocab.model")
    many = tmp_path / "many.jsonl"
    many.write_bytes(poems.read_bytes() * 4)
    make(tmp_path / "whole", [many], vocabulary, workers=2, family="pangu")
    code = (
        "import sys, sporeloom.data.tokenize as t; from pathlib import Path\n"
        "from sporeloom.data.sources import DocumentSource\n"
        "t.SAVE_SECONDS = 0.2\n"
        "text, vocabulary, out = map(Path, sys.argv[1:])\n"
        "if __name__ == '__main__': t.tokenize(t.TokenizeJob(DocumentSource((text,)), 'pangu', vocabulary), out, 1)"
    )
    script = tmp_path / "job.py"
    script.write_text(code)
    out, went_on = tmp_path / "out", 0
    command = [sys.executable, str(script), str(many), str(vocabulary), str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for seconds in (2.0, 2.5, 60.0, 60.0):
        job = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        try:
            _, said = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGKILL)
            _, said = job.communicate(timeout=20)
            assert not out.exists()
        went_on += "continuing after" in said
        if out.exists():
            break
    assert job.returncode == 0
    assert files(out) == files(tmp_path / "whole")
    assert went_on or pytest.skip("too fast to be killed")
    assert not partial_folder(out).exists()


BROKEN = (
    b'{"text": "good"}\n{"text": "x"\n{"text": "\xb0\xa1"}\n[1]\n{"txt": "y"}\n{"text": "\\ud800"}\n\n{"text": " "}\n'
)


def test_broken_lines_are_named_and_nothing_is_left(tmp_path, write, vocabulary):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "out", [write("a.jsonl", BROKEN)], vocabulary, workers=1)
    for part in (
        "a.jsonl:2: not JSON",
        "a.jsonl:3: not UTF-8",
        "a.jsonl:4: no `text`",
        "found: txt",
        "half of a surrogate",
    ):
        assert part in str(caught.value), part
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_broken_lines_are_skipped_and_counted_when_asked(tmp_path, write, vocabulary):
    report = make(tmp_path / "out", [write("a.jsonl", BROKEN)], vocabulary, on_error="skip")
    assert (report["documents"], report["skipped"]) == (1, {"broken": 5, "empty": 1})
    assert len(report["first_problems"]) == 6
    assert report["first_problems"][-1].endswith("a.jsonl:8: empty")
    assert TokenFile(tmp_path / "out").info.report["skipped"] == report["skipped"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl:1: an empty file"),
        ("a.jsonl", b"\n\n", "contains no text"),
        ("a.txt", b"\n \n", "contains no text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999)[:-50], "a.jsonl.gz:"),
        ("a.jsonl.gz", b"no gzip", "incorrect header check"),
        ("a.jsonl.zst", b"no zstd", "damaged from here on: zstd"),
        ("a.parquet", b"no parquet", "a.parquet: not a Parquet file"),
        ("a.json", b"{}", "this kind of file cannot be read"),
        ("a.py", b"\x00\xff", "a.py:1: not UTF-8"),
    ],
)
def test_each_file_that_cannot_be_read_is_named(tmp_path, write, vocabulary, name, content, message):
    for ending, package in ((".zst", "zstandard"), (".parquet", "pyarrow")):
        if name.endswith(ending):
            pytest.importorskip(package)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "out", [write(name, content)], vocabulary)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_document_that_is_too_long_is_refused_with_its_size(tmp_path, vocabulary):
    for name, content in (("a.jsonl", b'{"text": "%s"}\n'), ("b.txt", b"%s\n"), ("c.py", b"%s")):
        path = tmp_path / name
        path.write_bytes(content % (b"x " * 100_000_000) if name == "a.jsonl" else content % (b"x " * 4_000_000))
        make_it = {"max_document_mb": 64.0 if name == "a.jsonl" else 5.0}
        with pytest.raises(ConfigError, match=rf"{name}:1: a document of \d+\.\d MB is longer than --max-document-mb"):
            make(tmp_path / "out", [path], vocabulary, **make_it)
        with path.open("ab") as file:
            file.write(b"" if name == "c.py" else b'{"text": "next"}\n' if name == "a.jsonl" else b"\nnext\n")
        if name != "c.py":
            report = make(tmp_path / f"out_{name}", [path], vocabulary, on_error="skip", **make_it)
            assert (report["documents"], report["skipped"]) == (1, {"broken": 1})
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own")
def test_a_full_disk_is_said_and_the_run_goes_on_afterwards(tmp_path, write, vocabulary):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        source = write("a.jsonl", json.dumps({"text": TEXT.read_text(encoding="utf-8")[:9000]}) + "\n")
        source.write_bytes(source.read_bytes() * 300)
        with pytest.raises(ConfigError, match="No space left on device; the same command continues from there"):
            make(disk / "out", [source], vocabulary)
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        make(disk / "out", [source], vocabulary)
        make(tmp_path / "whole", [source], vocabulary)
        assert files(disk / "out") == files(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def resealed(path, text):
    path.write_text(text)
    write_hashes(path.parent)


def test_damaged_token_files_are_refused(tmp_path, vocabulary):
    make(tmp_path / "good", [TEXT], vocabulary)
    for name, damage, message in (
        (TOKENS, lambda path: path.write_bytes(path.read_bytes()[:-2]), "has .* bytes, dataset.json says"),
        (ENDS, lambda path: path.unlink(), "is missing"),
        (TOKENS, lambda path: flip(path, 9), "tokens.bin: not as it was written"),
        (ENDS, lambda path: flip(path, 3), "ends.bin: not as it was written"),
        (INFO, lambda path: path.write_text("{"), "dataset.json: 1 bytes, written were"),
        (INFO, lambda path: resealed(path, "{"), "cannot be understood"),
        (INFO, lambda path: resealed(path, path.read_text().replace('"version": 1', '"version": 2')), "version 2"),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / name)
        with pytest.raises(ConfigError, match=message):
            TokenFile(tmp_path / "bad")
    with pytest.raises(ConfigError, match=r"no token files there; make them with tools/preprocess.py tokenize"):
        TokenFile(tmp_path)
    with pytest.raises(ConfigError, match="is there already"):
        make(tmp_path / "good", [TEXT], vocabulary)


def test_changed_input_starts_anew(tmp_path, write, vocabulary):
    out, source = tmp_path / "out", write("a.jsonl", '{"text": "one"}\n')
    partial_folder(out).mkdir()
    (partial_folder(out) / ".progress.json").write_text('{"fingerprint": "another"}')
    (partial_folder(out) / TOKENS).write_bytes(b"left over")
    make(out, [source], vocabulary)
    assert texts(out, CodeGeeXTokenizer(vocabulary)) == ["one"]
