# SPDX-License-Identifier: Apache-2.0
"""HumanEval-X as published: prompts, what is taken from a generated text, and the program that tests it.

Source: THUDM/CodeGeeX, codegeex/benchmark/utils.py and humaneval-x/evaluate_humaneval_x.py. Rust has no published rules;
its prompt is the description and the declaration, the rest follows C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Problem = Mapping[str, Any]

NAMES = {"python": "Python", "cpp": "C++", "java": "Java", "js": "JavaScript", "go": "Go", "rust": "Rust"}
"""Each language's name in the data's files and in a translation prompt."""

ALL_TESTS_RAN = "sporeloom: all tests ran"
"""Printed behind the last test: a solution that ends the process early has not passed."""

_PYTHON_ENDS = ("\ndef", "\nclass", "\nif", "\n#", "\nprint", "\nassert")
_PYTHON_IMPORTS = """import math
import re
import sys
import copy
import datetime
import itertools
import collections
import heapq
import statistics
import functools
import hashlib
import numpy
import numpy as np
import string
from typing import *
from collections import *
"""
_CPP_HEADERS = ("stdlib.h", "algorithm", "math.h", "stdio.h", "vector", "string", "climits", "cstring", "iostream")
_GO_PACKAGES = ("math", "strings", "fmt", "strconv", "time", "bytes", "regexp", "sort", "math/rand", "crypto/md5")
_JS_ASSERT = (
    "console.assert = (right, ...why) => { if (!right) throw new Error(why.join(' ') || 'assertion failed') };\n"
)


def generation_prompt(problem: Problem, language: str) -> str:
    """What the model continues, without the line that names its language."""
    prompt: str = problem["prompt"]
    return prompt + problem["declaration"].lstrip("\n") if language == "rust" else prompt


def translation_prompt(source: Problem, source_language: str, target: Problem, target_language: str) -> str:
    """The whole solution in one language and the declaration in the other."""
    solution = f"{source['declaration']}\n{source['canonical_solution'].rstrip()}"
    head = f"code translation\n{NAMES[source_language]}:\n{solution}\n{NAMES[target_language]}:\n"
    return head + str(target["declaration"])


def extract(text: str, language: str) -> str:
    """The function's body in a generated text, by the published rules."""
    if language == "python":
        for end in _PYTHON_ENDS:
            text = text[: text.rfind(end)] if end in text else text
        return text
    if language == "java" and "public static void main" in text:
        text = text[: text.find("public static void main")] + "}"
    if language == "go":
        for end in ("\n//", "\nfunc main("):
            text = text[: text.rfind(end)] if end in text else text
    if "}" in text:
        text = text[: text.rfind("}") + 1]
    if language == "java" and text.count("{") + 1 == text.count("}"):
        text += "\n}"
    return text


def program(problem: Problem, language: str, solution: str, is_translation: bool = False) -> str:
    """Source text that fails unless `solution`, which continues the problem's declaration, passes its tests."""
    head: str = problem["declaration"] if is_translation or language == "rust" else problem["prompt"]
    if language == "python":  # which ends where a line is not indented
        lines = solution.split("\n")
        ended = next((i for i, line in enumerate(lines) if line.strip() and line[0] not in " \t"), len(lines))
        solution = "\n".join(lines[:ended])
    return solution_program(problem, language, head, solution)


def solution_program(problem: Problem, language: str, head: str, solution: str) -> str:
    """`program` with what comes before the solution, which is taken as it is."""
    return _PROGRAMS[language](problem, head, solution)


def _python(problem: Problem, head: str, solution: str) -> str:
    return f"{_PYTHON_IMPORTS}{head}{solution}\n{problem['test']}\nprint({ALL_TESTS_RAN!r})\n"


def _cpp(problem: Problem, head: str, solution: str) -> str:
    headers = "".join(f"#include<{name}>\n" for name in _CPP_HEADERS if f"#include<{name}>" not in head)
    test = _before_closing_brace(problem["test"], 1, f'puts("{ALL_TESTS_RAN}");')
    return f"{headers}\n{head}{solution}\n{test}"


def _java(problem: Problem, head: str, solution: str) -> str:
    test = _before_closing_brace(problem["test"], 2, f'System.out.println("{ALL_TESTS_RAN}");')
    return f"{head}{solution}\n{test}"


def _js(problem: Problem, head: str, solution: str) -> str:
    # Node prints a failed console.assert and goes on; the published harness calls any output a failure instead.
    return f"{_JS_ASSERT}{head}{solution}\n{problem['test']}\nconsole.log({ALL_TESTS_RAN!r})\n"


def _go(problem: Problem, head: str, solution: str) -> str:
    setup, head = problem["test_setup"], head.replace(problem["import"], "")
    used = [name for name in _GO_PACKAGES if name not in setup and name.split("/")[-1] + "." in solution]
    imports = "import (\n" + "".join(f'    "{name}"\n' for name in used) + ")" if used else ""
    return f"{setup}\n{imports}\n{head}{solution}\n{problem['test']}"


def _rust(problem: Problem, head: str, solution: str) -> str:
    return f"fn main() {{}}\n{head}{solution}\n{problem['test']}"


_PROGRAMS = {"python": _python, "cpp": _cpp, "java": _java, "js": _js, "go": _go, "rust": _rust}


def _before_closing_brace(text: str, count: int, line: str) -> str:
    """`line` put before the brace that is number `count` from the end."""
    place = len(text)
    for _ in range(count):
        place = text.rfind("}", 0, place)
    return f"{text[:place]}\n{line}\n{text[place:]}"
