# SPDX-License-Identifier: Apache-2.0
import math
from itertools import combinations

import pytest

from sporeloom.evaluation.judge import pass_at_k
from sporeloom.evaluation.programs import extract, generation_prompt, program, translation_prompt

PYTHON = {
    "prompt": "def f(x):\n",
    "declaration": "def f(x):\n",
    "canonical_solution": "    return x\n\n",
    "test": "f(1)",
}
CPP = {"prompt": "int f(int x){", "declaration": "int f(int x){", "test": "int main(){\n f(1);\n}\n"}


def test_a_translation_prompt_is_the_published_one():
    expected = "code translation\nPython:\ndef f(x):\n\n    return x\nC++:\nint f(int x){"
    assert translation_prompt(PYTHON, "python", CPP, "cpp") == expected


def test_a_rust_prompt_ends_with_the_declaration():
    problem = {"prompt": "/* doc */\n", "declaration": "\nfn f() -> i32{\n"}
    assert generation_prompt(problem, "rust") == "/* doc */\nfn f() -> i32{\n"


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("python", "    return 1\n\ndef g():\n    pass\n", "    return 1\n"),
        ("python", "    a\n# b\n    c\n# d", "    a\n# b\n    c"),  # a word cuts at its last place, as published
        ("python", "    return 1\nassert f\nprint(2)", "    return 1"),
        ("java", "return 1; }\npublic static void main(String[] a) {} }", "return 1; }\n}"),
        ("java", "return 1; }", "return 1; }\n}"),
        ("cpp", "return 1; } // and so on", "return 1; }"),
        ("js", "return 1", "return 1"),
        ("go", "return 1 }\n\n// next\nfunc main() {}", "return 1 }"),
        ("rust", "1 } fn", "1 }"),
    ],
)
def test_extraction_follows_the_published_rules(language, text, expected):
    assert extract(text, language) == expected


def test_a_python_program_ends_the_solution_at_a_line_without_indentation():
    source = program(PYTHON, "python", "    return 1\nfor x in y: pass\n    more")
    assert "for x in y" not in source
    assert source.index("import numpy as np") < source.index("def f(x):\n    return 1\nf(1)\nprint(")


def test_a_cpp_program_adds_the_headers_that_are_missing():
    source = program({**CPP, "prompt": "#include<vector>\nint f(int x){"}, "cpp", "return x;}")
    assert source.count("#include<vector>") == 1
    assert "#include<climits>" in source
    assert source.index("f(1);") < source.index("puts(") < source.rindex("}")


def test_a_go_program_imports_what_the_solution_uses():
    problem = {
        "prompt": 'import (\n "math"\n)\nfunc F() {',
        "import": 'import (\n "math"\n)',
        "test": "func TestF(t *testing.T) {}",
        "test_setup": 'package main\nimport "testing"',
    }
    source = program(problem, "go", "strings.ToUpper(a); rand.Int() }")
    assert '"strings"' in source
    assert '"math/rand"' in source
    assert '"math"\n' not in source


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * right + [False] * (n - right), k))
                share = sum(map(any, draws)) / len(draws)
                assert math.isclose(pass_at_k(n, right, k), share, abs_tol=1e-12)
