# SPDX-License-Identifier: Apache-2.0
"""Render chat templates in a process with limits on time and memory: a template is somebody else's program.

Reads a line of JSON from standard input for each conversation and writes one. Jinja is set up as for transformers'
`apply_chat_template` (utils/chat_template_utils.py), and strings know which of their characters are the template's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sporeloom.core.bounded_process import MEMORY_BYTES, serve
from sporeloom.data.marked_text import MarkedText, concat, formatted, marked, marks_of

MAX_TEXT = 4 << 20
"""Maximum number of characters of a rendered conversation beyond four times its input."""
RUNS = re.compile(b"\0+|\1+")
LITERAL, JOINED = "sporeloom_literal", "sporeloom_joined"
FORGETFUL = ("safe", "e", "escape", "forceescape", "wordwrap", "striptags", "urlize")
"""Filters whose result does not show which of its characters are the template's."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with the settings of transformers."""

    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters |= {"tojson": _tojson, "join": _join, LITERAL: _literal, JOINED: _joined}
        self.filters |= {name: _of_content(name, self.filters[name]) for name in FORGETFUL}
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a string as the sandbox allows it."""
        allowed, text = super().wrap_str_format(value), getattr(value, "__self__", None)
        if allowed is None or not isinstance(text, MarkedText) or value.__name__ != "format":
            return allowed
        return lambda *args, **kwargs: formatted(text, allowed, args, kwargs)

    @functools.lru_cache(maxsize=16)  # noqa: B019  # there is one environment
    def read(self, source: str) -> Template:
        """A template whose own text is marked."""
        tree = LiteralMarker().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree, "template", "template"), self.make_globals(None))


def _of_content(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Allow a filter only on text that no template wrote; else names of special tokens would silently become text."""

    @functools.wraps(apply)
    def filtered(*given: Any, **more: Any) -> Any:
        if any(isinstance(value, str) and any(marks_of(value)) for value in given[:2]):
            raise TemplateError(
                f"the filter {name} is applied to the template's own text, whose special tokens would be lost: leave it out, "
                "or apply it to what a message says alone"
            )
        return apply(*given, **more)

    return filtered


class Generation(Extension):
    """`{% generation %}`, by which templates name what an assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return caller()


class LiteralMarker(NodeTransformer):
    """Marks literals when they are evaluated. Not before: Jinja would fold them into plain strings."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return _filter(nodes.Const(node.data), LITERAL, node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        return _filter(node, LITERAL, node) if isinstance(node.value, str) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), JOINED, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Const):  # a key
            node.node = self.visit(node.node)
            return node
        self.generic_visit(node)
        return node


def _filter(value: nodes.Expr, name: str, of: nodes.Node) -> nodes.Node:
    return nodes.Filter(value, name, [], [], None, None).set_lineno(of.lineno)


@pass_context
def _literal(_: Any, text: str) -> str:
    return MarkedText(text, b"\1" * len(text))


@pass_context
def _joined(_: Any, parts: Iterable[Any]) -> str:
    return concat(map(str, parts))


@pass_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return MarkedText(str(d), marks_of(str(d))).join(map(str, parts))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def answer(environment: TemplateEnvironment, line: bytes) -> dict[str, Any]:
    """Answer the request of a line: the rendered text and the lengths of its runs, a message's and the template's
    alternating."""
    asked = json.loads(line)
    try:
        template = environment.read(asked["template"])
        if asked.get("messages") is None:
            return {}
        messages = [
            {key: marked(value, key == "role") for key, value in message.items()} for message in asked["messages"]
        ]
        text = template.render(
            **{
                **marked(asked["special"], True),
                **marked(asked["variables"], False),
                "tools": marked(asked.get("tools"), False),
                "documents": None,
                "messages": messages,
                "add_generation_prompt": asked["add_generation_prompt"],
            }
        )
        if len(text) > MAX_TEXT + 4 * len(line):
            raise ValueError(f"it makes {len(text):,} characters of {len(line):,}")
        runs = [len(run) for run in RUNS.findall(marks_of(text))]
        return {"text": text, "runs": runs if not text or marks_of(text)[0] == 0 else [0, *runs]}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end, or is nested too deeply"}
    except TemplateError as error:
        line_number = getattr(error, "lineno", None)
        return {"error": f"{f'line {line_number}: ' if line_number else ''}{error}"}
    except Exception as error:  # exceptions of a template's expressions
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer until standard input ends."""
    environment = TemplateEnvironment()
    serve(lambda line: answer(environment, line))
