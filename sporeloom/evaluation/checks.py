# SPDX-License-Identifier: Apache-2.0
"""The two programs of a check: the tests, which call the solution through a pipe, and the solution, which answers.

The tests are the published ones. In the place of the solution they have a function of the same signature that asks the
other process (`rpc`); helpers come from the problem, not from the solution. Behind the last test stands `finish()`, which
prints what only this process knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.evaluation import rpc
from sporeloom.evaluation.signatures import before_definition, defined, matching, signature

Problem = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """A solution and the tests of its problem, each the source of a program."""

    solution: str
    tests: str


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
import string
from typing import *
from collections import *
"""
_NUMPY = "import numpy\nimport numpy as np\n"
_CPP_HEADERS = ("stdlib.h", "algorithm", "math.h", "stdio.h", "vector", "string", "climits", "cstring", "iostream")
_GO_PACKAGES = ("math", "strings", "fmt", "strconv", "time", "bytes", "regexp", "sort", "math/rand", "crypto/md5")
_GO_RPC_PACKAGES = ("fmt", "math", "os", "reflect", "strconv", "strings", "testing")
_JS_ASSERT = (
    "console.assert = (right, ...why) => { if (!right) throw new Error(why.join(' ') || 'assertion failed') };\n"
)
_RUST_TYPES = re.compile(
    r"(?:\b(?:a|bool|char|str|static|[iu](?:8|16|32|64|128|size)|f32|f64|String|Vec|Option|Result|Box|HashMap|HashSet|BTreeMap"
    r"|BTreeSet|VecDeque|dyn|Any|std|string|vec|collections)\b|\W|\d)*"
)
"""A type of the standard library that can be passed on."""
_RUST_TEST = re.compile(r"#\[test\]((?:\s|//[^\n]*\n|#\[[^\]]*\])*)(?:pub\s+)?fn\s+(\w+)")


def check(problem: Problem, language: str, head: str, solution: str) -> Program:
    """Both programs for a solution that continues `head`."""
    return _CHECKS[language](problem, head, solution)


def called(problem: Problem, language: str) -> tuple[str, list[str]]:
    """(text that defines them, names) of the functions whose answers are tested."""
    declaration: str = problem["declaration"]
    entry = defined(declaration, language)[-1]
    canonical = problem.get("canonical_solution", "")
    others = [name for name in defined(canonical, language) if _calls(problem["test"], name)]
    if _calls(problem["test"], entry) or not others or language != "rust":
        return declaration, [entry]
    return canonical, others  # Rust/10 declares the helper


