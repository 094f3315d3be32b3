# SPDX-License-Identifier: Apache-2.0
"""The interface between the engine and a backend, implemented here for one device, on which MindSpore runs alone.

`spmd` and `by_mindspore` implement it for Ascend or GPU devices, `cpu` for CPU processes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.tensor_slice import TensorSlice


def _fast_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Compiler settings: the faster ones on CPU only, because they have never been tried on devices."""
    return faster_compilation() if ms.get_context("device_target") == "CPU" else contextlib.nullcontext()


class ParameterLayout(Protocol):
    """The part of a parameter that each rank of a stage holds."""

    @property
    def optimizer_group(self) -> str:
        """Group over which optimizer parallelism (ZeRO) shards dim 0 further; empty if `stored_slice` has that already."""
        ...

    def operator_slice(self, global_shape: Shape, rank: int) -> TensorSlice:
        """The part of the full tensor that the operators of `rank` use."""
        ...

    def stored_slice(self, global_shape: Shape, rank: int, groups: Mapping[str, Sequence[int]]) -> TensorSlice:
        """The part of the full tensor that `rank` stores."""
        ...


class Backend:
    """The computation of one process of a job, and its communication with the others."""

    partitions: ClassVar[bool] = False
    """Whether this package partitions graphs, not MindSpore."""
    finds_nan: ClassVar[bool] = False
    """Whether every node of a graph can be inspected; see `look_for_nan`."""

    def __init__(self, strategy: Strategy, rank: int = 0):
        self.strategy, self.rank = strategy, rank
        self.layouts: dict[str, ParameterLayout] = {}
        """Layouts of all parameters and optimizer states that were compiled for several devices."""
        self.groups: dict[str, list[int]] = {}
        """Communication groups: name -> ranks."""
        self.rounded: Counter[str] = Counter()
        """Kinds of operators of the largest graph whose float32 results are rounded to bfloat16 -> how many of each."""
        self.graph_summary = ""
        """Communication and replicated computation of the latest graph, for logs; empty if unknown."""
        self._ran: set[tuple[Any, ...]] = set()
        """Cells with the shapes and types of inputs that they were called with."""

    def prepare(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> None:
        """Compile `cell` for inputs of these shapes and types."""
        with _fast_on_cpu():
            cell.compile(*inputs)

    def run(self, cell: nn.Cell, inputs: Sequence[Tensor]) -> Any:
        """Call `cell` with the full batch."""
        key = (id(cell), cell.training, *((each.shape, each.dtype) for each in inputs))
        if key in self._ran:
            return cell(*inputs)
        self._ran.add(key)
        with _fast_on_cpu():  # unless it was prepared, the first call compiles
            return cell(*inputs)

    def bring_up_to_date(self) -> None:
        """Bring the current value of every parameter to all pipeline stages that compute with it. All ranks call this
        method."""

    def is_current(self, parameter: Parameter) -> bool:
        """Whether no other pipeline stage has updated a parameter that this rank holds as well."""
        return True

    def all_reduce(self) -> ops.AllReduce | None:
        """The operator that sums over all ranks, for use in a graph; None on one device."""
        return None

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        """Broadcast the array of rank `source`; all ranks pass an array of the same shape and dtype."""
        return array

    def broadcast_value(self, value: Any, source: int) -> Any:
        """Broadcast a JSON-serializable value of rank `source`; values of other ranks are ignored."""
        return value

    def max_over_ranks(self, value: int) -> int:
        """Maximum of a value over all ranks, on every rank."""
        return value

    def sum_over_ranks(self, value: float) -> float:
        """Sum of a value over all ranks, on every rank."""
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.max_over_ranks(0)

    def agree(self, problems: Sequence[str]) -> None:
        """Collective check for problems, called by all ranks, each with its own problems.

        Raises:
            ConfigError: a rank has problems: those of the first such rank are broadcast, so that no rank waits for another.
        """
        size = self.strategy.mesh.size
        if found := self.max_over_ranks(size - self.rank if problems else 0):
            raise ConfigError(self.broadcast_value(list(problems), size - found))

    def look_for_nan(self) -> None:
        """Inspect every node of the graphs that are compiled from now on.

        Raises:
            ConfigError: this package does not partition the graphs.
        """
        raise ConfigError("--find-nan: only graphs that CPU processes execute can be looked into")

    def record(self, folder: Path, keep: int) -> None:
        """Record what the last `keep` steps need to run again alone, in a folder that all ranks share.

        Raises:
            ConfigError: this package does not partition the graphs.
        """
        raise ConfigError("--record: only steps of CPU processes can be recorded")

    def begin_step(self, step: int) -> None:
        """Record the next run of a Cell, if there is a recording, as this step."""

    def first_not_finite(self) -> list[str] | None:
        """Operators that produced non-finite numbers from finite ones in the last run, with their ranks, on all ranks;
        None if nodes are not inspected."""
        return None

    def on_lost_rank(self, tell: Callable[[str], None]) -> None:
        """Register `tell`, which is called with a line that names a lost rank before this process exits because of it."""

    def watch_for(self, seconds: float) -> None:
        """Set the seconds in a collective after which every rank reports its position."""

    def seconds_of_communication(self) -> float | None:
        """Seconds so far in the collectives and messages of graphs, in which this rank computes nothing; None: unknown."""
        return None

    def announce_step(self, step: int) -> None:
        """Report the latest step of this rank to the others, for their message if it is killed."""

    def close(self) -> None:
        """Leave the job gracefully; also called when the process exits."""
