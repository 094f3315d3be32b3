# SPDX-License-Identifier: Apache-2.0
"""Calls with Tensors nested in lists, tuples and dicts, as arguments and as results, for a `Call` with Tensors only.

The arguments are written as source text into a function of the Tensors in them, which MindSpore compiles.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

Shown = Any
"""JSON-serializable structure of a nested value: `tensor`, or a list of `literal`, `list`, `tuple` or `dict` and its
content."""

_functions: dict[str, Any] = {}
"""Source text -> function."""
_NAME = "_call_of_tensors"


class UnknownArgumentError(ValueError):
    """An argument is not a Tensor, number or text, nor a list, tuple or dict of these."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call."""

    tensors: tuple[Tensor, ...]
    source: str
    """Source text of the arguments; the Tensors are named a0, a1, ..."""

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Collect the Tensors in the arguments of a call, and write the arguments as source text.

        Raises:
            UnknownArgumentError: an argument cannot be passed to a graph.
        """
        tensors: list[Tensor] = []
        texts = []
        for name, value in [*((str(place), each) for place, each in enumerate(args, 1)), *kwargs.items()]:
            text = _source(value, tensors)
            if text is None:
                raise UnknownArgumentError(f"argument {name} is {value!r:.40}")
            texts.append(text if name.isdigit() else f"{name}={text}")
        return cls(tuple(tensors), ", ".join(texts))


def _source(value: Any, tensors: list[Tensor]) -> str | None:
    """Source text of an argument; None if it has none."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"a{len(tensors) - 1}"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value) if value not in (float("inf"), float("-inf")) and value == value else f"float('{value}')"
    if type(value) is dict:
        items = [(repr(key), _source(each, tensors)) for key, each in value.items() if type(key) in (str, int)]
        whole = len(items) == len(value) and all(text is not None for _, text in items)
        return "{" + ", ".join(f"{key}: {text}" for key, text in items) + "}" if whole else None
    if isinstance(value, (list, tuple)):
        texts = [_source(each, tensors) for each in value]
        if any(text is None for text in texts):
            return None
        inside = "".join(f"{text}, " for text in texts)
        return f"[{inside}]" if type(value) is list else f"({inside})"
    return None


def nested(structure: Shown, given: Any) -> Any:
    """Restore the nested result of one device from the Tensors that a `Call` returned."""
    return _nested(structure, iter(given if isinstance(given, tuple) else (given,)))


def _nested(structure: Shown, tensors: Iterator[Tensor]) -> Any:
    if structure == "tensor":
        return next(tensors)
    kind, *said = structure
    if kind == "literal":
        return said[0]
    items = [_nested(each, tensors) for each in said[-1]]
    if kind == "dict":
        return dict(zip(said[0], items, strict=True))
    return items if kind == "list" else tuple(items)


def calling(arguments: Arguments) -> Any:
    """A function that calls its first argument with these arguments. Its source text is registered for `inspect`, by
    which MindSpore reads it."""
    names = "".join(f", a{place}" for place in range(len(arguments.tensors)))
    lines = [f"def {_NAME}(called{names}):\n", f"    return called({arguments.source})\n"]
    text = "".join(lines)
    if text not in _functions:
        file = f"<call {len(_functions)}>"
        linecache.cache[file] = len(text), None, lines, file
        made: dict[str, Any] = {"__name__": __name__}
        exec(compile(text, file, "exec"), made)
        _functions[text] = made[_NAME]
    return _functions[text]
