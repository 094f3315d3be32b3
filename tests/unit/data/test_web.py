# SPDX-License-Identifier: Apache-2.0
"""Web archives: which records are read, what is found on pages, and what damaged ones tell."""

import gzip
import io
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.filters import FilterRules, make_filter
from sporeloom.data.rewrite import rewrite
from sporeloom.data.sources import DocumentSource
from sporeloom.data.web import detect_language, extract_text, read_records

warcio = pytest.importorskip("warcio")
trafilatura = pytest.importorskip("trafilatura")
pytest.importorskip("py3langid")
PAGES = Path(__file__).parent / "pages"
"""NAME.html as a site would give it, and NAME.txt, the text a person would copy from it."""


def archive(path, *records):
    """`records`: (kind, URL, content, HTTP headers or None)."""
    from warcio.statusandheaders import StatusAndHeaders  # noqa: PLC0415 (of an optional package)
    from warcio.warcwriter import WARCWriter  # noqa: PLC0415

    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
        for kind, url, content, headers in records:
            http = StatusAndHeaders(headers[0], headers[1:], protocol="HTTP/1.1") if headers else None
            record = writer.create_warc_record(
                url,
                kind,
                io.BytesIO(content),
                http_headers=http,
                warc_headers_dict={"WARC-Date": "2026-01-02T03:04:05Z"},
            )
            writer.write_record(record)
    return path


def page(text, title="A page"):
    menu = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/about'>About us</a></li></ul></nav>"
    body = "".join(f"<p>{part}</p>" for part in text.split("\n"))
    foot = "<footer>Copyright 2026. All rights reserved. <a href='/terms'>Terms</a></footer>"
    article = f"<article><h1>{title}</h1>{body}</article>"
    return f"<html><head><title>{title}</title></head><body>{menu}{article}{foot}</body></html>"


LONG = "The river rises in the hills north of the town and runs for forty miles to the sea.\n" * 4
HTML = ("200 OK", ("Content-Type", "text/html; charset=utf-8"))
GBK = ("200 OK", ("Content-Type", "text/html; charset=gbk"))
CHINESE = "这条河发源于城北的群山，流经四十里后入海。两岸的村庄以捕鱼和种稻为生。" * 4


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_pages_and_texts_are_read_with_url_and_date(tmp_path, name):
    path = archive(
        tmp_path / name,
        ("response", "http://a.org/1", page(LONG).encode(), HTML),
        ("resource", "http://a.org/1", b"of no answer", None),
        ("response", "http://a.org/2", page(LONG).encode(), ("404 Not Found", ("Content-Type", "text/html"))),
        ("response", "http://a.org/3", b"\x89PNG", ("200 OK", ("Content-Type", "image/png"))),
        ("response", "http://a.org/4", page(CHINESE, "河").encode("gbk"), GBK),
        ("response", "http://a.org/5", b"plain words", ("200 OK", ("Content-Type", "text/plain"))),
        ("conversion", "http://a.org/6", "Was übrig ist.".encode(), None),
    )
    source = DocumentSource((path,))
    documents = [document for batch in source.batches() for _, document in source.parse(batch).documents]
    assert [document.record["url"] for document in documents] == [f"http://a.org/{n}" for n in (1, 4, 5, 6)]
    assert {document.record["date"] for document in documents} == {"2026-01-02T03:04:05Z"}
    assert [document.place for document in documents] == [f"{path}:{n}" for n in (1, 2, 3, 4)]
    first, chinese, plain, last = (document.text for document in documents)
    assert "The river rises" in first
    assert not any(word in first for word in ("About us", "Copyright", "<p>"))
    assert CHINESE[:20] in chinese
    assert (plain, last) == ("plain words", "Was übrig ist.")


def test_a_filtered_archive_is_json_lines_with_url_and_date(tmp_path):
    path = archive(
        tmp_path / "a.warc.gz",
        ("response", "http://a.org/1", page(LONG).encode(), HTML),
        ("response", "http://a.org/2", page(CHINESE, "河").encode("gbk"), GBK),
    )
    rules, out, samples = FilterRules(languages=("zh",)), tmp_path / "out.jsonl", tmp_path / "samples.txt"
    rules.check()
    work = partial(make_filter, DocumentSource((path,)), rules, False, 10)
    report = rewrite(DocumentSource((path,)), out, work, 0, samples=samples)
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["url"], line["date"]) == ("http://a.org/2", "2026-01-02T03:04:05Z")
    assert (report["documents"], report["kept"], report["failed languages"]) == (2, 1, 1)
    told = samples.read_text()
    assert told.startswith("=== failed languages: 1 documents, of them 1")
    assert f"--- {path}:1\n" in told
    assert "The river rises" in told


@pytest.mark.parametrize("kind", ["cut", "whole", "other"])
def test_a_damaged_archive_is_told_after_what_could_be_read(tmp_path, kind):
    records = [("conversion", f"http://a.org/{i}", b"words " * 300, None) for i in range(5)]
    path = archive(tmp_path / "a.wet.gz", *records)
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: len(content) - 100])
    elif kind == "whole":  # one gzip stream over all records, where each has its own
        plain = archive(tmp_path / "b.wet", *records)
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        path.write_bytes(b"not an archive at all\n" * 10)
    found = list(read_records(path, 10**6))
    problems = [record.problem for record in found if record.problem]
    assert len(problems) == 1
    assert problems[0].startswith("damaged from here on: ")
    assert len(found) == {"cut": 5, "whole": 1, "other": 1}[kind]
    source = DocumentSource((path,))
    (batch,) = source.batches()
    with pytest.raises(ConfigError, match="damaged from here on"):
        source.parse(batch)


def test_a_page_that_is_too_long_is_named(tmp_path):
    path = archive(tmp_path / "a.warc", ("response", "http://a.org/1", page(LONG * 100).encode(), HTML))
    (record,) = read_records(path, 1000)
    assert record.problem == "longer than --max-document-mb"


def words(text):
    return Counter(text.split()) if text.isascii() else Counter(text.replace("\n", " ").replace(" ", ""))


def f_score(found, expected):
    shared = (words(found) & words(expected)).total()
    return 2 * shared / (words(found).total() + words(expected).total())


def test_what_is_found_on_pages_is_what_a_person_would_copy():
    names = sorted(path.stem for path in PAGES.glob("*.html"))
    assert len(names) == 6
    ours, theirs = [], []
    for name in names:
        content, expected = (PAGES / f"{name}.html").read_bytes(), (PAGES / f"{name}.txt").read_text()
        ours.append(f_score(extract_text(content, None), expected))
        theirs.append(f_score(trafilatura.extract(content) or "", expected))
    assert min(ours) > 0.8, dict(zip(names, ours, strict=True))
    assert sum(ours) / len(ours) > max(0.95, sum(theirs) / len(theirs) - 0.01)


def test_a_page_without_text_is_empty():
    assert extract_text(b"", None) == ""
    assert extract_text(b"<html><body></body></html>", None) == ""


def test_languages_are_told():
    assert [detect_language(text)[0] for text in (LONG, CHINESE, "Der Hund läuft über die Wiese.")] == [
        "en",
        "zh",
        "de",
    ]
    assert detect_language(LONG)[1] > 0.9
