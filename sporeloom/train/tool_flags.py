# SPDX-License-Identifier: Apache-2.0
"""Flags about tools that a model calls while its texts are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sporeloom.align.tools import PYTHON, PYTHON_FUNCTION, offered, read_tools
from sporeloom.core.command_line import option
from sporeloom.core.errors import Problems
from sporeloom.core.numbers import Count, Positive

DEFAULTS = {"max_turns": 4, "tool_timeout_s": 10.0, "max_tool_output": 2000, "tool_call_parser": "auto"}


@dataclass(frozen=True, kw_only=True)
class ToolFlags:
    """Tools that the model may call in its answers."""

    heading: ClassVar[str] = "tools"
    common: ClassVar[tuple[str, ...]] = ("tools", "max_turns")

    tools: tuple[str, ...] = option(
        (),
        "tools that the model may call: python, which runs programs isolated, and YAML files that name commands or HTTP "
        "endpoints; prompts are then messages (default: none)",
    )
    max_turns: Count = option(
        DEFAULTS["max_turns"], "maximum number of the model's answers in a conversation with tools; 1: none is run"
    )
    tool_timeout_s: Positive = option(DEFAULTS["tool_timeout_s"], "seconds that a call of a tool may take")
    max_tool_output: Count = option(
        DEFAULTS["max_tool_output"],
        "maximum number of characters of a tool's output; the middle of longer ones is left out",
    )
    tool_call_parser: str = option(
        DEFAULTS["tool_call_parser"],
        "format of the model's tool calls: hermes, openpangu, openpangu2; auto: by its chat template",
    )

    def tool_problems(self, allows_execution: bool) -> Iterator[str]:
        """List the problems of these flags."""
        if not self.tools:
            given = [name for name, default in DEFAULTS.items() if getattr(self, name) != default]
            yield from (f"--{name.replace('_', '-')} is for tools: give --tools, too" for name in given)
            return
        if PYTHON in self.tools and not allows_execution:
            yield "--tools python runs programs that a model wrote: give --allow-execution, too"
        problems, names = Problems(), list[str]()
        for given_name in self.tools:
            if given_name == PYTHON:
                names.append(PYTHON)
            elif not given_name.endswith((".yaml", ".yml")):
                yield f"--tools {given_name}: give python, or a YAML file of tools that ends in .yaml"
            else:
                found = problems.of(read_tools, Path(given_name))
                names += [tool.name for tool in found.tools] if found else []
        yield from problems
        twice = sorted({name for name in names if names.count(name) > 1})
        yield from (f"--tools {' '.join(self.tools)}: two tools are named {name}; rename one" for name in twice)

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        found = list[dict[str, Any]]()
        for name in self.tools:
            is_python = name == PYTHON
            found += (
                [offered(PYTHON_FUNCTION)] if is_python else [tool.offered for tool in read_tools(Path(name)).tools]
            )
        return found
