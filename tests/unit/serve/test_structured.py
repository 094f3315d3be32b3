# SPDX-License-Identifier: Apache-2.0
"""Answers in a demanded form: whatever logits a model has, every answer that ends by itself is valid."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from vocabularies import glm4_json

from sporeloom.core.errors import ConfigError
from sporeloom.data.chat_template import ChatTemplate, TemplatedTokenizer
from sporeloom.inference.formats import CALLS, REASONING, ChatFormat, MarkedTokenizer
from sporeloom.inference.parsing import MessageParser, message_of
from sporeloom.inference.sampling import History, Sampler, SamplingConfig, ban
from sporeloom.serve.config import ServedModel
from sporeloom.serve.constraint import TokenMask
from sporeloom.serve.fields import Fields, RequestError
from sporeloom.serve.messages import NO_TOOLS, ToolUse, read_tools
from sporeloom.serve.prepare import masks, prepare_chat
from sporeloom.serve.requests import read_chat
from sporeloom.serve.structured import answer_grammars, read_structure
from sporeloom.serve.thinking import ThinkingBudget, template_variables

ASKED = [{"role": "user", "content": "hi"}]
HERMES = ChatFormat(REASONING["think"], CALLS["hermes"])
CLOSED = "<think>\n\n</think>\n\n"
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["小城", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return glm4_json(tmp_path_factory.mktemp("glm4"))


class Text:
    """A text of a model whose logits are random, and even more those of the tokens in `liked`."""

    def __init__(self, tokenizer, processors, seed, liked=()):
        self.tokenizer, self.tokens, self.seed, self.liked = tokenizer, [], seed, list(liked)
        self.sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed), (), tokenizer.vocab_size, processors)

    def step(self):
        """Choose a token. Returns whether the text has ended."""
        logits = np.random.default_rng([self.seed, len(self.tokens)]).normal(0, 2, self.tokenizer.vocab_size + 3)
        logits[self.liked] += 4
        token = self.sampler.choose(logits.astype(np.float32), History([1], self.tokens))
        if token == self.tokenizer.eod_id:
            return True
        self.tokens.append(token)
        return False

    def run(self, most=300):
        """The text, and whether it ended before `most` tokens."""
        ended = any(self.step() for _ in range(most))
        return self.tokenizer.decode(self.tokens), ended


def mask(tokenizer, **body):
    structure = read_structure(Fields(body))
    return TokenMask(tokenizer, [tokenizer.eod_id], [structure.grammar])


def random_schema(draw, depth=0):
    """A schema all of whose texts are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = draw.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "tuple"])
    if kind == "string":
        return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 6)}
    if kind == "integer":
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)}
    if kind == "number":
        return {"type": "number", "minimum": draw.randint(-5, 0), "exclusiveMaximum": draw.randint(1, 9)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": draw.sample(["a", "小城", 1, 2.5, None, True, 'q"', [1], {"k": "v"}], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x\n", 3, {"a": [1, None]}, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", r"^\d{3}-[x-z]+$", "^(ja|nein|小)$"])}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "time", "ipv4", "uuid"])}
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": draw.randint(0, 1), "maxItems": 3}
    if kind == "tuple":
        items = [random_schema(draw, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    names = draw.sample(["a", "b", "小", 'n"', "long name"], draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def test_a_random_models_answers_satisfy_random_schemas(tokenizer):
    checker, ended = jsonschema.FormatChecker(formats=["date", "ipv4", "uuid"]), 0
    for seed in range(1000):
        schema = random_schema(random.Random(seed))
        text, has_ended = Text(tokenizer, [mask(tokenizer, guided_json=schema)], seed).run()
        if has_ended:
            ended += 1
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert ended > 900


def test_an_answer_of_any_json_object_is_one(tokenizer):
    quote, close = tokenizer.encode_text('"')[0], tokenizer.encode_text("}")[0]
    for seed in range(20):
        processors = [mask(tokenizer, response_format={"type": "json_object"})]
        text, ended = Text(tokenizer, processors, seed, [quote, close]).run()
        assert not ended or isinstance(json.loads(text), dict)
        assert text.startswith("{")


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}/[0-9]"}, "[a-c]{3}/[0-9]"),
        ({"structured_outputs": {"regex": "(ja|nein)+ 小?"}}, "(ja|nein)+ 小?"),
        ({"structured_outputs": {"choice": ["good", 'b"ad\n', "goodbye"]}}, 'good|b"ad\n|goodbye'),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
        ({"guided_grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, r"x\d\d"),
        ({"structured_outputs": {"json_object": False, "choice": ["yes"]}}, "yes"),
    ],
)
def test_an_answer_has_the_demanded_form(tokenizer, body, pattern):
    found = {Text(tokenizer, [mask(tokenizer, **body)], seed).run() for seed in range(12)}
    assert all(ended and re.fullmatch(pattern, text) for text, ended in found)
    assert len(found) > 1 or pattern == "yes"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "not supported: not"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "not supported: uniqueItems"),
        ({"guided_json": {"type": "object", "minProperties": 2}}, "guided_json", "minProperties"),
        ({"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "guided_json", "oneOf"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json", "minimum"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text satisfies it"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": "["}, "guided_regex", "unclosed character class"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": ""}, "guided_regex", "from 1 to"),
        ({"guided_choice": []}, "guided_choice", "1 to 1000 texts"),
        ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "Expected"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema must be"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "decides where the answer ends"),
    ],
)
def test_a_form_that_cannot_be_enforced_is_refused_by_name(tokenizer, body, param, said):
    model = SimpleNamespace(name="m", tokenizer=tokenizer, stop_ids=[tokenizer.eod_id], form=HERMES)

    def work():
        asked = read_chat(Fields({"messages": ASKED, **body}), tokenizer.vocab_size)
        return masks(model, asked, [asked.structure.grammar])

    with pytest.raises(RequestError, match=re.escape(said)) as error:
        work()
    assert (error.value.status, error.value.param) == (400, param)


def test_a_schema_that_is_nested_too_deeply_is_refused(tokenizer):
    schema = {}
    for _ in range(3000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises((RequestError, ConfigError), match=r"nested too deeply|recursion limit"):
        mask(tokenizer, guided_json=schema)


def test_texts_that_take_turns_are_those_of_each_alone(tokenizer):
    """A mask has no part of another's state."""
    schemas = [random_schema(random.Random(seed)) for seed in range(12)]
    alone = [
        Text(tokenizer, [mask(tokenizer, guided_json=schema)], seed).run(60)[0] for seed, schema in enumerate(schemas)
    ]
    texts = [Text(tokenizer, [mask(tokenizer, guided_json=schema)], seed) for seed, schema in enumerate(schemas)]
    open_texts, draw = [*texts], random.Random(3)
    while open_texts:
        text = draw.choice(open_texts)
        if text.step() or len(text.tokens) == 60:
            open_texts.remove(text)
    assert [tokenizer.decode(text.tokens) for text in texts] == alone


def answers(tokenizer, form, prompt, tools, structure=None, liked=(), count=15):
    """Messages of a random model, and whether each ended."""
    names = [name for markers in (form.reasoning, form.calls.markers) if markers for name in vars(markers).values()]
    shown = MarkedTokenizer(tokenizer, names)
    for seed in range(count):
        grammars = answer_grammars(tokenizer, form, prompt, structure, tools)
        processors = [TokenMask(tokenizer, [tokenizer.eod_id], grammars)]
        text, ended = Text(shown, processors, seed, liked).run(200)
        parser = MessageParser(form, prompt.endswith(form.reasoning.start), str, is_certain=True)
        yield message_of(parser.add(text) + parser.end()), ended


def check_call(call):
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER["parameters"] if call["function"]["name"] == "weather" else {"maxItems": 0})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_are_made_and_valid(tokenizer, choice):
    tools, names = read_tools(Fields({"tools": TOOLS, "tool_choice": choice})), set()
    for told, ended in answers(tokenizer, HERMES, CLOSED, tools):
        if ended:
            assert told["content"] is None
            for call in told["tool_calls"]:
                check_call(call)
                names.add(call["function"]["name"])
            assert len(told["tool_calls"]) == 1 or choice == "required"
    assert names == ({"weather", "now"} if choice == "required" else {"weather"})


def test_calls_of_special_tokens_come_as_a_list(tokenizer):
    """`<|unheard_of|>` and others of this vocabulary stand for openPangu's markers."""
    names = list(tokenizer.token_names.values())
    markers = REASONING["think"].__class__
    form = ChatFormat(markers(names[0], names[1]), CALLS["openpangu"].__class__(markers(*names[2:4]), True, True))
    tools, counts = ToolUse(TOOLS, "required"), set()
    liked = [token for token, name in tokenizer.token_names.items() if name in names[1:4]]
    for told, ended in answers(tokenizer, form, names[0], tools, liked=liked):
        if ended:
            for call in told["tool_calls"]:
                check_call(call)
            counts.add(len(told["tool_calls"]))
            assert "content" in told and not told["content"]
    assert 1 in counts


def test_strict_tools_are_called_or_text_is_free_of_calls(tokenizer):
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    tools = read_tools(Fields({"tools": strict}))
    liked = [token for character in "<tool_call>" for token in tokenizer.encode_text(character)]
    found = list(answers(tokenizer, HERMES, CLOSED, tools, liked=liked, count=25))
    for told, ended in found:
        assert "<tool_call>" not in (told["content"] or "")
        for call in told.get("tool_calls", ()) if ended else ():
            check_call(call)
    assert any("tool_calls" not in told for told, _ in found)
    assert answer_grammars(tokenizer, HERMES, "", None, read_tools(Fields({"tools": TOOLS}))) == []


def test_with_tools_an_answer_is_a_call_or_of_the_form(tokenizer):
    structure, tools = (
        read_structure(Fields({"guided_choice": ["good", "<tool"]})),
        read_tools(Fields({"tools": TOOLS})),
    )
    found = [told for told, ended in answers(tokenizer, HERMES, CLOSED, tools, structure) if ended]
    for told in found:
        assert told["content"] in ("good", "<tool") or told["tool_calls"]
    assert {"tool_calls" in told for told in found} == {True, False}


def test_parameters_that_cannot_be_enforced_are_refused_by_their_place(tokenizer):
    wrong = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    tools = read_tools(Fields({"tools": [*TOOLS, {"type": "function", "function": wrong}], "tool_choice": "required"}))
    model = SimpleNamespace(name="m", tokenizer=tokenizer, stop_ids=[tokenizer.eod_id], form=HERMES)
    grammars = answer_grammars(tokenizer, HERMES, "", None, tools)
    with pytest.raises(RequestError, match=r"^tools\[2\]\.function\.parameters: .*: not;") as error:
        masks(model, SimpleNamespace(structure=None), grammars, tools)
    assert error.value.param == "tools"


@pytest.mark.parametrize("prompt", ["<think>\n", "", CLOSED])
def test_the_form_begins_after_the_reasoning(tokenizer, prompt):
    structure = read_structure(Fields({"guided_choice": ["good", "bad"]}))
    for told, ended in answers(tokenizer, HERMES, prompt.strip(), NO_TOOLS, structure, count=8):
        assert not ended or told["content"] in ("good", "bad")
        assert prompt != CLOSED or "reasoning_content" not in told


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("prompt", ["<think>", ""])
@pytest.mark.parametrize("is_formed", [False, True])
def test_a_budget_ends_the_reasoning(tokenizer, budget, prompt, is_formed):
    markers = REASONING["think"]
    start = [] if prompt else tokenizer.encode_text(markers.start)
    structure = read_structure(Fields({"guided_choice": ["good", "bad"]}))
    grammars = answer_grammars(tokenizer, HERMES, prompt, structure, NO_TOOLS)
    for seed in range(6):
        processors = [ThinkingBudget(tokenizer, markers, bool(prompt), budget)]
        processors += [TokenMask(tokenizer, [tokenizer.eod_id], grammars)] if is_formed else []
        text = Text(tokenizer, processors, seed)
        text.sampler.processors.insert(0, force(start))
        text.sampler.processors += [] if is_formed else [ban([tokenizer.eod_id])]
        found = text.run(len(start) + budget + 40)[0]
        end = tokenizer.encode_text(markers.end)
        place = next(i for i in range(len(text.tokens)) if text.tokens[i : i + len(end)] == end)
        assert len(start) + budget <= place <= len(start) + budget + 3
        assert not is_formed or found.endswith(("good", "bad"))


def force(tokens):
    """A processor that makes a text begin with these tokens."""

    def process(logits, history):
        if len(history.generated) < len(tokens):
            logits[:] = -np.inf
            logits[tokens[len(history.generated)]] = 0
        return logits

    return process


def test_a_text_without_reasoning_has_no_budget(tokenizer):
    ids = tokenizer.encode_text("no <think> here, it is text")
    budget = ThinkingBudget(tokenizer, REASONING["think"], False, 0)
    text = Text(tokenizer, [budget, force(ids)], 1)
    assert text.run(len(ids))[0] == "no <think> here, it is text"


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{% if enable_thinking %}x{% endif %}", "none", {"enable_thinking": False}),
        ("{% if enable_thinking is defined and enable_thinking %}x{% endif %}", "low", {"enable_thinking": True}),
        ("{{ reasoning_effort }}{{ thinking }}", "low", {"reasoning_effort": "low"}),
        ("{{ thinking }}", "high", {"thinking": True}),
        ("thinking {{ '</think>enable_thinking' }} {{ message.thinking }}", "high", None),
    ],
)
def test_an_effort_becomes_what_the_template_reads(tokenizer, tmp_path, template, effort, expected):
    templated = TemplatedTokenizer(tokenizer, ChatTemplate(tmp_path, template))
    model = SimpleNamespace(name="m", tokenizer=templated)
    if expected is None:
        with pytest.raises(RequestError, match="reads neither reasoning_effort nor"):
            template_variables(model, {}, effort)
    else:
        assert template_variables(model, {}, effort) == expected
        assert template_variables(model, dict.fromkeys(expected, 7), effort) == dict.fromkeys(expected, 7)


