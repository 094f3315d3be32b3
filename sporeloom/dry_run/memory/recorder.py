# SPDX-License-Identifier: Apache-2.0
"""Records allocations of a step in logical time: one tick for each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sporeloom.dry_run.memory.labels import Label
from sporeloom.dry_run.memory.liveness import Lifetimes


class Recorder:
    """Allocations and frees in order."""

    def __init__(self) -> None:
        self.tick = 0
        self.sizes: list[int] = []
        self.labels: list[int] = []
        """Number of the label of each allocation."""
        self.events: list[int] = []
        """`n + 1`: allocation n is made; `-n - 1`: it is freed."""
        self.ticks: list[int] = []
        """Tick of each event."""
        self.phases: list[tuple[int, str]] = []
        """Tick at which each pass begins, and its name."""
        self.known: dict[Label, int] = {}
        self.earlier: list[int] = []
        """Events before the last `restart`."""
        self.num_initial = 0
        """Number of allocations that existed at that moment; the first events repeat them."""

    def label(self, label: Label) -> int:
        """The number of a label."""
        return self.known.setdefault(label, len(self.known))

    def begin(self, what: str) -> None:
        self.phases.append((self.tick, what))

    def restart(self) -> None:
        """Begin to record again, with what is alive now."""
        freed = {-event for event in self.events if event < 0}
        alive = [event for event in self.events if event > 0 and event not in freed]
        self.earlier, self.events = self.events, alive
        self.num_initial, self.ticks = len(alive), [0] * len(alive)
        self.tick, self.phases = 0, []

    def allocate(self, num_bytes: int, label: int) -> int:
        """Record an allocation and return its number."""
        number = len(self.sizes)
        self.sizes.append(num_bytes)
        self.labels.append(label)
        self.events.append(number + 1)
        self.ticks.append(self.tick)
        return number

    def free(self, number: int) -> None:
        self.events.append(-number - 1)
        self.ticks.append(self.tick)

    def tensor(self, num_bytes: int, label: Label) -> Storage:
        """Allocate a tensor that the caller holds."""
        return Storage(self, self.allocate(num_bytes, self.label(label)))


class Storage:
    """Stands for a tensor: its memory is freed when nothing refers to it any more, as Python frees tensors."""

    __slots__ = ("number", "recorder")

    def __init__(self, recorder: Recorder, number: int):
        self.recorder, self.number = recorder, number

    def __del__(self) -> None:
        self.recorder.free(self.number)


class RecordedProgram:
    """Stands for a rank's graph: a run of it records what it allocates and frees. The inputs belong to the caller."""

    graph: Any = None
    graphs: Sequence[Any] = ()

    def __init__(self, recorder: Recorder, name: str, of: Lifetimes, labels: Sequence[Label]):
        self.recorder, self.name, self.of = recorder, name, of
        self._labels = [recorder.label(label) for label in labels]
        self.num_runs = 0
        self._given: Sequence[Any] = ()
        """Inputs of the last run: MindSpore's executor holds them until the next one."""

    def compile(self, inputs: Sequence[Any]) -> None:
        """Do nothing: there are no kernels to choose."""

    def run(self, inputs: Sequence[Any]) -> Any:
        """Record a run. Returns the storages of the outputs, or that of the only one."""
        recorder, of, labels = self.recorder, self.of, self._labels
        self.num_runs += 1
        self._given = inputs
        recorder.begin(f"{self.name}, run {self.num_runs}")
        numbers = [-1] * len(of.sizes)
        for born, dying in zip(of.born, of.dying, strict=True):
            recorder.tick += 1
            for storage in born:
                numbers[storage] = recorder.allocate(of.sizes[storage], labels[storage])
            for storage in dying:
                recorder.free(numbers[storage])
        made: dict[int | None, Storage] = dict(enumerate(inputs))
        for output in of.outputs:
            if output not in made:
                number = recorder.allocate(0, 0) if output is None else numbers[output]
                made[output] = Storage(recorder, number)
        outputs = [made[output] for output in of.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
