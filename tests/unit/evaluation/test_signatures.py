# SPDX-License-Identifier: Apache-2.0
"""What is read from the head of a function."""

import pytest

from sporeloom.evaluation.signatures import signature, split


@pytest.mark.parametrize(
    ("parameters", "parts"),
    [
        ("", ()),
        (" ", ()),
        ("int a", ("int a",)),
        ("int a,int b", ("int a", "int b")),
        ("map<string, vector<int>> a, pair<int,int> b", ("map<string, vector<int>> a", "pair<int,int> b")),
        ("x, y, z interface{}", ("x", "y", "z interface{}")),
        ("f: fn(i32, i32) -> i32, (a, b): (i32, i32)", ("f: fn(i32, i32) -> i32", "(a, b): (i32, i32)")),
        ("Map<String, List<Integer>> a, int... b", ("Map<String, List<Integer>> a", "int... b")),
        ("a []int, b map[string][2]int", ("a []int", "b map[string][2]int")),
    ],
)
def test_parameters_are_split_at_their_own_commas(parameters, parts):
    assert split(parameters) == parts


@pytest.mark.parametrize(
    ("language", "text", "name", "names"),
    [
        ("cpp", "int f(int x, std::vector<int> lst, const std::string& s, int n = 3){", "f", ["x", "lst", "s", "n"]),
        ("cpp", "int g(int a){ return a; }\nboost::any f(boost::any a,boost::any b){\n", "f", ["a", "b"]),
        ("java", "class Solution {\n    public int f(List<Integer> l, int[] a) throws Exception {", "f", ["l", "a"]),
        ("go", "func F(x, y int, m map[interface{}]interface{}) [2]interface{}{", "F", ["x", "y", "m"]),
        ("rust", "fn f<'a>(mut a: &'a dyn Any, b:Vec<(i32, i32)>) -> Option<i32> {", "f", ["a", "b"]),
    ],
)
def test_names_and_the_place_of_the_body(language, text, name, names):
    found = signature(text, language, name)
    assert found.names(language) == names
    assert text[: found.end].endswith("{") and text[found.end :].strip() == ""
    assert found.before + found.head == text[: found.end]