VALUES = [None, True, 0, -1, 2**70, float("nan"), "", "x", "auto", "required", "\ud800", "小", [], [1], ["a"], {}]
VALUES += [TOOLS, [{"type": "function", "function": {"name": "f", "parameters": {"type": ["x"]}, "strict": True}}]]
VALUES += [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}, {"json": {"type": 3}}]
VALUES += [
    {"regex": "("},
    {"choice": [3]},
    {"choice": ["a", "\ud800"]},
    {"grammar": "start: @x"},
    {"json_object": True},
]
VALUES += ["start: /a/ start?", "root ::= root", "start: %json {", "(a*)*", "a{1,100000}", "(?P<x>a)(?P=x)"]
VALUES += [{"properties": [], "anyOf": {}}, {"minProperties": "x", "required": 3}, {"$ref": "#/x"}, {"enum": [[], {}]}]
NAMES = ["tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json"]
NAMES += ["guided_regex", "guided_choice", "guided_grammar", "reasoning_effort", "thinking_token_budget"]


def test_requests_that_make_no_sense_are_refused_and_the_others_answered(tokenizer):
    templated = TemplatedTokenizer(
        tokenizer, ChatTemplate(Path("t"), "{{ tools }}{{ thinking }}{{ messages[0].content }}")
    )
    model = ServedModel("m", templated, (tokenizer.eod_id,), form=HERMES)
    job, draw, refused = SimpleNamespace(max_model_len=999, max_texts=9), random.Random(5), []
    for _ in range(400):
        body = {"messages": ASKED, "max_tokens": 5, draw.choice(NAMES): draw.choice(VALUES)}
        try:
            (choice,) = prepare_chat(job, model, read_chat(Fields(body), tokenizer.vocab_size)).choices
        except RequestError as error:
            refused.append((error.status, bool(error.param)))
        else:
            Text(tokenizer, choice.processors, 1).run(5)
    assert set(refused) == {(400, True)} and 200 < len(refused) < 380
