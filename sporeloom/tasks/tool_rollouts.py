# SPDX-License-Identifier: Apache-2.0
"""Conversations sampled from the weights that are trained: the model calls tools, and continues after what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sporeloom.align.tools import ToolCall, ToolOutput, Toolset
from sporeloom.data.examples import PromptLine
from sporeloom.data.tokenizer import ChatMessage, Tokenizer
from sporeloom.data.tool_turns import ToolResult, ToolTurns
from sporeloom.inference.formats import ChatFormat, MarkedTokenizer
from sporeloom.inference.parsing import MessageParser, message_of
from sporeloom.tasks.one_rank import from_log_rank
from sporeloom.tasks.rollouts import Answer, Rollouts, SampledText, ToolUse

TURN_STREAMS = 1 << 48
"""Interval between the streams of random numbers of a conversation's turns."""
MAX_CALLS = 16
"""Maximum number of calls of an answer; further ones are left out of its message."""


class AnswerReader:
    """Reads the answers of a model as messages, by the parser that a server has for them.

    Args:
        form: of the model's answers; it has calls.
    """

    def __init__(self, tokenizer: Tokenizer, form: ChatFormat):
        assert form.calls
        self.form = form
        markers = [form.calls.markers, *([form.reasoning] if form.reasoning else [])]
        self._tokenizer = MarkedTokenizer(tokenizer, [name for each in markers for name in (each.start, each.end)])

    def message(self, before: str, tokens: list[int], turn: int) -> dict[str, Any]:
        """The message of tokens that continue the text `before`, without the token that ends them."""
        reasoning = self.form.reasoning
        is_open = reasoning is not None and before.rstrip().endswith(reasoning.start)
        parser = MessageParser(self.form, is_open, lambda index: f"call_{turn}_{index}", max_calls=MAX_CALLS)
        return message_of([*parser.add(self._tokenizer.decode(tokens)), *parser.end()])


@dataclass
class Conversation:
    """A conversation that is sampled."""

    number: int
    """Number of the prompt among all prompts."""
    prompt: PromptLine
    before: str
    """Text before the next answer."""
    messages: list[dict[str, Any]]
    tokens: list[int] = field(default_factory=list)
    """See `SampledText`, also for the next three."""
    are_sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    has_ended: bool = False
    start: int = 0
    """Position where the last answer begins."""
    num_turns: int = 0
    num_calls: int = 0
    num_failed: int = 0

    @classmethod
    def begin(cls, number: int, prompt: PromptLine) -> Conversation:
        messages = [{"role": each["role"], "content": each["content"]} for each in prompt.columns["prompt"]]
        return cls(number, prompt, prompt.text, messages)

    @property
    def asked(self) -> list[ChatMessage]:
        """The prompt's messages."""
        return [ChatMessage(each["role"], each["content"]) for each in self.prompt.columns["prompt"]]

    def add_answer(self, answer: Answer, message: dict[str, Any]) -> None:
        self.start = len(self.tokens)
        self.tokens += answer.tokens
        self.are_sampled += [True] * len(answer.tokens)
        self.log_probs += answer.log_probs
        self.num_turns += 1
        self.messages.append(message)

    def add_results(self, tokens: Sequence[int], text: str, results: Sequence[ToolResult], num_failed: int) -> None:
        self.tokens += tokens
        self.are_sampled += [False] * len(tokens)
        self.before = text
        self.messages += [{"role": "tool", "content": result.text, **(result.message.more or {})} for result in results]
        self.num_calls += len(results)
        self.num_failed += num_failed

    def sampled(self) -> SampledText:
        use = ToolUse(
            *(tuple(self.are_sampled), self.start, self.messages, self.num_turns, self.num_calls, self.num_failed)
        )
        return SampledText(self.number, self.tokens, self.log_probs, self.has_ended, use)


class ToolRollouts:
    """Samples conversations, which are as long as the texts of `rollouts` at most, tools' turns included.

    An answer that calls tools is followed by their turn, and another answer, up to `max_turns` answers. A conversation whose
    last answer still calls tools has not ended; nor has one for whose tools' turn there is no space, which is left out.
    """

    def __init__(self, rollouts: Rollouts, reader: AnswerReader, turns: ToolTurns, tools: Toolset, max_turns: int):
        self.rollouts, self.reader, self.turns, self.tools = rollouts, reader, turns, tools
        self.max_turns = max_turns

    def sample(
        self, prompts: Sequence[PromptLine], numbers: Sequence[int], streams: Sequence[int]
    ) -> list[SampledText]:
        """Sample a conversation for each of `numbers`, prompts among `prompts`. `streams` separates their random numbers."""
        every = [Conversation.begin(int(number), prompts[number]) for number in numbers]
        going = list(zip(every, streams, strict=True))
        for turn in range(self.max_turns):
            ids = [[*each.prompt.tokens, *each.tokens] for each, _ in going]
            limits = [self.rollouts.most - len(each.tokens) for each, _ in going]
            answers = self.rollouts.answer(ids, limits, [stream + turn * TURN_STREAMS for _, stream in going])
            for (each, _), answer in zip(going, answers, strict=True):
                end = -1 if answer.has_ended else None
                each.add_answer(answer, self.reader.message(each.before, answer.tokens[:end], turn))
                each.has_ended = answer.has_ended and not _calls(each)
            pairs = zip(going, answers, strict=True)
            going = [pair for pair, answer in pairs if answer.has_ended and _calls(pair[0])]
            if turn + 1 < self.max_turns and going:
                self._call([each for each, _ in going])
            going = [(each, stream) for each, stream in going if not each.are_sampled[-1]]
            if not going:
                break
        return [each.sampled() for each in every]

    def _call(self, conversations: Sequence[Conversation]) -> None:
        """Run the tools that the last answers call, and add their turns where there is space."""
        calls = [_calls(each) for each in conversations]
        outputs = iter(self._outputs([ToolCall(call.name, call.arguments) for of_one in calls for call in of_one]))
        for each, of_one in zip(conversations, calls, strict=True):
            found = [next(outputs) for _ in of_one]
            results = [ToolResult(call.id, call.name, output.text) for call, output in zip(of_one, found, strict=True)]
            turn = self.turns.follow(each.asked, each.tokens[-1], results)
            if len(each.tokens) + len(turn.tokens) < self.rollouts.most:
                each.add_results(turn.tokens, turn.text, results, sum(output.has_failed for output in found))

    def _outputs(self, calls: Sequence[ToolCall]) -> list[ToolOutput]:
        """Outputs of calls, on all ranks: one rank runs them."""
        told = from_log_rank(self.rollouts.engine, lambda: self.tools.run(calls))
        return [ToolOutput(*each) for each in told]


@dataclass(frozen=True)
class _Call:
    id: str
    name: str
    arguments: str


def _calls(conversation: Conversation) -> list[_Call]:
    """Calls of the last answer."""
    return [_Call(call["id"], **call["function"]) for call in conversation.messages[-1].get("tool_calls", ())]