def _calls(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\s*\(", text) is not None


def _without_block_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def _before_closing_brace(text: str, count: int, line: str) -> str:
    """Insert `line` before the brace that is number `count` from the end."""
    place = len(text)
    for _ in range(count):
        place = text.rfind("}", 0, place)
    return f"{text[:place]}\n{line}\n{text[place:]}"


def _python(problem: Problem, head: str, solution: str) -> Program:
    text, (name,) = called(problem, "python")
    answers = (
        f"{_NUMPY}{_PYTHON_IMPORTS}{head}{solution}\n\n{rpc.source('python')}\n\nSporeloomRpc().serve({name}={name})\n"
    )
    used = _NUMPY if re.search(r"\b(?:np|numpy)\b", text + problem["test"]) else ""  # it takes long to load
    tests = (
        f"{used}{_PYTHON_IMPORTS}\n{rpc.source('python')}\n\nsporeloom = SporeloomRpc()\n"
        f"{before_definition(text, 'python', name)}\n{name} = sporeloom.function({name!r})\n"
        f"{problem['test']}\nsporeloom.finish()\n"
    )
    return Program(answers, tests)


def _js(problem: Problem, head: str, solution: str) -> Program:
    text, (name,) = called(problem, "js")
    answers = f"{head}{solution}\n{rpc.source('js')}\nsporeloomRpc.serve({{ {name} }})\n"
    # Node prints a failed console.assert and continues; the published harness counts any output as a failure instead.
    tests = (
        f"{rpc.source('js')}\n{_JS_ASSERT}{before_definition(text, 'js', name)}\n"
        f"const {name} = sporeloomRpc.function({name!r})\n{problem['test']}\nsporeloomRpc.finish()\n"
    )
    return Program(answers, tests)


def _cpp(problem: Problem, head: str, solution: str) -> Program:
    text, (name,) = called(problem, "cpp")
    declared = signature(text, "cpp", name)
    names = declared.names("cpp")
    types = [re.sub(rf"\b{n}\b[^\w]*(?:=.*)?$", "", p) for n, p in zip(names, declared.parameters, strict=True)]
    values = "".join(f" auto a{i} = sporeloom_rpc::take<{kind}>(from);" for i, kind in enumerate(types))
    arguments = ", ".join(f"a{i}" for i in range(len(types)))
    first = ("#include<boost/any.hpp>\n" if "boost/any.hpp" in text else "") + rpc.source("cpp")
    answers = (
        f"{first}\n{_headers(head)}\n{head}{solution}\n"
        "static void sporeloom_answer(const std::string&, sporeloom_rpc::Reader& from, std::string& to) {"
        f"{values} sporeloom_rpc::put(to, {name}({arguments})); }}\n"
        "int main() { return sporeloom_rpc::serve(sporeloom_answer); }\n"
    )
    # Under a name of its own: `strlen("a")` is a call of the library's, which fits better.
    result, own = declared.head[: declared.head.index("(")].rpartition(name)[0].strip(), f"sporeloom_{name}"
    test = re.sub(rf"\b{name}(?=\s*\()", own, problem["test"])
    values = "".join(f", {n}" for n in names)
    tests = (
        f"{first}\n{_headers(text)}\n{declared.before}"
        f'{result} {own}({", ".join(declared.parameters)}) {{ return sporeloom_rpc::call<{result}>("{name}"{values}); }}\n'
        + _before_closing_brace(test, 1, "sporeloom_rpc::finish();")
    )
    return Program(answers, tests)


def _headers(head: str) -> str:
    return "".join(f"#include<{name}>\n" for name in _CPP_HEADERS if f"#include<{name}>" not in head)


def _java(problem: Problem, head: str, solution: str) -> Program:
    text, (name,) = called(problem, "java")
    declared = signature(text, "java", name)
    answers = (
        f"{head}{solution}\npublic class Main {{\n    public static void main(String[] arguments) throws Exception {{\n"
        f"        SporeloomRpc.serve(Solution.class);\n    }}\n}}\n{rpc.source('java')}"
    )
    result = re.sub(r"^\s*(?:(?:public|private|protected|static|final)\s+)*", "", declared.head.partition(name)[0])
    values = ", ".join(declared.names("java"))
    tests = (
        f"{declared.before}{declared.head}\n"
        f'        return SporeloomRpc.call("{name}", "{result.strip()}", new Object[] {{ {values} }});\n    }}\n}}\n'
        + _before_closing_brace(problem["test"], 2, "SporeloomRpc.finish();")
        + f"\n{rpc.source('java')}"
    )
    return Program(answers, tests)


def _go(problem: Problem, head: str, solution: str) -> Program:
    setup: str = problem["test_setup"]
    text, (name,) = called(problem, "go")
    if any(_calls(problem["test"], other) for other in defined(problem.get("prompt", ""), "go") if other != name):
        text = problem["prompt"]  # which has a helper that the declaration lacks
    given = [*re.findall(r'"([^"\n]+)"', problem["import"] + setup), *_GO_PACKAGES]
    body = f"{head.replace(problem['import'], '')}{solution}\n"
    answers = (
        f"package main\n\n{_go_imports(given, body)}\n{body}\n{rpc.source('go')}\n"
        f'func TestMain(_ *sporeloomTesting.M) {{ sporeloomServe(map[string]interface{{}}{{"{name}": {name}}}) }}\n'
    )
    declared = signature(text, "go", name)
    opening = declared.head.index("(", declared.head.index(name))
    closing = matching(declared.head, opening)
    result = declared.head[closing + 1 :].strip()[:-1].strip()
    values = "".join(f", {n}" for n in declared.names("go"))
    checks = (
        f"{declared.before.replace(problem['import'], '')}{declared.head[: closing + 1]} (sporeloomResult {result}) {{\n"
        f'\tsporeloomCall("{name}", &sporeloomResult{values})\n\treturn\n}}\n\n{problem["test"]}\n'
    )
    tests = (
        f"package main\n\n{_go_imports(given, checks)}\n{checks}\n{rpc.source('go')}\n"
        "func TestMain(m *sporeloomTesting.M) {\n\tcode := m.Run()\n\tif code == 0 {\n\t\tsporeloomFinish()\n\t}\n"
        "\tsporeloomOs.Exit(code)\n}\n"
    )
    return Program(answers, tests)


def _go_imports(given: Sequence[str], text: str) -> str:
    """Imports of the packages that are used, and those of the calls under names of their own."""
    code = re.sub(r"//[^\n]*", "", _without_block_comments(text))
    lines = [f'    "{name}"' for name in dict.fromkeys(given) if re.search(rf"\b{name.split('/')[-1]}\.", code)]
    lines += [f'    sporeloom{name.title()} "{name}"' for name in _GO_RPC_PACKAGES]
    return "import (\n" + "\n".join(lines) + "\n)"


def _rust(problem: Problem, head: str, solution: str) -> Program:
    text, names = called(problem, "rust")
    declared = [signature(text, "rust", name) for name in names]
    whole = problem["declaration"] + problem.get("canonical_solution", "")
    test = _without_block_comments(problem["test"])
    arms, stubs = "", ""
    for one in declared:
        shown = not _RUST_TYPES.fullmatch(one.head.partition("->")[2])
        call = f"{one.name}({', '.join(['from.take()'] * len(one.parameters))})"
        value = f'&::std::format!("{{:?}}", {call})' if shown else f"&{call}"
        arms += f'        "{one.name}" => sporeloom_rpc::put({value}, to),\n'
        values = "".join(f".with(&{name})" for name in one.names("rust"))
        result = re.sub(r"->(.*)\{", r"-> sporeloom_rpc::Shown<\1> {", one.head, flags=re.DOTALL) if shown else one.head
        stubs += f'{result}\n    sporeloom_rpc::Call::new("{one.name}"){values}.send()\n}}\n'
    answers = (
        f"{rpc.source('rust')}\n{head}{solution}\n"
        "fn sporeloom_answer(name: &str, from: &mut sporeloom_rpc::Input, to: &mut ::std::vec::Vec<u8>) {\n"
        f"    match name {{\n{arms}        _ => ::std::process::exit(1),\n    }}\n}}\n"
        "fn main() {\n    sporeloom_rpc::serve(sporeloom_answer)\n}\n"
    )
    before = declared[0].before if text is problem["declaration"] else whole[: whole.index("fn ")]
    tests = f"{rpc.source('rust')}\n{before}{stubs}{_rust_helpers(whole, names, test)}\n{_rust_main(test)}"
    return Program(answers, tests)


def _rust_helpers(whole: str, names: Sequence[str], test: str) -> str:
    """The parts of the canonical solution that the tests use besides the solution's own functions."""
    end = matching(whole, signature(whole, "rust", names[0]).end - 1) + 1
    rest = whole[end:]
    mentioned = re.findall(r"\b(?:fn|struct|enum|const|type)\s+(\w+)", rest)
    return rest if any(name not in names and re.search(rf"\b{name}\b", test) for name in mentioned) else ""


def _rust_main(test: str) -> str:
    """The tests, and a program that runs them one after the other: no test framework."""
    calls = ""
    for found in _RUST_TEST.finditer(test):
        modules = re.findall(r"\bmod\s+(\w+)\s*\{", test[: found.start()])
        calls += f"    {'::'.join([*modules[-1:], found[2]])}();\n"
    test = _RUST_TEST.sub(r"\1pub fn \2", test).replace("#[cfg(test)]", "")
    return f"{test}\nfn main() {{\n{calls}    sporeloom_rpc::finish();\n}}\n"


_CHECKS: dict[str, Callable[[Problem, str, str], Program]] = {
    "python": _python,
    "cpp": _cpp,
    "java": _java,
    "js": _js,
    "go": _go,
    "rust": _rust,
}
