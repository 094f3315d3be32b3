# SPDX-License-Identifier: Apache-2.0
"""What is called with Tensors nested in lists, tuples and dicts, and gives such: for a `Call`, which takes and gives Tensors.

What it is given is written into a function of the Tensors in it, as source text, which is what MindSpore compiles.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

Shown = Any
"""`tensor`, or a list of `literal`, `list`, `tuple` or `dict` and what is in it; JSON can hold it."""

_functions: dict[str, Any] = {}
"""By source text."""
_NAME = "_call_of_tensors"


class UnknownArgumentError(ValueError):
    """An argument is no Tensor, number or text, nor a list, tuple or dict of these."""


@dataclass(frozen=True)
class Arguments:
    """What something is called with."""

    tensors: tuple[Tensor, ...]
    source: str
    """Of the arguments in a call, the Tensors named a0, a1, ..."""

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """
        Raises:
            UnknownArgumentError: one of them cannot be given to a graph.
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
    """Text of an argument; None if there is none for it."""
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
    """What one device gives, of the Tensors that a `Call` gave."""
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
    """Calls something with these arguments. MindSpore reads its source, which no file has, as `inspect` does."""
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
