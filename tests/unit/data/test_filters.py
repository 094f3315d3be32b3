# SPDX-License-Identifier: Apache-2.0
import json
from functools import partial

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.filters import FilterRules, make_filter, repeated_ngrams
from sporeloom.data.rewrite import rewrite
from sporeloom.data.sources import DocumentSource


@pytest.mark.parametrize(
    ("rule", "passes", "fails"),
    [
        ({"min_chars": 3}, "abc", "ab"),
        ({"max_chars": 3}, "abc", "abcd"),
        ({"min_letters": 0.5}, "ab 12", "a 123"),
        ({"scripts": ("han",)}, "\u4e2d\u6587 ab 1", "\u4e2d abc"),
        ({"scripts": ("latin", "han"), "min_script": 0.9}, "\u4e2d\u6587 ab", "\u4e2d\u6587 \u0434\u0430"),
        ({"scripts": ("kana",)}, "\u3072\u3089 \u30ab", "\u6f22\u5b57 \u30ab"),
        ({"max_repeated_lines": 0.4}, "a\n\nb\n\na", "a\na\n a \nb"),
        ({"max_repeated_ngrams": 0.3}, " ".join(map(str, range(40))), "one two three " * 20),
        (
            {"max_repeated_ngrams": 0.3},
            "\u5e8a\u524d\u660e\u6708\u5149\u7591\u662f\u5730\u4e0a\u971c\u4e3e\u5934",
            "\u54c8" * 40,
        ),
    ],
)
def test_each_rule_passes_and_fails(rule, passes, fails):
    rules = FilterRules(**rule)
    rules.check()
    assert rules.failed(passes) == []
    assert rules.failed(fails) == [next(iter(rule))]


def test_repeated_runs_of_words_are_counted():
    words = [f"w{i}" for i in range(20)]
    assert repeated_ngrams(" ".join(words)) == 0
    assert repeated_ngrams(" ".join(words + words)) == pytest.approx(11 / 31)  # 31 runs, 11 of them again


def test_a_users_own_classifier_scores(tmp_path, write):
    classifier = write("c.py", "def score(text):\n    return text.count('good') / 2\n")
    rules = FilterRules(classifier=classifier, min_score=0.5)
    rules.check()
    assert (rules.failed("good"), rules.failed("bad")) == ([], ["min_score"])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "no rule was given"),
        ({"scripts": ("hann",)}, "hann is unknown; did you mean han"),
        ({"min_chars": 5, "max_chars": 4}, "--max-chars 4 is below --min-chars 5"),
        ({"min_score": 0.5}, "--min-score needs --classifier"),
    ],
)
def test_each_mistake_is_named(rule, message):
    with pytest.raises(ConfigError, match=message):
        FilterRules(**rule).check()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "has no function score"),
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        (None, "no such file"),
    ],
)
def test_a_classifier_that_cannot_be_used_is_named(tmp_path, write, code, message):
    path = tmp_path / "none.py" if code is None else write("c.py", code)
    with pytest.raises(ConfigError, match=message):
        FilterRules(classifier=path, min_score=1).check()


def test_files_are_filtered_and_each_rule_counted(tmp_path, write):
    pytest.importorskip("zstandard")
    lines = [{"text": "ab"}, {"text": "12345", "id": 7}, {"text": "abcdef", "id": 8}, {"text": " "}]
    source = DocumentSource(
        (write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines) + "broken\n"),), on_error="skip"
    )
    make = partial(make_filter, source, FilterRules(min_chars=3, min_letters=0.5), True)
    report = rewrite(source, tmp_path / "out.jsonl.zst", make, 1, tmp_path / "removed.jsonl")
    kept = DocumentSource((tmp_path / "out.jsonl.zst",))
    assert [d.record for batch in kept.batches() for _, d in kept.parse(batch).documents] == [lines[2]]
    removed = [json.loads(line) for line in (tmp_path / "removed.jsonl").read_text().splitlines()]
    assert [(note["place"][-1], note["failed"]) for note in removed] == [("1", ["min_chars"]), ("2", ["min_letters"])]
    counts = {
        "documents": 3,
        "kept": 1,
        "removed": 2,
        "failed min_chars": 1,
        "failed min_letters": 1,
        "empty": 1,
        "broken": 1,
    }
    assert {name: report[name] for name in counts} == counts
    failing = write("c.py", "def score(text):\n    return 1 / 0\n")
    with pytest.raises(ConfigError, match=r"score\(text\) raised ZeroDivisionError"):
        rewrite(source, tmp_path / "no.jsonl", partial(make_filter, source, FilterRules(classifier=failing), False), 1)
    assert not (tmp_path / "no.jsonl").exists()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("float('nan')", r"score\(text\) returned NaN"),
        ("'NaN'", r"score\(text\) returned NaN"),
        ("10**400", r"score\(text\) returned no number"),
        ("None", r"score\(text\) returned no number"),
        ("'much'", r"score\(text\) returned no number"),
        ("1j", r"score\(text\) returned no number"),
    ],
)
def test_what_is_no_score_is_refused(write, returned, message):
    """NaN is not below any --min-score."""
    rules = FilterRules(classifier=write("c.py", f"def score(text):\n    return {returned}\n"), min_score=0.5)
    with pytest.raises(ConfigError, match=message):
        rules.failed("text")


@pytest.mark.parametrize(("score", "failed"), [("float('inf')", []), ("float('-inf')", ["min_score"]), ("True", [])])
def test_scores_without_end_are_numbers(write, score, failed):
    rules = FilterRules(classifier=write("c.py", f"def score(text):\n    return {score}\n"), min_score=0.5)
    assert rules.failed("text") == failed


@pytest.mark.parametrize("returned", [r"'a\ud800'", r"'\udfff'", "7", "b'a'", "[]"])
def test_what_is_no_text_is_refused(write, returned):
    rules = FilterRules(edit=write("e.py", f"def edit(text):\n    return {returned}\n"))
    with pytest.raises(ConfigError, match=r"edit\(text\) returned"):
        rules.edited("text")
