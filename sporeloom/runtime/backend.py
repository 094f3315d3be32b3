# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of whatever computes. Here it is one device: MindSpore itself, and nobody else to hear of.

`native` is several Ascend or GPU devices, `cpu` several processes that execute MindSpore's graphs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.errors import ConfigError
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.layouts import ParameterLayout
from sporeloom.strategy.config import Strategy


def _fast_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Devices keep MindSpore's own way to compile: the faster one was never tried on them."""
    return faster_compilation() if ms.get_context("device_target") == "CPU" else contextlib.nullcontext()


class Backend:
    """How one process of a job computes, and what it hears of the others."""

    partitions: ClassVar[bool] = False
    """Whether graphs are partitioned here, not by MindSpore."""
    finds_nan: ClassVar[bool] = False
    """Whether each node of a graph can be looked into; see `look_for_nan`."""

    def __init__(self, strategy: Strategy, rank: int = 0):
        self.strategy, self.rank = strategy, rank
        self.layouts: dict[str, ParameterLayout] = {}
        """Of every parameter and optimizer state that was compiled for several devices."""
        self.groups: dict[str, list[int]] = {}
        """Communication groups that the compiler made: name -> ranks."""
        self.rounded: Counter[str] = Counter()
        """Kinds of operators of the largest graph that are computed in float32 and give bfloat16, and how many of each."""
        self.told_of_graph = ""
        """Of the latest graph: what ranks send, and what all of them compute whole; where it is known."""
        self._ran: set[tuple[Any, ...]] = set()
        """Cells and the inputs they were called with."""

    def prepare(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        """Compile `cell` for inputs like these."""
        with _fast_on_cpu():
            cell.compile(*inputs)

    def look_at(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        """Hold the graph of `cell` against what one device computes, where it is not partitioned here, which does so.

        Raises:
            ConfigError: it is something else.
        """

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        """Call `cell` with the whole batch."""
        key = (id(cell), cell.training, *((each.shape, each.dtype) for each in inputs))
        if key in self._ran:
            return cell(*inputs)
        self._ran.add(key)
        with _fast_on_cpu():  # unless it was prepared, the first call compiles
            return cell(*inputs)

    def bring_up_to_date(self) -> None:
        """Let all stages of a pipeline that compute with a parameter have its current value. All ranks call it."""

    def is_current(self, parameter: Parameter) -> bool:
        """Whether no other stage of a pipeline has written a parameter that this rank holds, too."""
        return True

    def all_reduce(self) -> ops.AllReduce | None:
        """The operator that adds a number up over all ranks, for use in a graph; None on one device."""
        return None

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        """What rank `source` gave, on every rank; all give an array of one shape and dtype."""
        return array

    def share(self, value: Any, source: int) -> Any:
        """What rank `source` gave, a value that JSON can hold, on every rank; the others' is not looked at."""
        return value

    def largest(self, value: int) -> int:
        """The largest of what the ranks gave, on every rank."""
        return value

    def total(self, value: float) -> float:
        """The sum of what the ranks gave, on every rank."""
        return value

    def agree(self, problems: Sequence[str]) -> None:
        """Wait for all ranks, which all call it with what is wrong on each.

        Raises:
            ConfigError: something is on one of them: the first that has any tells all, so that none waits for another.
        """
        size = self.strategy.mesh.size
        if found := self.largest(size - self.rank if problems else 0):
            raise ConfigError(self.share(list(problems), size - found))

    def look_for_nan(self) -> None:
        """Look at every node of the graphs compiled from now on.

        Raises:
            ConfigError: they are not partitioned here.
        """
        raise ConfigError("--find-nan: only graphs that CPU processes execute can be looked into")

    def first_not_finite(self) -> list[str] | None:
        """Operators that made numbers that are not finite out of finite ones in the last run, with their ranks, on all ranks;
        None: nobody looked."""
        return None

    def on_lost_rank(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with a line that names it when another rank is gone, before this process ends for it."""

    def watch_for(self, seconds: float) -> None:
        """Let every rank say where it is when one is in a collective for so long."""

    def announce_step(self, step: int) -> None:
        """Let the other ranks know how far this one is, for the message should it be killed."""

    def close(self) -> None:
        """Leave the job in good order; also done when the process ends."""
