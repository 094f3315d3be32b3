# SPDX-License-Identifier: Apache-2.0
from mindloom.inference.stopping import Output, any_of, at_text, at_token, find_first, held_back


def output(text, tokens=(1,)):
    return Output(tokens, lambda: text)


def test_conditions_compose():
    condition = any_of(at_token([7]), at_text(["end"]))
    assert not condition(output("the", [7, 1]))
    assert condition(output("the", [1, 7]))
    assert condition(output("the end", [1]))


def test_the_text_is_decoded_only_when_a_condition_asks():
    def decode():
        raise AssertionError("nobody asked")

    assert at_token([7])(Output([7], decode))
    assert any_of(at_token([7]), at_text(["x"]))(Output([7], decode))


def test_the_first_of_several_texts_is_found():
    assert find_first("abcd", ["d", "bc"]) == 1
    assert find_first("abcd", ["x"]) is None
    assert find_first("abcd", []) is None


def test_what_may_become_a_stop_text_or_a_character_is_held_back():
    assert held_back("abc\n", ["\n\nclass"]) == 1
    assert held_back("abc", ["bcd", "cx"]) == 2
    assert held_back("ab\ufffd\ufffd", []) == 2
    assert held_back("abc", ["xyz"]) == 0
