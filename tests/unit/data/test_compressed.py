# SPDX-License-Identifier: Apache-2.0
"""What is read of compressed files: everything that can be had, of whatever frames they consist, in bounded memory."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import struct
import subprocess
import sys

import pytest
from conftest import ROOT

from sporeloom.data.sources import DocumentSource

zstandard = pytest.importorskip("zstandard")

TEXTS = [f"line {number} " + "x" * (number % 89) for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
COMPRESS = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
SKIPPABLE = struct.pack("<II", 0x184D2A53, 7) + b"comment"


def read(path, **options):
    source = DocumentSource((path,), on_error="skip", **options)
    parsed = [source.parse(batch) for batch in source.batches()]
    return [d.text for p in parsed for _, d in p.documents], [problem for p in parsed for problem in p.problems]


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("frames", [1, 2, 7])
def test_frames_one_after_another_are_one_file(write, kind, frames):
    cuts = [len(LINES) * place // frames for place in range(frames + 1)]
    content = b"".join(COMPRESS[kind](LINES[a:b]) for a, b in itertools.pairwise(cuts))
    assert read(write(f"a.jsonl.{kind}", content)) == (TEXTS, [])


FRAME = COMPRESS["zst"](LINES)
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(LINES)
LONG = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
).compressobj()
GZIP_NAMED = b"\x1f\x8b\x08\x1c" + bytes(6) + b"\3\0abc" + b"name\0" + b"comment\0" + gzip.compress(LINES, mtime=0)[10:]
FORMS = {
    "zstd after a skippable frame": ("zst", SKIPPABLE + FRAME),
    "zstd between skippable frames": ("zst", SKIPPABLE * 2 + FRAME + SKIPPABLE),
    "zstd without its size": ("zst", UNSIZED),
    "zstd and an empty frame": ("zst", FRAME + COMPRESS["zst"](b"")),
    "gzip with a name, a comment and extra fields": ("gz", GZIP_NAMED),
    "gzip and zeros behind it": ("gz", gzip.compress(LINES) + bytes(1000)),
    "gzip, zeros, gzip": ("gz", gzip.compress(LINES[:-1]) + bytes(512) + gzip.compress(LINES[-1:])),
    "an empty gzip member first": ("gz", gzip.compress(b"") + gzip.compress(LINES)),
    "xz and padding": ("xz", lzma.compress(LINES) + bytes(8)),
    "lzma's older format": ("xz", lzma.compress(LINES, format=lzma.FORMAT_ALONE)),
    "xz with a strong checksum": ("xz", lzma.compress(LINES, check=lzma.CHECK_SHA256)),
}


@pytest.mark.parametrize(("kind", "content"), FORMS.values(), ids=FORMS)
def test_what_the_formats_allow_is_read(write, kind, content):
    assert read(write(f"a.jsonl.{kind}", content)) == (TEXTS, [])


def damaged(content, place):
    """With one byte changed."""
    place %= len(content)
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


DAMAGED_ENDS = {
    "gzip, its checksum": ("gz", damaged(gzip.compress(LINES), -8)),
    "gzip, its length": ("gz", damaged(gzip.compress(LINES), -1)),
    "gzip without its last byte": ("gz", gzip.compress(LINES)[:-1]),
    "gzip without its trailer": ("gz", gzip.compress(LINES)[:-8]),
    "gzip with something behind it": ("gz", gzip.compress(LINES) + b"garbage"),
    "zstd, its checksum": ("zst", damaged(FRAME, -1)),
    "zstd without its checksum": ("zst", FRAME[:-4]),
    "zstd with something behind it": ("zst", FRAME + b"garbage"),
    "zstd and half a skippable frame": ("zst", FRAME + SKIPPABLE[:-1]),
    "bzip2, its checksum": ("bz2", damaged(bz2.compress(LINES), -2)),
    "bzip2 without its end": ("bz2", bz2.compress(LINES)[:-4]),
    "xz, its footer": ("xz", damaged(lzma.compress(LINES), -1)),
    "xz without its footer": ("xz", lzma.compress(LINES)[:-12]),
    "xz, its checksum": ("xz", damaged(lzma.compress(LINES), -36)),
}


@pytest.mark.parametrize("newline", [b"\n", b""])
@pytest.mark.parametrize(("kind", "content"), DAMAGED_ENDS.values(), ids=DAMAGED_ENDS)
def test_lines_before_a_damaged_end_are_read_and_the_damage_is_reported(write, kind, content, newline):
    texts, problems = read(write(f"a.jsonl.{kind}", content))
    assert texts == TEXTS
    (problem,) = problems
    assert f"a.jsonl.{kind}:{len(TEXTS) + 1}: damaged from here on: " in problem


def test_the_last_line_needs_no_end(write):
    for kind in ("gz", "zst"):
        content = COMPRESS[kind](LINES.rstrip(b"\n"))
        texts, problems = read(write(f"a.jsonl.{kind}", damaged(content, -1)))
        assert texts == TEXTS
        assert len(problems) == 1


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_what_stands_before_a_damage_in_the_middle_is_read(write, kind):
    """Frames of ten lines: all before the damaged one, and then none."""
    lines = LINES.splitlines(keepends=True)
    frames = [COMPRESS[kind](b"".join(lines[at : at + 10])) for at in range(0, 300, 10)]
    content = b"".join(frames[:20]) + damaged(frames[20], -1) + b"".join(frames[21:])
    texts, problems = read(write(f"a.jsonl.{kind}", content))
    assert texts == TEXTS[:210]
    assert len(problems) == 1


BOMB = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]) << 20,) * 2)
from pathlib import Path
from sporeloom.data.sources import DocumentSource
source = DocumentSource((Path(sys.argv[1]),), on_error="skip", max_document_mb=8)
for batch in source.batches():
    for problem in source.parse(batch).problems:
        print(problem)
"""


def bomb(kind, megabytes):
    """So many megabytes of one line."""
    if kind == "gz":
        return gzip.compress(bytes(megabytes << 20), 1)
    if kind == "zst":
        made = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    else:
        made = bz2.BZ2Compressor() if kind == "bz2" else lzma.LZMACompressor(preset=0)
    return b"".join(made.compress(b"a" * (1 << 20)) for _ in range(megabytes)) + made.flush()


@pytest.mark.parametrize(("kind", "megabytes"), [("gz", 900), ("zst", 900), ("bz2", 45), ("xz", 45)])
def test_a_bomb_is_a_document_that_is_too_long(write, kind, megabytes):
    path = write(f"b.jsonl.{kind}", bomb(kind, megabytes))
    command = [sys.executable, "-c", BOMB, path, 600]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    size = (megabytes << 20) / 1e6
    assert done.stdout == f"{path}:1: a document of {size:.1f} MB is longer than --max-document-mb 8\n", done.stderr[
        -500:
    ]


def test_a_window_that_is_too_large_is_refused_unless_documents_may_be_as_long(write):
    path = write("a.jsonl.zst", LONG.compress(LINES) + LONG.flush())
    texts, (problem,) = read(path)
    assert texts == []
    assert "memory" in problem or "window" in problem
    assert read(path, max_document_mb=300) == (TEXTS, [])
