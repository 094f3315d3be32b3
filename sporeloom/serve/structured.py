# SPDX-License-Identifier: Apache-2.0
"""Structured output: the form that a request demands of its answer, as grammars for `constraint.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from sporeloom.core.json_text import json_text
from sporeloom.core.lines import first_line
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.inference.formats import CallFormat, ChatFormat, Markers
from sporeloom.serve.fields import Fields, RequestError, shown, text_of
from sporeloom.serve.messages import ToolUse

ARGUMENTS = "arguments"
"""Beginning of the names of grammars of arguments; the number of the function follows."""
KINDS = ("json", "regex", "choice", "grammar")
MAX_LENGTH, MAX_ALTERNATIVES = 100_000, 1000
"""Characters of a grammar, and number of choices."""
WHITE_SPACE = r"[ \n\t]{0,20}"
"""White space between the parts of a JSON text: enough to indent, and a model that writes nothing else comes to an end."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Grammar = dict[str, Any]


@dataclass(frozen=True)
class Structure:
    """Form of an answer."""

    grammar: Grammar
    """In llguidance's form."""
    param: str
    """Field of the request."""


def read_structure(fields: Fields) -> Structure | None:
    """Raises:
    RequestError: a form that cannot be enforced, or several.
    """
    found = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise RequestError(400, f"{names} both give the form of the answer; send one", found[1].param)
    if found and (fields.values.get("ignore_eos") or fields.values.get("min_tokens")):
        name = "ignore_eos" if fields.values.get("ignore_eos") else "min_tokens"
        raise RequestError(400, f"{name} does not go with {found[0].param}, which decides where the answer ends", name)
    return found[0] if found else None


def _response_format(fields: Fields) -> Iterator[Structure]:
    name = "response_format"
    given = fields.take(name, dict)
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return
    if kind == "json_object":
        yield Structure(json_grammar({"type": "object"}, name), name)
    elif kind == "json_schema":
        described = given.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise RequestError(400, f"{name}.json_schema.schema must be a JSON schema (an object)", name)
        yield Structure(json_grammar(described["schema"], f"{name}.json_schema.schema"), name)
    else:
        raise RequestError(400, f"{name}.type must be text, json_object or json_schema, got {shown(kind)}", name)


def _structured_outputs(fields: Fields) -> Iterator[Structure]:
    """vLLM's field."""
    given: dict[str, Any] = fields.take("structured_outputs", dict, {})
    for key, value in given.items():
        name = f"structured_outputs.{key}"
        if value is None or value is False:
            continue
        if key == "json_object":
            yield Structure(json_grammar({"type": "object"}, name), name)
        elif key in KINDS:
            yield Structure(_grammar(key, value, name), name)
        else:
            raise RequestError(400, f"{shown(name)} is not supported; there are {', '.join(KINDS)}, json_object", name)


def _guided(fields: Fields) -> Iterator[Structure]:
    """The older names of vLLM's fields."""
    for key in KINDS:
        name = f"guided_{key}"
        if (value := fields.take(name, (dict, list, str))) is not None:
            yield Structure(_grammar(key, value, name), name)


def _grammar(kind: str, value: Any, name: str) -> Grammar:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RequestError(400, f"{name}: not JSON: {first_line(error)[:200]}", name) from None
        return json_grammar(value, name)
    if kind == "choice":
        if not isinstance(value, list) or not 0 < len(value) <= MAX_ALTERNATIVES or "" in value:
            raise RequestError(400, f"{name} must be a list of 1 to {MAX_ALTERNATIVES} texts, none of them empty", name)
        return {"lark_grammar": "start: " + " | ".join(_quoted(text_of(each, name)) for each in value)}
    text = text_of(value, name)
    if not 0 < len(text) <= MAX_LENGTH:
        raise RequestError(400, f"{name}: from 1 to {MAX_LENGTH} characters, got {len(text)}", name)
    if kind == "regex":
        (grammar,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
        return {"lark_grammar": grammar["lark_grammar"]}
    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception as error:  # of a parser for others' texts
        raise RequestError(400, f"{name}: {first_line(error)[:200]}", name) from None


def json_grammar(schema: Any, name: str) -> Grammar:
    """Texts that satisfy a JSON schema.

    Raises:
        RequestError: it is not a schema, or has a keyword that is not enforced.
    """
    if not isinstance(schema, dict):
        raise RequestError(400, f"{name} must be a JSON schema (an object), got {shown(schema)}", name)
    try:
        wrong = next(_not_enforced(schema), None)
    except RecursionError:
        raise RequestError(400, f"{name}: nested too deeply", name) from None
    if wrong:
        raise RequestError(400, f"{name}: {wrong} is not supported; leave it out and check the answer yourself", name)
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}}


