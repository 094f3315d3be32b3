# SPDX-License-Identifier: Apache-2.0
"""Finds the Cells and parameters that a user's function refers to, and that its graph will contain."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from mindspore import Parameter, nn


def cells_of(function: Any) -> Iterator[tuple[str, nn.Cell]]:
    """The Cells that a function refers to."""
    return ((name, value) for name, value in reached_from(function) if isinstance(value, nn.Cell))


def reached_from(function: Any) -> Iterator[tuple[str, Any]]:
    """Values that a function, or a function called by it, refers to by closure, module or argument default; each once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", function)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if isinstance(value, MethodType):
            waiting += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, FunctionType):
            code, module = value.__code__, value.__globals__
            closure = zip(code.co_freevars, value.__closure__ or (), strict=True)
            waiting += [(free, cell.cell_contents) for free, cell in closure if _is_filled(cell)]
            if not value.__module__.startswith("mindspore."):
                waiting += [(used, module[used]) for used in code.co_names if used in module]
            waiting += [(name, default) for default in value.__defaults__ or ()]
        elif _is_compiled_object(value):
            waiting += vars(value).items()
        elif isinstance(value, (list, tuple)) and len(value) < 64:
            waiting += [(f"{name}_{place}", item) for place, item in enumerate(value)]


def parameters_beside(cell: nn.Cell) -> Iterator[Parameter]:
    """Parameters in the graph of a Cell that the Cell does not own: those of objects among its attributes, such as a
    loss scaler."""
    for _, part in cell.cells_and_names():
        for value in vars(part).values():
            if _is_compiled_object(value):
                yield from (each for _, each in reached_from(value) if isinstance(each, Parameter))


def _is_compiled_object(value: Any) -> bool:
    """Whether the value is an object of a class that MindSpore compiles, marked by `jit_class`."""
    return hasattr(value, "__ms_class__") and not isinstance(value, (type, nn.Cell))


def trains(value: Any) -> bool:
    """Whether the value is a parameter that is trained."""
    return isinstance(value, Parameter) and value.requires_grad


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
