# SPDX-License-Identifier: Apache-2.0
import math
from itertools import combinations

import pytest
from conftest import SHARED

from sporeloom.evaluation.config import read_problems
from sporeloom.evaluation.judge import pass_at_k
from sporeloom.evaluation.programs import NAMES, extract, generation_prompt, program, translation_prompt

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
    source = program(PYTHON, "python", "    return 1\nfor x in y: pass\n    more").solution
    assert "for x in y" not in source
    assert source.index("import numpy as np") < source.index("def f(x):\n    return 1\n") < source.index(".serve(f=f)")


def test_a_cpp_program_adds_the_headers_that_are_missing():
    made = program({**CPP, "prompt": "#include<vector>\nint f(int x){"}, "cpp", "return x;}")
    assert made.solution.count("#include<vector>") == 1
    assert "#include<climits>" in made.solution
    assert made.tests.index("sporeloom_f(1);") < made.tests.rindex("finish();") < made.tests.rindex("}")


def test_a_go_program_imports_what_the_solution_uses():
    problem = {
        "declaration": "func F() {",
        "prompt": 'import (\n "math"\n)\nfunc F() {',
        "import": 'import (\n "math"\n)',
        "test": "func TestF(t *testing.T) { F() }",
        "test_setup": 'package main\nimport "testing"',
    }
    made = program(problem, "go", "strings.ToUpper(a); rand.Int() }")
    assert '"strings"' in made.solution
    assert '"math/rand"' in made.solution
    assert '    "math"\n' not in made.solution and '    "testing"\n' not in made.solution
    assert '    "testing"\n' in made.tests and '    "math"\n' not in made.tests


@pytest.mark.parametrize("language", NAMES)
def test_no_program_has_what_belongs_to_the_other(language):
    """Of all problems: the solution's has no line of the tests, the tests' no line of the solution."""
    if not (SHARED / "data" / "humaneval-x").is_dir():
        pytest.skip("no ../shared/data/humaneval-x")
    for task, problem in read_problems(SHARED / "data" / "humaneval-x", language).items():
        made = program(problem, language, "here stands the solution")
        assert "here stands" not in made.tests, task
        assertions = [line.strip() for line in problem["test"].splitlines() if "assert" in line and "==" in line]
        assert not any(line in made.solution for line in assertions), task


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * right + [False] * (n - right), k))
                share = sum(map(any, draws)) / len(draws)
                assert math.isclose(pass_at_k(n, right, k), share, abs_tol=1e-12)
