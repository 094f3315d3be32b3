# SPDX-License-Identifier: Apache-2.0
"""A line ends at \\n or \\r\\n and nowhere else, whoever reads it."""

import ast
import asyncio
import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from sporeloom.core.lines import file_lines, first_line, split_lines, stream_lines
from sporeloom.data.documents import json_lines, read_documents
from sporeloom.data.examples import read_lines as read_examples
from sporeloom.evaluation.config import read_problems
from sporeloom.evaluation.generation import read_samples
from sporeloom.inference.config import read_prompts
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.train.metrics import _lines_up_to

NO_ENDS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"]
"""What `str.splitlines` or Python's text files end a line at, and we do not."""

TABLE = [
    ("", []),
    ("a", ["a"]),
    ("a\n", ["a"]),
    ("a\nb", ["a", "b"]),
    ("a\r\nb\r\n", ["a", "b"]),
    ("\n", [""]),
    ("\r\n\r\n", ["", ""]),
    ("a\n\n b\t\n", ["a", "", " b\t"]),
    ("a\r\r\nb\r", ["a\r", "b\r"]),
    ("a\n\rb", ["a", "\rb"]),
    *(
        (f"a{sign}b\nc{sign}\n{sign}d", [f"a{sign}b", f"c{sign}" if sign != "\r" else "c", f"{sign}d"])
        for sign in NO_ENDS
    ),
]


@pytest.mark.parametrize(("text", "lines"), TABLE)
def test_lines_end_at_a_line_feed_alone(tmp_path, text, lines):
    assert split_lines(text) == lines
    assert split_lines(text.encode()) == [line.encode() for line in lines]
    (tmp_path / "file").write_bytes(text.encode())
    assert file_lines(tmp_path / "file") == lines
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert file_lines(tmp_path / "file") == lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "lines"), TABLE)
def test_a_stream_has_the_same_lines_however_it_is_cut(text, lines, size):
    async def chunks():
        content = text.encode()
        for start in range(0, len(content), size):
            yield content[start : start + size]

    async def collect():
        return [line async for line in stream_lines(chunks())]

    assert asyncio.run(collect()) == lines


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ("one\ntwo", "one"),
        ("\n one\r\ntwo", "one"),
        (ValueError("bad \u2028 thing\nmore"), "bad \u2028 thing"),
        (ValueError(), "ValueError"),
        (OSError("\n"), "OSError"),
    ],
)
def test_the_first_line_of_what_is_said(said, first):
    assert first_line(said) == first


@pytest.fixture(params=NO_ENDS)
def text(request):
    return f"one{request.param}more"


def as_line(text):
    """Of JSON, its characters written plainly as far as JSON allows."""
    return json.dumps({"text": text, "prompt": text, "step": 1}, ensure_ascii=False)


def test_each_line_of_a_file_of_prompts_is_a_prompt(write, text):
    path = write("prompts.txt", f"{text}\r\n\nsecond\n{text}")
    config = SimpleNamespace(prompt=None, prompt_file=path, interactive=False)
    assert read_prompts(config, SINGLE_DEVICE) == [(f"{path}:1", text), (f"{path}:3", "second"), (f"{path}:4", text)]
    path = write("prompts.jsonl", f"{as_line(text)}\r\n\n{as_line('second')}")
    config = SimpleNamespace(prompt=None, prompt_file=path, interactive=False)
    assert read_prompts(config, SINGLE_DEVICE) == [(f"{path}:1", text), (f"{path}:3", "second")]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_one_text(monkeypatch, text, end):
    given = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(f"{text}\n{text}{end}".encode()))
    monkeypatch.setattr(sys, "stdin", given)
    config = SimpleNamespace(prompt=None, prompt_file=None)
    assert read_prompts(config, SINGLE_DEVICE) == [("standard input", f"{text}\n{text}")]


def test_files_of_json_lines_have_the_lines_they_have(write, tmp_path, text):
    lines = f"{as_line(text)}\n{as_line('second')}\r\n"
    path = write("lines.jsonl", lines)
    assert json_lines(path, path.read_bytes().decode(), "prompt") == [(1, text), (2, "second")]
    assert [line.values["text"] for line in read_examples(path, (("text",),))] == [text, "second"]
    assert read_documents(path) == [text, "second"]
    packed = write("lines.jsonl.gz", gzip.compress(lines.encode()))
    assert read_documents(packed) == [text, "second"]
    assert [sample["text"] for sample in read_samples(path)] == [text, "second"]
    assert [json.loads(line)["text"] for line in _lines_up_to(3, path)] == [text, "second"]


def test_a_document_keeps_its_characters(write, text):
    assert read_documents(write("text.txt", f"{text}\n{text}\n\nnext\n")) == [f"{text}\n{text}", "next"]


def test_problems_of_humaneval_may_hold_any_character(tmp_path, text):
    fields = (
        "task_id",
        "prompt",
        "declaration",
        "test",
        "canonical_solution",
        "text",
        "import",
        "example_test",
        "test_setup",
    )
    problems = [{**dict.fromkeys(fields, text), "task_id": f"Python/{number}"} for number in range(2)]
    lines = "".join(json.dumps(problem, ensure_ascii=False) + "\r\n" for problem in problems)
    (tmp_path / "humaneval_python.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = read_problems(tmp_path, "python")
    assert [problem["prompt"] for problem in found.values()] == [text, text]


READERS = {"splitlines", "readlines", "iter_lines", "aiter_lines"}
"""Methods that end lines elsewhere, or read text files, which do."""
ALLOWED = {"sporeloom/data/marked_text.py": "strings of chat templates, which do what `str` does"}


def test_nobody_reads_lines_in_another_way():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for folder in ("sporeloom", "pangu", "codegeex", "palm", "tools", "benchmarks", "examples")
        for path in sorted(Path(ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in READERS and str(path.relative_to(ROOT)) not in ALLOWED
    ]
    assert not found, "use sporeloom.core.lines"
