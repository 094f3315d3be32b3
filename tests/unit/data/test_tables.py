# SPDX-License-Identifier: Apache-2.0
"""What becomes of each type of column: text of bytes, JSON of the rest, and what cannot be either is refused with its row."""

import datetime
import decimal
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, in_process

from sporeloom.data.sources import DocumentSource

arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

TEXT = 'line one\nЖ 小城 "q" \\ end'
TEXTS = [TEXT, "second\ttext"]
BYTES = [text.encode() for text in TEXTS]


def read(path, all_fields=False, **options):
    source = DocumentSource((path,), on_error="skip", **options)
    parsed = [source.parse(batch) for batch in source.batches(all_fields)]
    return [d for p in parsed for _, d in p.documents], [problem for p in parsed for problem in p.problems]


def table(tmp_path, **columns):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table(columns), path)
    return path


TEXT_COLUMNS = {
    "string": arrow.array(TEXTS, arrow.string()),
    "large_string": arrow.array(TEXTS, arrow.large_string()),
    "binary": arrow.array(BYTES, arrow.binary()),
    "large_binary": arrow.array(BYTES, arrow.large_binary()),
    "dictionary of strings": arrow.array(TEXTS).dictionary_encode(),
    "dictionary of large strings": arrow.array(TEXTS, arrow.large_string()).dictionary_encode(),
    "dictionary of bytes": arrow.array(BYTES, arrow.binary()).dictionary_encode(),
    "views": arrow.array(TEXTS, arrow.string()).cast(arrow.string_view()),
}


@pytest.mark.parametrize("column", TEXT_COLUMNS.values(), ids=TEXT_COLUMNS)
def test_text_is_text_whatever_its_column_is_of(tmp_path, column):
    try:
        path = table(tmp_path, text=column)
    except arrow.ArrowNotImplementedError:
        pytest.skip("this pyarrow writes no such columns")
    documents, problems = read(path)
    assert [document.text for document in documents] == TEXTS
    assert problems == []


def test_bytes_of_a_fixed_length_are_text(tmp_path):
    documents, _ = read(table(tmp_path, text=arrow.array([b"abcd", "äb ".encode()], arrow.binary(4))))
    assert [document.text for document in documents] == ["abcd", "äb "]


@pytest.mark.parametrize("kind", [arrow.binary(), arrow.large_binary(), arrow.binary(2)])
def test_bytes_that_are_not_text_are_refused_with_their_row(tmp_path, kind):
    path = table(tmp_path, text=arrow.array([b"ok", b"\xff\xfe", b"go"], kind))
    documents, problems = read(path)
    assert [document.text for document in documents] == ["ok", "go"]
    assert problems == [
        f"{path}:2: column `text`: bytes that are not UTF-8 text (invalid start byte); leave such a column out"
    ]


@pytest.mark.parametrize(
    "column", [arrow.array([1]), arrow.array([["a"]]), arrow.array([None], arrow.string()), arrow.nulls(1)], ids=str
)
def test_a_column_without_text_is_refused(tmp_path, column):
    documents, (problem,) = read(table(tmp_path, text=column))
    assert documents == []
    assert problem.endswith(":1: no `text` field with a string; found: text")


MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)
OTHERS = {
    "null": (arrow.array([None], arrow.int32()), None),
    "bool": (arrow.array([True]), True),
    "int64": (arrow.array([-(2**63)]), -(2**63)),
    "uint64": (arrow.array([2**64 - 1], arrow.uint64()), 2**64 - 1),
    "float": (arrow.array([0.5], arrow.float32()), 0.5),
    "NaN": (arrow.array([float("nan")]), None),
    "infinity": (arrow.array([float("-inf")]), None),
    "list": (arrow.array([["a", None]]), ["a", None]),
    "large list": (arrow.array([[1, 2]], arrow.large_list(arrow.int8())), [1, 2]),
    "struct": (arrow.array([{"a": 1, "b": [0.5]}]), {"a": 1, "b": [0.5]}),
    "bytes in a struct": (arrow.array([{"a": b"\xc3\xa4"}]), {"a": "ä"}),
    "NaN in a list": (arrow.array([[float("nan"), 1.0]]), [None, 1.0]),
    "map": (arrow.array([[("k", 1)]], arrow.map_(arrow.string(), arrow.int32())), [["k", 1]]),
    "decimal": (arrow.array([decimal.Decimal("12345678901234567890.12")]), "12345678901234567890.12"),
    "date": (arrow.array([MOMENT.date()]), "2024-02-29"),
    "a date in a list": (arrow.array([[MOMENT.date()]]), ["2024-02-29"]),
    "a date that Python has not": (arrow.array([10**7], arrow.int32()).cast(arrow.date32()), "29349-01-26"),
    "time": (arrow.array([MOMENT.time()]), "12:30:45.123456"),
    "timestamp": (arrow.array([MOMENT]), "2024-02-29 12:30:45.123456"),
    "nanoseconds": (arrow.array([1], arrow.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    "bytes": (arrow.array([b"plain"]), "plain"),
}


@pytest.mark.parametrize(("column", "expected"), OTHERS.values(), ids=OTHERS)
def test_other_columns_are_written_as_json(tmp_path, column, expected):
    path, out = table(tmp_path, text=["some text"], other=column), tmp_path / "out.jsonl"
    outcome = in_process("tools/preprocess.py", "filter", path, "--out", out, "--min-chars", 1)
    assert not outcome.code, outcome.output

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(out.read_text(), parse_constant=refuse) == {"text": "some text", "other": expected}


def test_bytes_that_are_not_text_are_refused_in_other_columns_too_where_they_are_written(tmp_path):
    path = table(tmp_path, text=["a", "b"], image=[b"\x89PNG", b"fine"])
    assert len(read(path)[0]) == 2  # where they are not read they do not matter
    documents, (problem,) = read(path, all_fields=True)
    assert [document.record for document in documents] == [{"text": "b", "image": "fine"}]
    assert f"{path}:1: column `image`: bytes" in problem


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], ["text", "text"]), path)
    outcome = in_process("tools/preprocess.py", "filter", path, "--out", tmp_path / "o.jsonl", "--min-chars", 1)
    assert (outcome.code, outcome.output) == (
        2,
        f"error: {path}: several columns are named `text`; give each a name of its own\n",
    )


def test_groups_after_a_damaged_one_are_read(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"text {number} " + "ab" * 40 for number in range(300)]
    parquet.write_table(
        arrow.table({"text": texts}), path, row_group_size=100, use_dictionary=False, compression="snappy"
    )
    column, content = parquet.ParquetFile(path).metadata.row_group(1).column(0), bytearray(path.read_bytes())
    begin = column.data_page_offset
    content[begin : begin + 60] = b"\xff" * 60
    path.write_bytes(content)
    documents, (problem,) = read(path)
    assert [document.text for document in documents] == texts[:100] + texts[200:]
    assert [document.place for document in documents][-1] == f"{path}:300"
    assert problem.startswith(f"{path}:101: damaged up to row 200: ")


def test_a_row_that_is_too_long_is_refused_as_a_line_is(tmp_path):
    path = table(tmp_path, text=["a", "b" * 2_000_000, "c"])
    documents, (problem,) = read(path, max_document_mb=1)
    assert [document.text for document in documents] == ["a", "c"]
    assert problem.startswith(f"{path}:2: a document of 2.0 MB is longer than --max-document-mb 1")


BOMB = """
import re, sys
from pathlib import Path
import pyarrow, pyarrow.parquet
from sporeloom.data.sources import DocumentSource
source, count, largest = DocumentSource((Path(sys.argv[1]),)), 0, 0
for batch in source.batches(all_fields=len(sys.argv) > 2):
    count += len(source.parse(batch).documents)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # getrusage would count the process before it
print(count, int(peak[1]) >> 10)
"""


@pytest.mark.parametrize("of_list", [False, True])
def test_rows_that_share_a_long_value_do_not_each_take_its_memory(tmp_path, of_list):
    """100 rows of 8 MB, which are 8 MB of the file before it is compressed."""
    rows = arrow.DictionaryArray.from_arrays(arrow.array([0] * 100, arrow.int32()), arrow.array(["a" * 8_000_000]))
    columns = {"text": rows}
    if of_list:
        offsets = arrow.array(range(101), arrow.int32())
        columns = {"text": ["short"] * 100, "more": arrow.ListArray.from_arrays(offsets, rows)}
    path = tmp_path / "b.parquet"
    parquet.write_table(arrow.table(columns), path, compression="zstd", row_group_size=100)
    assert path.stat().st_size < 100_000
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path), *["all"] * of_list],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": ""},  # an allocator that the tests run under keeps more
    )
    count, megabytes = map(int, done.stdout.split())
    assert count == 100, done.stderr
    assert megabytes < 600
