# SPDX-License-Identifier: Apache-2.0
import random
import time

import pytest

from sporeloom.inference.stopping import at_closed_brace, at_dedent, at_text, first_of, held_back


def test_the_first_of_several_texts_ends_it():
    assert at_text(["d", "bc"])("abcd") == 1
    assert at_text(["x"])("abcd") is None


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("    return 1\n\nprint(2)", 14),
        ("    return 1\n\n    # more\n", None),
        ("\treturn 1\ndef", 10),
        ("x = 1", 0),
        ("", None),
        ("\n\n", None),
    ],
)
def test_a_python_function_ends_before_the_first_line_without_indentation(text, end):
    assert at_dedent()(text) == end


@pytest.mark.parametrize(
    ("text", "end"), [("  return 1;\n}\nint", 13), ("  if (x) { y(); }\n", None), (" { } }", 6), ("", None), ("}}", 1)]
)
def test_a_block_ends_with_the_brace_that_closes_the_prompts(text, end):
    assert at_closed_brace()(text) == end


def test_rules_compose_to_the_earliest_end():
    assert first_of(at_text(["b"]), at_text(["a"]))("xab") == 1
    assert first_of(at_text(["b"]), at_dedent())("    c") is None


def test_what_may_become_a_stop_text_or_a_character_is_held_back():
    assert held_back("abc\n", ["\n\nclass"]) == 1
    assert held_back("abc", ["bcd", "cx"]) == 2
    assert held_back("ab\ufffd\ufffd", []) == 2
    assert held_back("abc", ["xyz"]) == 0


@pytest.mark.parametrize(
    ("text", "wanted", "held"),
    [
        ("", ["abc"], 0),
        ("xa", ["abc"], 1),
        ("xab", ["abc"], 2),
        ("xabc", ["abc"], 0),  # it is whole, and found before
        ("aab", ["aabx"], 3),
        ("aaab", ["aabx"], 3),
        ("ab", ["abab", "bcd"], 2),
        ("xyz", ["x"], 0),
        ("ab\ufffd\ufffd", ["b"], 2),
        ("x" * 50_000, ["x" * 1_000_000], 50_000),  # in a moment
        ("y" * 50_000, ["x" * 1_000_000] * 16, 0),
        ("x" * 50_000 + "y", ["x" * 1_000_000], 0),  # each place begins like it
        ("xy" * 25_000 + "z", ["xy" * 100_000], 0),
        ("x" * 20_000 + "y" + "x" * 10_000, ["x" * 20_000 + "y" + "x" * 20_000], 30_001),
        ("x" * 20_000 + "z" + "x" * 10_000, ["x" * 20_000 + "y" + "x" * 20_000], 10_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_as_much_is_held_back_as_may_be_the_beginning_of_a_stop_text(text, wanted, held):
    begin = time.process_time()
    assert held_back(text, wanted) == held
    assert time.process_time() - begin < 0.5


def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_text():
    draw = random.Random(5)
    for _ in range(3000):
        text, wanted = ("".join(draw.choices("ab", k=draw.randint(low, 12))) for low in (0, 1))
        ends = [
            size for size in range(min(len(text), len(wanted) - 1) + 1) if wanted.startswith(text[len(text) - size :])
        ]
        assert held_back(text, [wanted]) == max(ends), (text, wanted)
