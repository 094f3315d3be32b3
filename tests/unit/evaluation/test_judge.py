# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own solutions pass, and wrong ones do not, in every language that is installed."""

import pytest
from conftest import shared

from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.config import read_problems
from sporeloom.evaluation.judge import judge, judge_all
from sporeloom.evaluation.programs import NAMES, program
from sporeloom.evaluation.sandbox import Limits, check_isolation
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain

try:
    check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

# The data's own mistakes: two solutions contradict their tests, one depends on the order of a map, and one needs a
# release of the crate `rand` that Debian does not have.
WRONG_SOLUTIONS = {"js": {"JavaScript/112", "JavaScript/155"}}
UNCERTAIN_SOLUTIONS = {"go": {"Go/95"}, "rust": {"Rust/50"}}

# How a process ends early with success, where a test framework does not notice by itself.
LEAVES_EARLY = {
    "python": "    import os; os._exit(0)\n",
    "cpp": "exit(0); }",
    "java": "System.exit(0); return false; } }",
    "js": "process.exit(0) }",
    "go": "return false }",
    "rust": "std::process::exit(0) }",
}
LOOPS = {
    "python": "    while True: pass\n",
    "cpp": "volatile int i = 0; while (1) i++; }",
    "java": "while (numbers.size() >= 0) {} return false; } }",
    "js": "while (true) {} }",
    "go": "for {} }",
    "rust": "loop {} }",
}


@pytest.fixture(scope="module", params=NAMES)
def installed(request):
    """(language, its problems, its toolchain)"""
    try:
        toolchain = find_toolchain(request.param)
    except MissingToolchainError as error:
        pytest.skip(f"{request.param}: {error}")
    return request.param, read_problems(shared("data/humaneval-x"), request.param), toolchain


def test_the_canonical_solutions_pass(installed):
    """Of every 32nd problem, and of those with mistakes; benchmarks/humaneval_x.py runs all 164 in each language."""
    language, problems, toolchain = installed
    assert len(problems) == 164
    known = WRONG_SOLUTIONS.get(language, set()) | UNCERTAIN_SOLUTIONS.get(language, set())
    chosen = {task: p for i, (task, p) in enumerate(problems.items()) if i % 32 == 0 or task in known}
    programs = {program(p, language, p["canonical_solution"]): task for task, p in chosen.items()}
    assert len(programs) >= 6
    verdicts = {programs[p]: verdict for p, verdict in judge_all(list(programs), toolchain, Limits(), 20.0)}
    failed = {task: verdict for task, verdict in verdicts.items() if not verdict.passed}
    for task in UNCERTAIN_SOLUTIONS.get(language, ()):
        failed.pop(task, None)
    assert set(failed) == WRONG_SOLUTIONS.get(language, set()), failed


def test_a_right_solution_of_the_javascript_problem_whose_own_is_wrong_passes():
    try:
        toolchain = find_toolchain("js")
    except MissingToolchainError as error:
        pytest.skip(str(error))
    problem = read_problems(shared("data/humaneval-x"), "js")["JavaScript/155"]
    right = problem["canonical_solution"].replace("while (num > 0) {", "if (num == 0) { e++ }\n  while (num > 0) {")
    assert judge(program(problem, "js", right), toolchain, Limits(), 20.0).passed


def test_wrong_solutions_do_not_pass(installed):
    language, problems, toolchain = installed
    first = next(iter(problems.values()))
    solution = first["canonical_solution"]
    broken = {
        "says the opposite": solution.replace("<", ">").replace("True", "False"),
        "is cut off": solution[: len(solution) // 2],
        "is empty": "",
        "leaves early": LEAVES_EARLY[language],
    }
    for what, text in broken.items():
        verdict = judge(program(first, language, text), toolchain, Limits(), 20.0)
        assert not verdict.passed, what
    verdict = judge(program(first, language, LOOPS[language]), toolchain, Limits(), 2.0)
    assert verdict.status == "time", verdict
