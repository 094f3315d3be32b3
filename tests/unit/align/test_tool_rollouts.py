# SPDX-License-Identifier: Apache-2.0
"""Conversations with tools: their tokens, masks and turns by hand, from a scripted model."""

import hashlib
import json
import threading
import time
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from sporeloom.align.advantages import token_weights
from sporeloom.align.tools import Tool, ToolError, Toolset
from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer
from sporeloom.data.examples import Line, LineTokenizer, example_batch
from sporeloom.data.special_tokens import SpecialTokens
from sporeloom.data.tool_turns import ToolResult, ToolTurns
from sporeloom.inference.formats import chat_format
from sporeloom.nn.objectives import Policy
from sporeloom.tasks import one_rank
from sporeloom.tasks.grpo import GRPO
from sporeloom.tasks.policy import PolicyTask
from sporeloom.tasks.rollouts import Answer
from sporeloom.tasks.run_tools import RunTools, tool_metrics
from sporeloom.tasks.tool_rollouts import MAX_CALLS, TURN_STREAMS, AnswerReader, ToolRollouts
from sporeloom.train.policy import GRPOConfig
from sporeloom.train.state import differences
from sporeloom.train.tool_flags import DEFAULTS

SPECIAL = {"<|user|>": 1, "<|assistant|>": 2, "<|tool|>": 3, "<|end|>": 4}
USER, ASSISTANT, TOOL, END = SPECIAL.values()
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Letters(SpecialTokens):
    """A token a character: its code point + 10."""

    special, template_tokens, variables, vocab_size, eod_id = SPECIAL, SPECIAL, {}, 1 << 21, END

    def encode_text(self, text):
        return [ord(letter) + 10 for letter in text]

    def decode(self, ids):
        return "".join(chr(token - 10) for token in ids if token >= 10)


def letters(text):
    return [ord(letter) + 10 for letter in text]


def tokenizer(tmp_path, template=TEMPLATE):
    path = tmp_path / "chat_template.jinja"
    path.write_text(template)
    return TemplatedTokenizer(Letters(), ChatTemplate(path))


