# SPDX-License-Identifier: Apache-2.0
"""What the one reader of settings refuses, each with its line, and what it does not fall for."""

import dataclasses
from dataclasses import dataclass

import pytest

from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Positive, Rate, Seed, Share, number_problem
from sporeloom.core.reader import fields_from, parse_json, read_json, read_yaml

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
YAML = {
    "a key twice": ("x: 1\ny: 2\nx: 3\n", "f.yaml:3: x is given twice"),
    "a key twice below": ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: a.b is given twice"),
    "a key twice in a list": ("a:\n- {b: 1,\n   b: 2}\n", "f.yaml:3: a[0].b is given twice"),
    "not a number": ("x: .nan\n", "f.yaml:1: x: .nan is not a finite number"),
    "infinity": ("y: 1\nx: -.inf\n", "f.yaml:2: x: -.inf is not a finite number"),
    "too large a float": ("x: 1.0e+999\n", "is not a finite number"),
    "too large an exponent": ("x: 1e999\n", "is not a finite number"),
    "Python's tags": (
        "x: !!python/object/apply:os.system [ls]\n",
        "f.yaml:1: x: the tag !!python/object/apply:os.system",
    ),
    "a tag of one's own": ("x: !secret 1\n", "the tag !secret is not read here"),
    "binary": ("x: !!binary aGk=\n", "the tag !!binary is not read here"),
    "a set": ("x: !!set {a, b}\n", "the tag !!set is not read here"),
    "an anchor in itself": ("x: &a [1, *a]\n", "f.yaml:1: x[1]: an anchor that contains itself"),
    "a mapping in itself": ("&a x: &b\n  y: *b\n", "an anchor that contains itself"),
    "a bomb of anchors": (BOMB, "unfold to more than"),
    "deep brackets": ("x: " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
    "deep mappings": ("{a: " * 2000 + "1" + "}" * 2000, "nested more than 64 deep"),
    "a NUL": ("x: 1\ny: \0\n", "f.yaml:2: not YAML"),
    "half a bracket": ("x: [1,\n", "not YAML"),
    "a tab": ("x:\n\t- 1\n", "f.yaml:2: not YAML"),
    "an unknown anchor": ("x: *nobody\n", "f.yaml:1: not YAML"),
    "two documents": ("x: 1\n---\ny: 2\n", "not YAML"),
    "a mapping as key": ("? {a: 1}\n: 2\n", "a key must be a text"),
    "<< of a number": ("x:\n  <<: 3\n", "<< takes a mapping"),
}
JSON = {
    "a key twice": ('{"x": 1,\n "y": {"z": 1},\n "x": 2}', "f.json: line 3: x is given twice"),
    "a key twice below": ('{"x": [{"a": 1,\n"a": 2}]}', "f.json: line 2: a is given twice"),
    "NaN": ('{"x": NaN}', "NaN is not a finite number"),
    "infinity": ('{"x": -Infinity}', "-Infinity is not a finite number"),
    "too large a float": ('{"x": 1e999}', "1e999 is not a finite number"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "digits without end": ('{"x": ' + "9" * 10_000 + "}", "not JSON"),
    "half": ('{"x": 1', "not JSON"),
    "nothing": ("", "not JSON"),
    "something behind": ("{} {}", "not JSON"),
}


@pytest.mark.parametrize(("text", "words"), YAML.values(), ids=YAML)
def test_what_is_refused_in_yaml_is_told_with_its_line(write, text, words):
    with pytest.raises(ConfigError) as caught:
        read_yaml(write("f.yaml", text))
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert all("\n" not in problem for problem in caught.value.problems)


@pytest.mark.parametrize(("text", "words"), JSON.values(), ids=JSON)
def test_what_is_refused_in_json_is_told(write, text, words):
    with pytest.raises(ConfigError) as caught:
        read_json(write("f.json", text))
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("read", [read_yaml, read_json])
@pytest.mark.parametrize(("content", "words"), [(b"\xff\xfe", "not UTF-8"), (None, "cannot be read")])
def test_what_is_no_text_is_told(write, tmp_path, read, content, words):
    path = tmp_path / "none" if content is None else write("f", content)
    with pytest.raises(ConfigError, match=words):
        read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)


def test_values_are_plain_and_surprises_are_texts(write):
    text = "a: 2024-99-99\nb: 12:30:45\nc: 1e-5\nd: yes\ne: ~\nf: '1e-5'\ng: 0x10\nh: 1.5e3\ni: =\nj: 010\n"
    assert read_yaml(write("f.yaml", text)).value == {
        **{"a": "2024-99-99", "b": "12:30:45", "c": 1e-5, "d": True, "e": None},
        **{"f": "1e-5", "g": 16, "h": 1500.0, "i": "=", "j": 8},
    }


def test_anchors_that_end_are_followed_and_merged(write):
    text = "base: &b {x: 1, y: 2}\nfirst: {<<: *b, y: 3}\nagain: *b\n"
    assert read_yaml(write("f.yaml", text)).value["first"] == {"x": 1, "y": 3}
    assert read_yaml(write("f.yaml", text)).value["again"] == {"x": 1, "y": 2}


def test_every_key_has_its_line(write):
    document = read_json(write("f.json", '{\n "a": {"b": [1,\n 2]},\n\t"c": "}{\\"",\n "d": 4}'))
    assert [document.at(k) for k in (("a",), ("a", "b", 1), ("c",), ("d",))] == [
        f"{document.source}:{line}" for line in (2, 3, 4, 5)
    ]
    assert document.at(("a", "b", 1, "deeper")) == f"{document.source}:3"


def test_data_may_hold_nan_but_no_key_twice():
    assert parse_json('{"x": 1}', "f:1", finite=False) == {"x": 1}
    assert parse_json('{"x": NaN}', "f:1", finite=False)["x"] != 0
    with pytest.raises(ConfigError, match="f:1: x is given twice"):
        parse_json('{"x": "a", "x": "b"}', "f:1", finite=False)


@dataclass(frozen=True)
class Inner:
    share: Share = 0.5
    parts: list[Count] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Outer:
    size: Count
    inner: Inner = dataclasses.field(default_factory=Inner)
    rate: Rate | None = None
    name: str = ""


def test_all_wrong_fields_come_at_once(write):
    text = "size: 0\nrate: 1.0\nnmae: x\ninner:\n  share: true\n  parts: [1, 0, a]\n"
    with pytest.raises(ConfigError) as caught:
        fields_from(Outer, read_yaml(write("f.yaml", text)))
    problems = [problem.partition("f.yaml:")[2] for problem in caught.value.problems]
    assert problems == [
        "3: nmae is unknown; did you mean name?; known: size, inner, rate, name",
        "1: size must be at least 1, got 0",
        "2: rate must be in [0, 1), got 1.0",
        "5: inner.share must be a number, got True",
        "6: inner.parts[1] must be at least 1, got 0",
        "6: inner.parts[2] must be a whole number, got 'a'",
    ]


def test_a_missing_field_is_told_and_a_base_fills_in():
    with pytest.raises(ConfigError, match="here: size missing"):
        fields_from(Outer, Document("here", {"name": "x"}))
    assert fields_from(Outer, Document("here", {"name": "x"}), Outer(size=3)) == Outer(size=3, name="x")


@pytest.mark.parametrize("hint", [int, float, Count, Positive, Rate, Share, Seed, Count | None, tuple[Count, ...]])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e400, -1, 2**70])
def test_no_kind_of_number_takes_what_is_none(hint, value):
    given = (1, value) if hint == tuple[Count, ...] else value
    allowed = {(int, -1), (float, -1), (float, 2**70), (Positive, 2**70)}
    assert (number_problem(given, hint) is None) == ((hint, value) in allowed)


@pytest.mark.parametrize(("value", "holds"), [(10**308, True), (10**400, False), (-(10**400), False)])
@pytest.mark.parametrize("hint", [float, Positive, float | None])
def test_an_integer_that_no_float_holds_is_no_value_of_a_float_field(value, hint, holds):
    assert (number_problem(value, hint) is None) == holds
    assert number_problem(10**400, Count) is not None
