# SPDX-License-Identifier: Apache-2.0
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
