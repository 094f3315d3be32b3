# SPDX-License-Identifier: Apache-2.0
"""Compressed files that were cut off are told, wherever the cut is; duplicate keys are."""

import gzip
import json
import random

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.sources import DocumentSource, FilePart

LINES = [json.dumps({"text": f"line {number} " + "x" * (number % 97)}) + "\n" for number in range(400)]


def compressed(kind):
    """A file's name, bytes, and where it may end without a loss: behind a whole frame."""
    parts = ["".join(LINES[:150]).encode(), "".join(LINES[150:]).encode()]
    if kind == "gz":
        frames = [gzip.compress(part) for part in parts]
    else:
        zstandard = pytest.importorskip("zstandard")
        frames = [zstandard.ZstdCompressor(write_checksum=True).compress(part) for part in parts]
    return f"a.jsonl.{kind}", b"".join(frames), {len(frames[0])}


def read(path):
    source = DocumentSource((path,), on_error="skip")
    parsed = [source.parse(batch) for batch in source.batches()]
    return [d.text for p in parsed for _, d in p.documents], [problem for p in parsed for problem in p.problems]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_whole_file_of_several_frames_is_read(write, kind):
    name, content, _ = compressed(kind)
    assert read(write(name, content)) == ([json.loads(line)["text"] for line in LINES], [])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_file_that_was_cut_off_is_told(write, kind):
    name, content, whole = compressed(kind)
    draw = random.Random(3)
    for cut in [1, 2, 5, len(content) - 1, len(content) - 4, *(draw.randrange(1, len(content)) for _ in range(30))]:
        if cut in whole:
            continue
        texts, problems = read(write(name, content[:cut]))
        assert problems, f"cut at {cut} of {len(content)}: {len(texts)} lines and no word"
        source = DocumentSource((write(name, content[:cut]),))
        with pytest.raises(ConfigError):
            [source.parse(batch) for batch in source.batches()]


def test_a_key_given_twice_is_told(write):
    path = write("a.jsonl", '{"text": "kept"}\n{"text": "one", "text": "two"}\n')
    texts, problems = read(path)
    assert texts == ["kept"]
    assert problems == [f"{path}:2: text is given twice"]


@pytest.mark.parametrize("seed", range(8))
def test_a_large_file_of_lines_is_cut_into_shards_that_hold_each_line_once(write, seed):
    draw = random.Random(seed)
    texts = [f"{number}:" + "x" * draw.choice((0, 3, 40, 400, 9000)) for number in range(300)]
    lines = [json.dumps({"text": text}) + draw.choice(("\n", "\r\n", "\n\n")) for text in texts]
    path = write("a.jsonl", "\ufeff" + "".join(lines).rstrip("\r\n") + draw.choice(("", "\n")))
    source = DocumentSource((path,), shard_mb=draw.choice((0.0005, 0.003, 0.05)))
    shards = source.shards()
    assert len(shards) > 3
    found = []
    for number, pieces in enumerate(shards):
        for batch in source.batches_of(number, pieces):
            found += [document.text for _, document in source.parse(batch).documents]
    assert found == texts
    assert [piece for (piece,) in shards] == [
        FilePart(path, start, end)
        for start, end in zip([p.start for (p,) in shards], [*[p.start for (p,) in shards[1:]], None], strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_large_table_is_cut_into_shards_that_hold_each_row_once(tmp_path, seed):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(seed)
    texts = [f"{number}:" + "".join(draw.choices("abcdefgh", k=draw.choice((1, 40, 900)))) for number in range(400)]
    path, start = tmp_path / "a.parquet", 0
    table = arrow.table({"n": list(range(400)), "text": texts})
    with parquet.ParquetWriter(path, table.schema, use_dictionary=draw.random() < 0.5) as writer:
        while start < len(texts):
            size = draw.choice((1, 10, 70))
            writer.write_table(table.slice(start, size))
            start += size
    source = DocumentSource((path,), shard_mb=draw.choice((0.0005, 0.02, 0.05)))
    shards = source.shards()
    assert len(shards) > 1
    found = [
        document
        for number, pieces in enumerate(shards)
        for batch in source.batches_of(number, pieces)
        for _, document in source.parse(batch).documents
    ]
    assert [document.text for document in found] == texts
    assert [document.place for document in found] == [f"{path}:{number}" for number in range(1, 401)]


def test_a_damaged_table_is_told_with_the_first_row_that_is_lost(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw, path = random.Random(1), tmp_path / "a.parquet"
    table = arrow.table({"text": ["".join(draw.choices("abcdefgh", k=60)) for _ in range(6000)]})
    parquet.write_table(
        table, path, use_dictionary=False, data_page_size=4000, write_batch_size=50, row_group_size=4000
    )
    content = bytearray(path.read_bytes())
    begin = len(content) * 5 // 6  # in the midst of the second group
    content[begin : begin + 8000] = bytes(8000)
    path.write_bytes(content)
    texts, (problem,) = read(path)
    assert texts == table["text"].to_pylist()[: len(texts)] and 4000 < len(texts) < 5500
    assert problem.startswith(f"{path}:{len(texts) + 1}: damaged from here on: ")


def test_a_mistake_in_a_piece_is_told_with_its_place(write):
    good = json.dumps({"text": "x" * 200}) + "\n"
    path = write("a.jsonl", good * 50 + "no json\n" + good * 5)
    source = DocumentSource((path,), on_error="skip", shard_mb=0.002)
    problems = [problem for batch in source.batches() for problem in source.parse(batch).problems]
    (place,) = [problem.partition(": ")[0] for problem in problems]
    name, _, line = place.rpartition(":")
    start = int(name.rpartition("@")[2])
    begun = path.read_bytes()[start:]
    begun = begun if path.read_bytes()[start - 1 : start] == b"\n" else begun.partition(b"\n")[2]
    assert begun.splitlines()[int(line) - 1] == b"no json"
