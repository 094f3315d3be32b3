# SPDX-License-Identifier: Apache-2.0
"""Locates branches on the value of a Tensor in a network, for the message that refuses them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn

from sporeloom.parallel.cells import FunctionCell
from sporeloom.runtime.spmd.inlining import BranchError

MAX_SHOWN = 3
_CLASS = re.compile(r"[\w.]+-(\w+)$")
_GRADIENT = re.compile(r"/Grad_(\w+)/")


def why_branching_fails(error: BranchError, cell: nn.Cell) -> str:
    """The message: the branch and its position, why both branches cannot be computed, and an alternative."""
    classes = [found[1] for part in error.place.split("/")[:-1] if (found := _CLASS.fullmatch(part))]
    message = f"{classes[-1] if classes else 'the network'} has an `if` or `while` on a Tensor, and {error}"
    if gradient := _GRADIENT.search(error.place):
        message = f"the gradient of {gradient[1]} in MindSpore has an `if` on a Tensor, and {error}"
    places = list(_places(cell, classes[-1])) if classes else []
    at = f"; at {', or '.join(places[:MAX_SHOWN])}" if places else ""
    return (
        f"{message}{at}; compute every way and choose with ops.where(condition, a, b), what is written as well, or let a "
        "number given to __init__ decide"
    )


def _places(cell: nn.Cell, class_name: str) -> Iterator[str]:
    """Source lines with a branch in the code of a Cell of this class."""
    of_class = (each for _, each in cell.cells_and_names() if type(each).__name__ == class_name)
    owner = next(of_class, None)
    if owner is None:
        return
    code: Any = owner.function if isinstance(owner, FunctionCell) else type(owner).construct
    try:
        lines, first = inspect.getsourcelines(code)
        file, tree = inspect.getsourcefile(code), ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):  # it has no source text
        return
    if str(file).startswith(str(Path(ms.__file__).parent)):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield f"{file}:{first + node.lineno - 1}, {lines[node.lineno - 1].strip()}"