def _not_enforced(schema: Any) -> Iterator[str]:
    """Keywords of a schema that the grammar would read and not enforce."""
    if isinstance(schema, list):
        for each in schema:
            yield from _not_enforced(each)
    if not isinstance(schema, dict):
        return
    fewest, required = schema.get("minProperties", 0), schema.get("required", ())
    # A name may be generated twice, and count twice.
    if isinstance(fewest, int | float) and isinstance(required, list | tuple) and fewest > len(set(map(str, required))):
        yield "minProperties (above the number of required properties)"
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from _not_enforced(list(value.values()))
        elif key not in ("enum", "const", "default", "examples", "x-guidance"):
            yield from _not_enforced(value)


def answer_grammars(
    tokenizer: Tokenizer,
    form: ChatFormat,
    prompt: str,
    structure: Structure | None,
    tools: ToolUse,
) -> list[Grammar]:
    """Grammars of a chat model's answer: reasoning as it likes, then calls or the demanded form; an empty list where
    nothing is demanded.

    Raises:
        RequestError: parameters of a function that cannot be enforced.
    """
    is_strict = any(function.get("strict") for _, function in tools.callable) and tools.choice != "none"
    with_calls = tools.choice == "required" or (tools.choice == "auto" and (is_strict or structure is not None))
    if not with_calls and structure is None:
        return []
    lines, grammars, body = list[str](), list[Grammar](), list[str]()
    if structure is not None and tools.choice != "required":
        grammars.append({"name": "answer", **structure.grammar})
        body.append("@answer")
    if with_calls:
        assert form.calls
        calls, more = _calls(tokenizer, form.calls, tools)
        lines += calls
        grammars += more
        body.append("calls")
    if not structure and tools.choice == "auto":
        assert form.calls
        lines.append(_free_text(tokenizer, form.calls.markers.start))
        body[:] = ["free_text", "free_text? calls"]
    thought = _thought(tokenizer, form.reasoning, prompt, lines)
    start = f"start: {thought} ({' | '.join(body)})"
    return [{"lark_grammar": "\n".join([start, *lines])}, *grammars]


def _thought(tokenizer: Tokenizer, markers: Markers | None, prompt: str, lines: list[str]) -> str:
    """The part of the main rule for reasoning, whose own rules are added to `lines`."""
    if markers is None or prompt.rstrip().endswith(markers.end):
        return ""
    end = _token(tokenizer, markers.end)
    if end.startswith("<"):
        lines += [f"thought: THOUGHT {end} SPACE", "THOUGHT: /(?s:.*)/"]
    else:
        lines += ["thought: marked SPACE", f"marked[suffix={end}]: /(?s:.*)/"]
    lines.append(r"SPACE: /\n{0,2}/")
    is_open = prompt.rstrip().endswith(markers.start)
    return "thought" if is_open else f"({_token(tokenizer, markers.start)} thought)?"


def _free_text(tokenizer: Tokenizer, start: str) -> str:
    """A rule for text without calls."""
    if _token(tokenizer, start).startswith("<"):
        return "free_text: FREE\nFREE: /(?s:.+)/"
    pattern = "".join(f"\\x{{{ord(character):x}}}" for character in start)
    return f"free_text: FREE\nFREE: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/"


def _calls(tokenizer: Tokenizer, form: CallFormat, tools: ToolUse) -> tuple[list[str], list[Grammar]]:
    """Rules for one call or several, and grammars of their arguments."""
    start, end = (_token(tokenizer, marker) for marker in (form.markers.start, form.markers.end))
    rules, grammars = list[str](), list[Grammar]()
    for number, (place, function) in enumerate(tools.callable):
        head = f'{{"name": {json_text(function["name"])}, "arguments": '
        rules.append(f'function{number}: {_quoted(head)} @{ARGUMENTS}{number} "}}"')
        grammars.append({"name": f"{ARGUMENTS}{number}", **_arguments(function, place, tools)})
    any_function = "(" + " | ".join(f"function{number}" for number in range(len(rules))) + ")"
    if form.is_list:
        rest = f'(", " {any_function})*' if tools.is_parallel else ""
        rules.append(f'calls: {start} "[" {any_function} {rest} "]" {end}')
    else:
        space = _quoted(form.space) if form.space else ""
        rest = r'("\n" call)*' if tools.is_parallel else ""
        rules += [f"call: {start} {space} {any_function} {space} {end}", f"calls: call {rest}"]
    return rules, grammars


def _arguments(function: dict[str, Any], place: str, tools: ToolUse) -> Grammar:
    if tools.choice == "auto" and not function.get("strict"):
        return json_grammar({"type": "object"}, place)
    schema = function.get("parameters") or _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise RequestError(400, f'{place}.parameters.type must be "object", got {shown(schema["type"])}', "tools")
    try:
        grammar = json_grammar({"type": "object", **schema}, f"{place}.parameters")
    except RequestError as error:
        raise RequestError(400, error.message, "tools") from None
    return grammar


def _token(tokenizer: Tokenizer, marker: str) -> str:
    """A marker in a grammar: a special token by its id, or a text."""
    ids = {name: token for token, name in tokenizer.token_names.items()}
    return f"<[{ids[marker]}]>" if marker in ids else _quoted(marker)


def _quoted(text: str) -> str:
    return json_text(text, ensure_ascii=False)
