# SPDX-License-Identifier: Apache-2.0
"""`sporeloom tokenizer stats`, compared with counts of SentencePiece itself and of the test."""

import json
import os
from pathlib import Path

import pytest
import sentencepiece
from conftest import ROOT, in_process

from palm.tokenizer import train_tokenizer as train_palm
from pangu.tokenizer import PanGuTokenizer
from pangu.tokenizer import train_tokenizer as train_pangu
from sporeloom.data.sources import DocumentSource
from sporeloom.data.tokenizer_statistics import NamedTokenizer, StatisticsJob, count_corpus, num_words

TOWN = (ROOT / "examples" / "small_town.txt").read_text(encoding="utf-8").strip("\n").split("\n\n")
RECORDS = [
    {"text": "The quick brown fox, which isn't lazy.", "lang": "en", "meta": {"domain": "books", "year": 1990}},
    {"text": "小城在山脚下，一条河从城中穿过。", "lang": "zh", "meta": {"domain": "books", "year": 1991}},
    {"text": "A second text in English!", "lang": "en", "meta": {"domain": "web", "year": 1991}},
]
WORDS = [7, 14, 5]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A corpus, a tokenizer that loses nothing, and one that does."""
    folder = tmp_path_factory.mktemp("statistics")
    (folder / "palm.model").write_bytes(train_palm(TOWN, 600))
    (folder / "pangu.model").write_bytes(train_pangu(TOWN, 300))
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS]
    (folder / "a.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    (folder / "b.jsonl").write_text(lines[2], encoding="utf-8")
    return folder


def stats(files, *arguments, tokenizer="palm.model", inputs=("a.jsonl", "b.jsonl")):
    return in_process("tools/tokenizer.py", "stats", tokenizer, *inputs, "--model", "palm", *arguments, cwd=files)


def found(files, tmp_path, *arguments, **more):
    done = stats(files, *arguments, "--json", tmp_path / "s.json", **more)
    assert done.code == 0, done.output
    return json.loads((tmp_path / "s.json").read_text(encoding="utf-8")), done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The quick-brown fox, isn't he?", 5),
        ("小城在山脚下，一条河。", 9),
        ("我爱Python 3 吗", 5),
        ("«Straße» — naïve café! ... 2+2", 4),
        ("ひらがなとカナ", 7),
        ("สวัสดี", 4),  # two of the six characters are signs above and below
        ("—— ,。\n\t", 0),
        ("", 0),
    ],
)
def test_a_word_is_what_stands_between_spaces_or_a_letter_where_there_are_none(text, words):
    assert num_words(text) == words


def test_words_of_a_long_line_are_counted_in_linear_time():
    assert num_words("." * 1_000_000) == 0
    assert num_words("x" * 1_000_000 + "小" * 1000) == 1001


def test_counts_are_those_of_sentencepiece(files, tmp_path):
    report, output = found(files, tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(files / "palm.model"))
    tokens = sum(len(pieces.encode(record["text"])) for record in RECORDS)
    size = sum(len(record["text"].encode()) for record in RECORDS)
    assert report["groups"] == {}
    total = report["total"]
    assert (total["documents"], total["bytes"], total["words"]) == (3, size, sum(WORDS))
    assert total["tokenizer"] == {
        "tokens": tokens,
        "fertility": tokens / sum(WORDS),
        "bytes_per_token": size / tokens,
        "unknown_rate": 0.0,
        "round_trip_failures": 0,
        "first_failures": [],
    }
    row = output.splitlines()[-1].split()
    assert row == [
        *("total", "palm.model", "3", str(sum(WORDS)), str(tokens)),
        *(f"{tokens / sum(WORDS):.2f}", f"{size / tokens:.2f}", "0.00%", "0"),
    ]


def test_unknown_tokens_and_texts_that_change_are_counted(files, tmp_path):
    report, _ = found(files, tmp_path, "--model", "pangu", tokenizer="pangu.model")
    tokenizer = PanGuTokenizer(files / "pangu.model")
    ids = [tokenizer.encode(record["text"]) for record in RECORDS]
    unknown = sum(token == tokenizer.pieces.unk_id() for each in ids for token in each)
    assert unknown > 0
    counts = report["total"]["tokenizer"]
    assert counts["unknown_rate"] == unknown / sum(map(len, ids))
    changed = [tokenizer.decode(each) != record["text"] for each, record in zip(ids, RECORDS, strict=True)]
    places = ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert counts["round_trip_failures"] == sum(changed) > 0
    assert counts["first_failures"] == [place for place, lost in zip(places, changed, strict=True) if lost]


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        (("--by", "lang"), {"en": [0, 2], "zh": [1]}),
        (("--by", "meta.domain"), {"books": [0, 1], "web": [2]}),
        (("--by", "meta.year"), {"1990": [0], "1991": [1, 2]}),
        (("--by-file",), {"a.jsonl": [0, 1], "b.jsonl": [2]}),
    ],
)
def test_documents_are_grouped_and_a_reference_is_compared(files, tmp_path, arguments, groups):
    against = ("--against", "pangu.model", "--against-model", "pangu")
    report, output = found(files, tmp_path, *arguments, *against)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(files / "palm.model"))
    reference = PanGuTokenizer(files / "pangu.model")
    assert list(report["groups"]) == list(groups)
    for name, members in {**groups, "total": [0, 1, 2]}.items():
        group = report["total"] if name == "total" else report["groups"][name]
        texts = [RECORDS[member]["text"] for member in members]
        own = sum(len(pieces.encode(text)) for text in texts)
        other = sum(len(reference.encode(text)) for text in texts)
        words = sum(WORDS[member] for member in members)
        assert (group["documents"], group["words"]) == (len(members), words)
        assert (group["tokenizer"]["tokens"], group["against"]["tokens"]) == (own, other)
        assert group["tokens_ratio"] == own / other
        assert group["against"]["fertility"] == other / words
        line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
        assert line.split()[4] == str(own) and line.split()[-1] == f"{own / other:.2f}"
    assert output.count("pangu.model") == len(groups) + 1


def test_fields_of_a_table_group_too(tmp_path, files):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    report, _ = found(files, tmp_path, "--by", "lang", inputs=(tmp_path / "a.parquet",))
    lines, _ = found(files, tmp_path, "--by", "lang", "--overwrite")
    assert report["groups"]["zh"]["documents"] == 1
    assert report == lines


def test_the_counts_do_not_depend_on_the_number_of_processes(files):
    source = DocumentSource((files / "a.jsonl", files / "b.jsonl"))
    job = StatisticsJob(source, (NamedTokenizer("palm", files / "palm.model"),), by="lang")
    assert count_corpus(job, workers=2) == count_corpus(job)


def test_a_document_without_the_field_stops_or_is_counted(files, tmp_path):
    path = tmp_path / "more.jsonl"
    path.write_text('{"text": "one", "lang": "en"}\n{"text": "two", "lang": null}\n{"text": "three", "lang": ["en"]}\n')
    done = stats(files, "--by", "language", inputs=(path,))
    assert done.code == 2
    assert f"{path}:1: --by: no field `language`; found: text, lang; --on-error skip" in done.output
    report, output = found(files, tmp_path, "--by", "lang", "--on-error", "skip", inputs=(path,))
    assert report["skipped"] == {"without_field": 2} and "skipped: 2 without_field" in output
    null, listed = report["first_problems"]
    assert null == f"{path}:2: --by: the field `lang` is null; found: text, lang"
    assert listed == f"{path}:3: --by: the field `lang` is a list, not a text or an integer; found: text, lang"
    assert report["total"]["documents"] == 1
    none = stats(files, "--by", "language", "--on-error", "skip", inputs=(path,))
    assert none.code == 2 and f"{path}: no document has the field `language` of --by" in none.output
    text = stats(files, "--by", "lang", inputs=(ROOT / "examples" / "tang_poems.txt",))
    assert text.code == 2 and "a text has no fields; group by files with --by-file" in text.output


def test_a_field_with_too_many_values_is_refused(files, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": "x", "id": number}) + "\n" for number in range(1001)))
    done = stats(files, "--by", "id", inputs=(path,))
    assert done.code == 2 and "--by id: more than 1,000 values; choose a field with few" in done.output


@pytest.mark.parametrize(
    ("value", "what"), [("true", "true or false"), ("1.5", "a number with"), ('""', "empty"), ("{}", "an object")]
)
def test_what_names_no_group_is_said(files, tmp_path, value, what):
    path = tmp_path / "odd.jsonl"
    path.write_text(f'{{"text": "one", "lang": {value}}}\n')
    done = stats(files, "--by", "lang", inputs=(path,))
    assert done.code == 2 and f"the field `lang` is {what}" in done.output


def test_names_that_are_no_unicode_are_counted_and_written(files, tmp_path):
    path = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl"))
    path.write_text('{"text": "hello", "lang": "\\ud800"}\n')
    for more in (("--by", "lang"), ("--by-file",)):
        report, _ = found(files, tmp_path, *more, "--overwrite", inputs=(path,))
        assert [group["documents"] for group in report["groups"].values()] == [1]


def test_a_name_of_a_group_cannot_look_like_a_row(files, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"text": "x", "lang": "en\ntotal  \x1b[2J"}) + "\n")
    _, output = found(files, tmp_path, "--by", "lang", inputs=(path,))
    lines = output.splitlines()
    assert len(lines) == 3 and lines[1].startswith("en\\ntotal  \\x1b[2J  palm.model")


def test_mistakes_are_refused(files, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    assert "contains no text" in stats(files, inputs=(empty,)).output
    assert "leave the other out" in stats(files, "--by", "lang", "--by-file").output
    assert "--against FILE, which is missing" in stats(files, "--against-model", "palm").output
    assert "absent.model: there is no such tokenizer" in stats(files, tokenizer="absent.model").output
    taken = tmp_path / "s.json"
    taken.write_text("mine")
    refused = stats(files, "--json", taken)
    assert refused.code == 2 and "is there already" in refused.output and taken.read_text() == "mine"
    assert "did you mean stats?" in in_process("tools/tokenizer.py", "stat").output