def call(name="add", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """A model that says what is written: (prompt, turn) -> text, and whether it ends it. Keeps what it was asked."""

    def __init__(self, texts, most=1000):
        self.texts, self.most, self.asked = texts, most, []
        mesh = SimpleNamespace(first_rank_of_last_stage=0, size=1)
        self.engine = SimpleNamespace(
            is_log_rank=True,
            strategy=SimpleNamespace(mesh=mesh),
            broadcast_value=lambda value, source: json.loads(json.dumps(value)),
        )

    def answer(self, ids, limits, streams):
        answers = []
        for prompt, limit, stream in zip(ids, limits, streams, strict=True):
            self.asked.append((list(prompt), limit, stream))
            turn, place = divmod(stream, TURN_STREAMS)
            tokens = [*letters(self.texts[place][turn]), END][:limit]
            answers.append(Answer(tokens, [-len(tokens) - i / 8 for i in range(len(tokens))], tokens[-1] == END))
        return answers


def add(arguments, seconds):
    values = json.loads(arguments)
    if "a" not in values:
        raise ToolError("no a")
    return f"{values['a'] + values['b']}<|end|>"  # in a tool's output the name of a token is text


def sampled(tmp_path, texts, most=1000, max_turns=3, tool=add):
    made = tokenizer(tmp_path)
    toolset = Toolset([Tool({"name": "add", "description": "", "parameters": {}}, tool)], 1.0, 100)
    reading = LineTokenizer(made, tools=toolset.offered)
    lines = [
        Line(f"x:{i}", {"prompt": [{"role": "user", "content": text}], "wanted": i}) for i, text in enumerate("QR")
    ]
    prompts = reading.prompts(lines)
    script = Script(texts, most)
    turns = ToolTurns(made, toolset.offered)
    rollouts = ToolRollouts(script, AnswerReader(made, chat_format(made)), turns, toolset, max_turns)
    return rollouts.sample(prompts, [i % 2 for i in range(len(texts))], range(len(texts))), prompts, script


PROMPT = [*letters("add"), USER, *letters("Q"), END, *letters("\n"), ASSISTANT]
"""The first prompt, which offers the tool."""
CALL = call(a=2, b=3)
TURN = [*letters("\n"), TOOL, *letters("5<|end|>"), END, *letters("\n"), ASSISTANT]
"""Between the end of the first answer and the start of the second: what the model did not sample."""


def test_tokens_masks_and_turns_are_those_by_hand(tmp_path):
    (text, other), prompts, script = sampled(tmp_path, [[CALL, "It is 5."], ["No tool."]])
    assert list(prompts[0].tokens) == PROMPT
    first, last = [*letters(CALL), END], [*letters("It is 5."), END]
    assert text.tokens == [*first, *TURN, *last]
    assert text.are_sampled == (True,) * len(first) + (False,) * len(TURN) + (True,) * len(last)
    assert text.log_probs == [-len(part) - i / 8 for part in (first, last) for i in range(len(part))]
    assert (text.has_ended, text.completion) == (True, letters("It is 5."))
    assert (other.tokens, other.has_ended, all(other.are_sampled)) == ([*letters("No tool."), END], True, True)
    # the second request continues the very tokens of the first, with random numbers of its own, and only where a tool spoke
    assert [(place, limit) for _, limit, place in script.asked] == [
        *((0, 1000), (1, 1000)),
        (TURN_STREAMS, 1000 - len(first) - len(TURN)),
    ]
    assert script.asked[2][0] == [*PROMPT, *first, *TURN]
    assert tool_metrics([text, other]) == {"turns": 1.5, "tool_calls": 0.5, "tool_failures": 0.0}


def test_the_whole_conversation_is_kept_for_rewards(tmp_path):
    (text, _), *_ = sampled(tmp_path, [[CALL, "It is 5."], ["No tool."]])
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert text.tools.messages == [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5<|end|>", "tool_call_id": "call_0_0", "name": "add"},
        {"role": "assistant", "content": "It is 5."},
    ]


def test_the_loss_covers_sampled_tokens_whatever_the_tool_says(tmp_path):
    found = {}
    for said in ("5", "7"):
        (text,), prompts, _ = sampled(tmp_path, [[CALL, "It is 5."]], tool=lambda *_, said=said: said)
        found[said] = example_batch([[text.example(prompts)]], 256)
        labels = found[said].labels[0][found[said].loss_weights[0] > 0]
        assert labels.tolist() == [*letters(CALL), END, *letters("It is 5."), END]
        assert found[said].loss_weights.sum() == len(text.log_probs)
    np.testing.assert_array_equal(found["5"].loss_weights, found["7"].loss_weights)
    assert (found["5"].tokens != found["7"].tokens).sum() == 1


def test_the_gradient_of_what_the_tool_says_is_zero(tmp_path):
    """With a KL divergence, and one ratio a text: whatever a loss adds up over tokens."""
    (text, other), prompts, _ = sampled(tmp_path, [[CALL, "It is 5."], ["No tool."]])
    batch = example_batch([[each.example(prompts)] for each in (text, other)], 256)
    mask, draw = batch.loss_weights, np.random.default_rng(1)
    advantages = np.array([[1.0], [-1.0]]) * np.ones_like(mask)  # also where nothing was sampled
    log_probs, old, reference = (draw.standard_normal(mask.shape) for _ in range(3))
    log_probs[mask == 0] = -200.0  # a tool says what the model never would: exp(200) is infinite
    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    objective = Policy(0.2, None, 0.1, sequence_ratio=True)
    inputs = [log_probs, token_weights(mask, "dapo", 256), advantages, old, reference, np.zeros_like(mask)]
    tensors = [Tensor(each.astype(np.float32)) for each in inputs]
    loss, numbers = objective.of(*tensors)
    assert np.isfinite(float(loss)) and np.isfinite([float(number) for number in numbers]).all()
    gradient = mindspore.grad(lambda *given: objective.of(*given)[0])(*tensors).asnumpy()
    assert (gradient[mask > 0] != 0).all() and not gradient[mask == 0].any()
    assert (mask[0] == 0).sum() > (mask[0, : len(PROMPT) - 1] == 0).sum() + len(
        TURN
    ) - 1  # those of the tool among them


def test_several_calls_of_an_answer_run_in_its_order(tmp_path):
    (text,), *_ = sampled(tmp_path, [[call(a=1, b=1) + call(a=2, b=2), "done"]])
    said = [message["content"] for message in text.tools.messages if message["role"] == "tool"]
    assert said == ["2<|end|>", "4<|end|>"] and text.tools.num_calls == 2


def test_no_more_calls_of_an_answer_run_than_the_limit(tmp_path):
    asked = "".join(call(a=number, b=0) for number in range(MAX_CALLS + 3))
    (text,), *_ = sampled(tmp_path, [[asked, "done"]], most=4000)
    said = [message["content"] for message in text.tools.messages if message["role"] == "tool"]
    assert said == [f"{number}<|end|>" for number in range(MAX_CALLS)] and text.tools.num_calls == MAX_CALLS


def test_a_run_records_the_tools_that_it_has_read(tmp_path, monkeypatch):
    path = tmp_path / "tools.yaml"
    path.write_text("tools: [{name: add, description: '', command: [cat]}]")
    config = GRPOConfig(data="x", from_checkpoint="y", tools=(str(path),))
    monkeypatch.setattr(PolicyTask, "data_state", lambda self: {"seed": 1})
    task = object.__new__(GRPO)
    task.tools = RunTools.open(config, tokenizer(tmp_path))
    (contents,) = (before := task.data_state())["tools"]
    assert contents == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    path.write_text("tools: [{name: add, description: '', command: [tac]}]")
    assert task.data_state() == before == {"seed": 1, "tools": [contents], **DEFAULTS}
    other = object.__new__(GRPO)
    other.tools = RunTools.open(config, tokenizer(tmp_path))
    assert next(iter(differences(before, other.data_state(), both_ways=True))).startswith("tools was")
    path.unlink()
    assert task.data_state() == before


@pytest.mark.parametrize("in_main_thread", [False, True])
def test_other_ranks_hear_of_a_value_that_takes_long(in_main_thread, monkeypatch):
    heard = []

    def compute():
        assert (threading.current_thread() is threading.main_thread()) == in_main_thread
        deadline = time.monotonic() + 30
        while len(heard) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return 7

    mesh, broadcast = (
        SimpleNamespace(size=2, first_rank_of_last_stage=1),
        lambda value, source: heard.append(value) or value,
    )
    strategy = SimpleNamespace(mesh=mesh)
    monkeypatch.setattr(one_rank, "INTERVAL_S", 0.05)
    log_rank = SimpleNamespace(rank=1, is_log_rank=True, target="CPU", strategy=strategy, broadcast_value=broadcast)
    assert one_rank.from_log_rank(log_rank, compute, in_main_thread) == 7
    assert len(heard) > 2 and heard[:-1] == [[]] * (len(heard) - 1) and heard[-1] == [7]
    told = iter(heard)
    other = SimpleNamespace(rank=0, is_log_rank=False, strategy=strategy, broadcast_value=lambda *_: next(told))
    assert one_rank.from_log_rank(other, lambda: pytest.fail("computed twice")) == 7
    assert next(told, None) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (call(b=1), "Error: no a"),
        (call("ad", a=1), 'Error: there is no tool "ad"; tools: add'),
        (call(a="x", b=1), 'Error: TypeError: can only concatenate str (not "int") to str'),
    ],
)
def test_failures_are_texts_of_the_turn(tmp_path, asked, said):
    (text,), *_ = sampled(tmp_path, [[asked, "oh"]])
    assert text.tools.messages[2]["content"] == said
    assert (text.has_ended, text.tools.num_failed) == (True, 1)


