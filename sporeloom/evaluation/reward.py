# SPDX-License-Identifier: Apache-2.0
"""Tests as a reward: a model of code learns from running its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sporeloom.align.rewards import Reward
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.evaluation.chat import BLOCK, answer_program
from sporeloom.evaluation.judge import judge_all
from sporeloom.evaluation.programs import NAMES, extract, program
from sporeloom.evaluation.sandbox import Limits, check_isolation
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain

PREFIX = "humaneval-x:"
SECONDS = 10.0
MEMORY_BYTES = 1 << 30


def program_reward(name: str) -> Reward:
    """1 for a completion with which the program passes its tests, 0 for others; `name` is humaneval-x:LANGUAGE, and the
    prompts' lines are HumanEval-X's problems. A completion continues where the prompt ends, or, with a code block in it, is
    an answer that has the function there. Programs run isolated.

    Raises:
        ConfigError: no such language, no compiler for it, or no isolation here.
    """
    language = name.removeprefix(PREFIX)
    if language not in NAMES:
        hint = did_you_mean(language, NAMES)
        raise ConfigError(f"--reward {name}: no such language; known: {', '.join(NAMES)}{hint}")
    check_isolation()
    try:
        toolchain = find_toolchain(language)
    except MissingToolchainError as error:
        raise ConfigError(f"--reward {name}: {error}") from None

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        if missing := [column for column in ("declaration", "test") if column not in columns]:
            raise ValueError(f"the lines have no {', '.join(missing)}: they must be problems of HumanEval-X")
        programs = []
        for place, text in enumerate(completions):
            problem = {"prompt": prompts[place], **{name: values[place] for name, values in columns.items()}}
            if BLOCK.search(text):
                programs.append(answer_program(problem, language, text))
            else:
                programs.append(program(problem, language, extract(text, language)))
        verdicts = dict(judge_all(programs, toolchain, Limits(memory_bytes=MEMORY_BYTES), SECONDS))
        return [float(verdicts[one].passed) for one in programs]

    return reward
