# SPDX-License-Identifier: Apache-2.0
"""Pages and texts of web archives: WARC and WET files, as Common Crawl has them.

warcio reads the records, trafilatura finds the text of a page among menus, advertisements and footers.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.data.stores import open_document

WEB = (".warc", ".warc.gz", ".wet", ".wet.gz")
GZIP = b"\x1f\x8b"
PAGES = ("text/html", "application/xhtml+xml")


class Record(NamedTuple):
    """A page, or a text, of an archive."""

    content: bytes
    form: Literal["html", "text"]
    about: dict[str, str]
    """Its `url` and `date`."""
    problem: str = ""


def read_records(path: Path, max_bytes: int) -> Iterator[Record]:
    """Texts (`conversion` records of WET, plain-text answers) and pages (answers of HTTP status 200) in their order;
    other records are skipped. What cannot be read comes with a `problem`.

    Raises:
        ConfigError: warcio is not installed.
    """
    archives = _optional("warcio.archiveiterator", "warcio")
    failed = (_optional("warcio.exceptions", "warcio").ArchiveLoadFailed, zlib.error, EOFError, OSError, ValueError)
    with open_document(path) as file:
        try:
            if not is_archive(file):
                raise ValueError("it is not a web archive")
            for record in archives.ArchiveIterator(file):
                if form := _form(record):
                    headers = record.rec_headers
                    about = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
                    content = record.content_stream().read(max_bytes + 1)
                    problem = "longer than --max-document-mb" if len(content) > max_bytes else ""
                    if not problem and _is_cut_off(record):
                        raise EOFError
                    content = b"" if problem else _in_utf8(content, record)
                    yield Record(content, form, {k: v for k, v in about.items() if v}, problem)
        except failed as error:
            yield Record(b"", "text", {}, f"damaged from here on: {first_line(str(error).strip() or 'it ends early')}")


def is_archive(file: IO[bytes]) -> bool:
    """Whether it begins as an archive; warcio accepts anything as an old kind."""
    begin = file.read(2)
    file.seek(0)
    begin = gzip.GzipFile(fileobj=file).read(5) if begin == GZIP else file.read(5)
    file.seek(0)
    return begin == b"WARC/"


def _is_cut_off(record: Any) -> bool:
    """Whether its file ended before the record did, which warcio does not report."""
    return bool(getattr(record.raw_stream, "limit", 1) > 0)


def _form(record: Any) -> Literal["html", "text"] | None:
    if record.rec_type == "conversion":
        return "text"
    if record.rec_type != "response" or record.http_headers is None or record.http_headers.get_statuscode() != "200":
        return None
    kind = _content_type(record)[0]
    return "html" if kind in PAGES else "text" if kind == "text/plain" else None


def _content_type(record: Any) -> tuple[str, str]:
    """Media type of an answer, and the encoding it names."""
    kind, *more = ((record.http_headers and record.http_headers.get_header("Content-Type")) or "").lower().split(";")
    charsets = [word.partition("=")[2].strip(" \"'") for word in more if word.strip().startswith("charset=")]
    return kind.strip(), charsets[0] if charsets else ""


def _in_utf8(content: bytes, record: Any) -> bytes:
    """The content in UTF-8 where the answer names another valid encoding; otherwise as it is."""
    try:
        return content.decode(_content_type(record)[1] or "utf-8").encode()
    except (LookupError, UnicodeError):
        return content


def extract_text(page: bytes, url: str | None) -> str:
    """The text of a page; empty where there is none.

    Raises:
        ConfigError: trafilatura is not installed.
    """
    extract = _optional("trafilatura", "trafilatura").extract
    try:
        given: str | bytes = page.decode()  # guessing an encoding is for content that is not UTF-8
    except UnicodeDecodeError:
        given = page
    # Comments are other texts by other people, tables come as rows of cells.
    text: str | None = extract(given, url=url, include_comments=False, include_tables=True, deduplicate=False)
    return text or ""


LANGUAGE_CHARS = 1000
"""Number of characters of a text from which its language is detected."""


def detect_language(text: str) -> tuple[str, float]:
    """ISO 639-1 code of the language, and its probability by langid's model.

    Raises:
        ConfigError: py3langid, which has the model inside, is not installed.
    """
    language, certainty = _identifier().classify(text[:LANGUAGE_CHARS])
    return language, float(certainty)


def language_problems(languages: Iterable[str]) -> list[str]:
    """List unknown language codes."""
    known = set(_identifier().nb_classes)
    return [
        f"--languages {code} is unknown; known: {', '.join(sorted(known))}" for code in languages if code not in known
    ]


@cache
def _identifier() -> Any:
    module = _optional("py3langid.langid", "py3langid")
    return module.LanguageIdentifier.from_pickled_model(module.MODEL_FILE, norm_probs=True)


def _optional(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(f"{package} is not installed: pip install -e '.[web]'") from None
