# SPDX-License-Identifier: Apache-2.0
"""The tools of a run of reinforcement learning, ready to be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.align.tools import PYTHON, ReadTools, Tool, Toolset, read_tools
from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.data.tool_turns import ToolTurns
from sporeloom.evaluation.python_tool import python_tool
from sporeloom.inference.formats import CALLS, chat_format
from sporeloom.tasks.rollouts import Rollouts, SampledText
from sporeloom.tasks.tool_rollouts import AnswerReader, ToolRollouts
from sporeloom.train.tool_flags import DEFAULTS


@dataclass(frozen=True)
class RunTools:
    """Tools, and the forms in which a model calls them and reads what they say."""

    toolset: Toolset
    turns: ToolTurns
    reader: AnswerReader
    max_turns: int
    identity: dict[str, Any]
    """Settings of sampled conversations, which a resumed run has in common; tools as they were when they were read."""

    @classmethod
    def open(cls, config: Any, tokenizer: Tokenizer) -> RunTools:
        """Open the tools of a configuration.

        Raises:
            ConfigError: the model calls no tools, or programs cannot be isolated.
        """
        tools, contents = list[Tool](), list[str]()
        for name in config.tools:
            found = ReadTools([python_tool()], PYTHON) if name == PYTHON else read_tools(Path(name))
            tools += found.tools
            contents.append(found.identity)
        toolset = Toolset(tools, config.tool_timeout_s, config.max_tool_output)
        turns = ToolTurns(tokenizer, toolset.offered, config.template_variables())
        form = chat_format(tokenizer, config.tool_call_parser)
        if form.calls is None:
            raise ConfigError(
                "--tools: the format of the model's tool calls is not known by its chat template; give --tool-call-parser, "
                f"one of {', '.join(CALLS)}"
            )
        identity = {"tools": contents, **{name: getattr(config, name) for name in DEFAULTS}}
        return cls(toolset, turns, AnswerReader(tokenizer, form), config.max_turns, identity)

    def rollouts(self, rollouts: Rollouts) -> ToolRollouts:
        """Conversations in place of single answers."""
        return ToolRollouts(rollouts, self.reader, self.turns, self.toolset, self.max_turns)


def tool_metrics(texts: Sequence[SampledText]) -> dict[str, float]:
    """Mean numbers of answers and calls of a conversation, and the share of calls that failed."""
    uses = [text.tools for text in texts if text.tools]
    calls = sum(use.num_calls for use in uses)
    return {
        "turns": sum(use.num_turns for use in uses) / len(uses),
        "tool_calls": calls / len(uses),
        "tool_failures": sum(use.num_failed for use in uses) / max(calls, 1),
    }
