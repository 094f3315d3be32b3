# SPDX-License-Identifier: Apache-2.0
"""One rank's graph as data, and the message for a network that MindSpore cannot compile."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.core.lines import first_line
from sporeloom.mindspore_compat.names import mind_ir, numpy_type
from sporeloom.runtime.backend import ParameterLayout
from sporeloom.runtime.spmd.value_shards import ValueShard
from sporeloom.strategy.layout import Shape

DECIDES_BY_DATA = (
    "has an `if` or `while` on a Tensor, which is not partitioned; compute every way and choose with "
    "ops.where(condition, a, b), or let a number given to __init__ decide"
)
BRANCHES = ("if ", "elif ", "while ")
_FRAME = re.compile(r"In file (\S+?):(\d+)")
_OUR_PLUMBING = (
    str(Path(ms.__file__).parent),
    *(str(Path(__file__).parents[2] / part) for part in ("runtime", "parallel")),
    "<",  # source text made by `runtime.calls`
)


@dataclass(frozen=True)
class RankGraph:
    """One rank's graph of a Cell, before it is lowered or executed."""

    model: mind_ir.ModelProto = field(repr=False)
    layouts: Mapping[str, ParameterLayout]
    groups: dict[str, list[int]]
    """Communication groups that the compiler created: name -> ranks."""
    rank: int
    values: Mapping[str, ValueShard] = field(default_factory=dict, repr=False)
    """Node or input -> the value of one device's graph that it has a part of, if these were requested."""

    @property
    def held_layouts(self) -> dict[str, ParameterLayout]:
        """Layouts of the parameters in this rank's graph."""
        held = self.parameters
        return {name: layout for name, layout in self.layouts.items() if name in held}

    @property
    def parameters(self) -> dict[str, Shape]:
        """Local shape of each parameter in this rank's graph."""
        return {p.name.rpartition(":")[2]: tuple(p.dims) for p in self.model.graph.parameter}


def refusal(error: Exception, what: str) -> str:
    """The message: `what` happened, the first line of MindSpore's error, and the last source line outside of MindSpore
    and this package that led to it."""
    said = str(error).strip()
    first = first_line(error)
    message = f"{what}: {first}"
    if "has multiple users" in first:
        message += "; operators that use it got different layouts: write a rule for each"
    frames = [(file, int(line)) for file, line in _FRAME.findall(said) if not file.startswith(_OUR_PLUMBING)]
    if not frames:
        return message
    code = linecache.getline(*frames[-1]).strip()
    decides = code.startswith(BRANCHES)
    return f"{message}; at {frames[-1][0]}:{frames[-1][1]}, {code}" + (f": it {DECIDES_BY_DATA}" if decides else "")


def remove_dump(rank: int) -> None:
    """Remove the dump of a failed graph, which MindSpore writes to the working directory."""
    folder = Path(f"rank_{rank}/om")
    (folder / "analyze_fail.ir").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it does not exist, or contains other files
        os.removedirs(folder)


def describe_inputs(arrays: Sequence[NDArray[Any] | Tensor]) -> list[tuple[Shape, Any]]:
    """Shape and NumPy dtype of each input."""
    described = []
    for array in arrays:
        dtype = numpy_type(array.dtype) if isinstance(array, Tensor) else np.asarray(array).dtype
        described.append((tuple(array.shape), dtype))
    return described