def test_malformed_calls_are_an_answer_like_any_other(tmp_path):
    (text,), *_ = sampled(tmp_path, [["<tool_call>{add 2}</tool_call>"]])
    assert text.has_ended and text.tools.num_turns == 1 and text.tools.num_calls == 0


def test_a_conversation_that_still_calls_after_the_last_turn_has_not_ended(tmp_path):
    (text,), _, script = sampled(tmp_path, [[CALL, CALL]], max_turns=2)
    assert (text.has_ended, text.tools.num_turns, text.tools.num_calls) == (False, 2, 1)
    assert len(script.asked) == 2 and text.are_sampled[-1]
    (text,), _, script = sampled(tmp_path, [[CALL]], max_turns=1)
    assert (text.has_ended, text.tools.num_calls, len(script.asked)) == (False, 0, 1)


def test_no_conversation_exceeds_the_maximum_length(tmp_path):
    first, last = len(CALL) + 1, len("It is 5.") + 1
    for most in range(first - 1, first + len(TURN) + last + 1):
        (text,), _, script = sampled(tmp_path, [[CALL, "It is 5."]], most=most)
        assert len(text.tokens) <= most
        assert text.has_ended == (most == first + len(TURN) + last)
        fits = most > first + len(TURN)  # and leaves space for a token of an answer
        assert (len(script.asked), text.tools.num_calls) == ((2, 1) if fits else (1, 0))
        assert text.are_sampled[-1]  # nothing of a turn without an answer is left


def test_what_is_sampled_does_not_depend_on_the_other_conversations(tmp_path):
    texts = [[CALL, "It is 5."], ["No tool."], [call(a=1, b=1), CALL, "x"]]
    every, *_ = sampled(tmp_path, texts)
    (first,), *_ = sampled(tmp_path, texts[:1])
    assert (first.tokens, first.are_sampled) == (every[0].tokens, every[0].are_sampled)


def test_an_end_that_the_template_does_not_write_stays_as_it_was_sampled(tmp_path):
    made = tokenizer(tmp_path)
    turns = ToolTurns(made, [{"type": "function", "function": {"name": "add"}}])
    results = [ToolResult("call_0", "add", "5")]
    closing = turns.follow([], 99, results).tokens
    assert closing[0] == END and closing[1:] == turns.follow([], END, results).tokens


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("tools or []", "[]"), "has no tools; give a template of a model that calls tools"),
        (TEMPLATE.replace("for m in messages", "for m in messages if m.role != 'tool'"), "leaves out what tools say"),
        (
            TEMPLATE.replace("endfor %}<|end|>", "endfor %}{{ '' if m.tool_calls else '.' }}<|end|>"),
            "after a call than",
        ),
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), "does not write an answer once"),
    ],
)
def test_templates_that_cannot_write_a_turn_are_refused(tmp_path, template, said):
    with pytest.raises(ConfigError, match=said):
        ToolTurns(tokenizer(tmp_path, template), [{"type": "function", "function": {"name": "add"}}])


def test_a_tokenizer_without_template_and_prompts_of_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Letters has no chat template, which would say how tools"):
        ToolTurns(Letters(), [])
    with pytest.raises(ConfigError, match="x:1: prompt is a text, which offers no tools; give a list of messages"):
        LineTokenizer(tokenizer(tmp_path), tools=[{}]).prompts([Line("x:1", {"prompt": "Q"})])
