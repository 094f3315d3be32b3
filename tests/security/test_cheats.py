# SPDX-License-Identifier: Apache-2.0
"""No wrong solution of a problem passes, whatever it does to seem right; a right one that does odd things does."""

from pathlib import Path

import pytest
import yaml

from sporeloom.core.errors import ConfigError
from sporeloom.evaluation.chat import answer_program
from sporeloom.evaluation.judge import judge_all
from sporeloom.evaluation.programs import NAMES
from sporeloom.evaluation.reward import program_reward
from sporeloom.evaluation.sandbox import Limits, check_isolation
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain

try:
    check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

CHEATS = yaml.safe_load(Path(__file__).with_name("cheats.yaml").read_text(encoding="utf-8"))
NAN_CHEATS = yaml.safe_load(Path(__file__).with_name("nan_cheats.yaml").read_text(encoding="utf-8"))
"""Tests that fail if a difference is too large, which none to NaN is."""


def programs_of(language, cheats=CHEATS):
    """program -> what it does; the first is right"""
    case = cheats[language]
    problem = {**case["problem"], "prompt": case["problem"]["declaration"]}
    answers = {"right": case["right"], **case["wrong"]}
    return {answer_program(problem, language, f"```\n{text}```"): what for what, text in answers.items()}


def test_there_are_enough():
    assert set(CHEATS) == set(NAMES)
    assert sum(len(case["wrong"]) for case in CHEATS.values()) >= 110
    assert set(NAN_CHEATS) == set(NAMES)


@pytest.mark.parametrize("language", CHEATS)
def test_a_cheat_has_nothing_of_the_tests_within_reach(language):
    """Neither the tests nor what they print at their end is in the solution's program."""
    for program in programs_of(language):
        assert "12" in program.tests and "5" in program.tests
        test_lines = [line.strip() for line in CHEATS[language]["problem"]["test"].splitlines() if "12" in line]
        assert test_lines and not any(line in program.solution for line in test_lines)


@pytest.mark.slow
@pytest.mark.parametrize("cheats", [CHEATS, NAN_CHEATS], ids=["all tests", "tests of differences"])
@pytest.mark.parametrize("language", CHEATS)
def test_cheats_fail(language, cheats):
    try:
        toolchain = find_toolchain(language)
    except MissingToolchainError as error:
        pytest.skip(f"{language}: {error}")
    programs = programs_of(language, cheats)
    verdicts = {programs[p]: v for p, v in judge_all(list(programs), toolchain, Limits(), 5.0)}
    right = verdicts.pop("right")
    assert right.passed, right
    assert len(verdicts) == len(cheats[language]["wrong"])
    assert not {what: verdict for what, verdict in verdicts.items() if verdict.passed}


def test_a_cheat_is_no_reward():
    """What GRPO learns from is the same verdict."""
    case = CHEATS["python"]
    wrong = [case["wrong"][what] for what in ("is equal to everything", "prints marks and exits", "raises SystemExit")]
    texts = [f"```python\n{text}```" for text in (case["right"], *wrong)]
    columns = {name: [case["problem"][name]] * len(texts) for name in ("declaration", "test")}
    reward = program_reward("humaneval-x:python")
    assert reward([case["problem"]["declaration"]] * len(texts), texts, **columns) == [1.0, 0.0, 0.0, 0.0]
