# SPDX-License-Identifier: Apache-2.0
"""Rules of published corpora: each with a text that passes and one that does not, shares against counting by hand."""

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.data.filters import FilterRules, make_filter
from sporeloom.data.quality import RULES, SETS, TextStatistics, duplicate_ngrams, repeated, top_ngram
from sporeloom.data.rewrite import rewrite
from sporeloom.data.sources import DocumentSource

PROSE = (
    "The town lies between the river and the hills. Most of its people work in the mill, which grinds the grain that "
    "farmers bring with carts in autumn. On market days you can buy apples, cheese and honey, and you have to be early "
    "to get any. Old men sit on the bench of stone and talk about what the weather will do tomorrow. Nobody listens to "
    "them, but everybody would miss them."
)
VARIED = " ".join(f"{first}{second}" for first in ("ba", "ke", "li", "mo", "nu") for second in ("ra", "se", "ti", "vo"))
FAILING = {
    "gopher_words": "Only four words of that.",
    "gopher_word_length": "a b c d " * 20,
    "gopher_symbols": PROSE + " #" * 20,
    "gopher_bullets": "\n".join(f"- {line}" for line in PROSE.split(". ")),
    "gopher_ellipses": "\n".join(f"{line}..." for line in PROSE.split(". ")),
    "gopher_alphabetic": PROSE + " 12345" * 40,
    "gopher_stop_words": VARIED + " " + VARIED,
    "gopher_lines": "\n".join(["a line", "another line", "a line", "a line"]),
    "gopher_paragraphs": "\n\n".join(["one part", "another part", "one part", "one part"]),
    "gopher_line_chars": "\n".join(["a", "b", "c", "d", "e", "f", "the same long line", "the same long line"]),
    "gopher_paragraph_chars": "\n\n".join(["a", "b", "c", "d", "e", "f", "the same long part", "the same long part"]),
    "gopher_top_2_gram": "very good " * 4 + VARIED,
    "gopher_top_3_gram": "so very good " * 4 + VARIED,
    "gopher_top_4_gram": "so very very good " * 4 + VARIED,
    **{f"gopher_{n}_grams": f"{VARIED} {VARIED}" for n in range(5, 11)},
    "mt_nlg_512": PROSE[:511],
    "mt_nlg_256_javascript": "Please enable JavaScript.",
    "mt_nlg_512_non_english": "Der Hund läuft über die Wiese und bellt die Katze an.",
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_passes_and_fails(name):
    pytest.importorskip("py3langid")
    assert RULES[name](TextStatistics(PROSE + " " + PROSE[::-1]))
    assert not RULES[name](TextStatistics(FAILING[name]))
    rules = FilterRules(rules=(name,))
    rules.check()
    assert (rules.failed(PROSE * 2 if name == "mt_nlg_512" else PROSE), rules.failed(FAILING[name])) == ([], [name])


def test_shares_of_lines_are_of_those_that_were_there_before():
    assert repeated(["aa", "b", "aa", "aa"]) == 0.5
    assert repeated(["aa", "b", "aa", "aa"], by_chars=True) == pytest.approx(4 / 7)
    assert repeated([]) == 0


@pytest.mark.parametrize("n", [2, 5])
def test_shares_of_runs_are_those_that_counting_gives(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        words = [f"w{'x' * i}" for i in rng.integers(0, 4, 60)]
        runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        total, counts, seen, covered = sum(map(len, words)), Counter(runs), set(), set()
        for i, run in enumerate(runs):
            covered |= set(range(i, i + n)) if run in seen else set()
            seen.add(run)
        measured = TextStatistics(" ".join(words))
        assert duplicate_ngrams(measured, n) == pytest.approx(sum(len(words[i]) for i in covered) / total)
        most = max(counts.values())
        possible = {min(1.0, most * len("".join(run)) / total) for run, count in counts.items() if count == most > 1}
        assert any(top_ngram(measured, n) == pytest.approx(share) for share in possible or {0.0})


def test_a_chinese_character_is_a_word_where_runs_are_counted():
    assert duplicate_ngrams(TextStatistics("床前明月光，床前明月光。"), 5) == 0.5


def test_short_and_empty_texts_are_measured():
    for text in ("", "one", "..."):
        assert all(
            isinstance(RULES[name](TextStatistics(text)), bool | np.bool_) for name in (*SETS["gopher-repetition"],)
        )


def test_rules_count_what_they_removed_and_the_users_edit_comes_first(tmp_path, write):
    mask = r"return None if 'secret' in text else re.sub(r'\S+@\S+', '<mail>', text)"
    edit = write("edit.py", f"import re\ndef edit(text):\n    {mask}\n")
    source = DocumentSource(
        (write("a.txt", f"{PROSE}\n\nwrite to ann@example.org. {PROSE}\n\nsecret {PROSE}\n\nshort"),)
    )
    rules, out, samples = FilterRules(rules=("gopher",), edit=edit), tmp_path / "o.jsonl", tmp_path / "samples.txt"
    rules.check()
    report = rewrite(source, out, partial(make_filter, source, rules, False, 5), 0, samples=samples)
    counted = {name: count for name, count in report.items() if name != "first_problems" and count}
    assert counted == {
        **{"documents": 4, "kept": 2, "removed": 2, "edited": 1, "failed edit": 1},
        **{"failed gopher_words": 1, "failed gopher_stop_words": 1},
    }
    assert "ann@" not in out.read_text()
    assert "<mail> The town" in out.read_text()
    told = samples.read_text()
    assert [line for line in told.splitlines() if line.startswith("===")] == [
        f"=== failed {name}: 1 documents, of them 1" for name in ("edit", "gopher_stop_words", "gopher_words")
    ]


def test_samples_do_not_depend_on_the_number_of_processes(tmp_path, write):
    source = DocumentSource(
        (write("a.jsonl", "".join(f'{{"text": "number {i} {"x" * 900}"}}\n' for i in range(5000))),)
    )
    rules = FilterRules(min_chars=10_000)
    for workers in (0, 2):
        work = partial(make_filter, source, rules, False, 10)
        rewrite(source, tmp_path / f"{workers}.jsonl", work, workers, samples=tmp_path / f"{workers}.txt")
    told = (tmp_path / "0.txt").read_text()
    assert told == (tmp_path / "2.txt").read_text()
    assert told.startswith("=== failed min_chars: 5,000 documents, of them 10\n")
    assert told.count("\n--- ") == 10


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rules": ("gofer",)}, "--rules gofer is unknown; did you mean gopher"),
        ({"edit": Path("nowhere.py")}, "--edit nowhere.py: there is no such file"),
        ({"languages": ("xx",)}, "--languages xx is unknown"),
    ],
)
def test_mistakes_are_told(given, told):
    pytest.importorskip("py3langid")
    with pytest.raises(ConfigError, match=told):
        FilterRules(**given).check()


@pytest.mark.parametrize(
    ("body", "told"), [("return 5", "returned a int, not a text"), ("raise KeyError(1)", "KeyError")]
)
def test_what_the_users_edit_does_wrong_is_told(write, body, told):
    path = write("edit.py", f"def edit(text):\n    {body}\n")
    with pytest.raises(ConfigError, match=told):
        FilterRules(edit=path).edited("text")
