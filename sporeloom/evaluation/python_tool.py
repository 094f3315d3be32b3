# SPDX-License-Identifier: Apache-2.0
"""A tool that runs Python programs of a model, each isolated in a sandbox of its own."""

from __future__ import annotations

from sporeloom.align.tools import PYTHON, PYTHON_FUNCTION, Tool, ToolError, text_argument
from sporeloom.core.errors import ConfigError
from sporeloom.evaluation import sandbox
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain

LIMITS = sandbox.Limits()


def python_tool() -> Tool:
    """The tool `python`.

    Raises:
        ConfigError: programs cannot be isolated here.
    """
    sandbox.check_isolation()
    try:
        toolchain = find_toolchain("python")
    except MissingToolchainError as error:
        raise ConfigError(f"--tools {PYTHON}: {error}") from None

    def call(arguments: str, seconds: float) -> str:
        steps = [sandbox.Step(toolchain.execute, seconds)]
        (result,), _ = sandbox.run_job(toolchain.job(text_argument(arguments, "code"), steps, LIMITS))
        if result.ok:
            return result.output
        why = f"the limit of {result.broken_limit}" if result.broken_limit else f"exit code {result.code}"
        if result.broken_limit == "time":
            why = f"no end within {seconds:g} s"
        raise ToolError(f"{why}\n{result.output}".strip())

    return Tool(PYTHON_FUNCTION, call)
