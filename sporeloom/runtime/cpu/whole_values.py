# SPDX-License-Identifier: Apache-2.0
"""The values of a recorded step as one device would have them, put together from the parts that ranks have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.recording import Array, Recording, StepRecord
from sporeloom.runtime.cpu.replay import replay
from sporeloom.runtime.spmd.value_shards import ValueShard
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.tensor_slice import TensorSlice


@dataclass
class WholeValue:
    """A value of a step."""

    place: str
    """Kind and operator, or parameter, for reports."""
    name: str
    """Name of the tensor."""
    order: int = 0
    """Position in one device's graph."""
    parts: list[Array] = field(default_factory=list)
    """For each microbatch."""
    owners: list[tuple[int, TensorSlice]] = field(default_factory=list)
    """Ranks, and the entries that each has a part of."""
    differing: int | None = None
    """First rank that has other numbers than another one with the same part."""
    _seen: set[tuple[int, Shape, int]] = field(default_factory=set)

    def add(self, rank: int, microbatch: int, array: Array, shard: ValueShard) -> None:
        """Add the part of a rank."""
        while len(self.parts) <= microbatch:
            self.parts.append(np.zeros(shard.shape, array.dtype))
        where = TensorSlice(shard.start, shard.size)
        if (rank, where) not in self.owners:
            self.owners.append((rank, where))
        everywhere: Any = (*where.slices, ...)  # so that a number without dims is a view, too
        held, key = self.parts[microbatch][everywhere], (microbatch, shard.start, shard.summand)
        if key not in self._seen:
            held += array.astype(held.dtype)
        elif (
            not shard.is_sum and self.differing is None and not np.array_equal(held, array, equal_nan=_is_float(array))
        ):
            self.differing = rank
        self._seen.add(key)


@dataclass
class WholeStep:
    """All values of a step that can be compared."""

    before: dict[str, WholeValue] = field(default_factory=dict)
    """Parameters before the step, by name."""
    computed: dict[str, WholeValue] = field(default_factory=dict)
    """Inputs, and results of operators, by the key of their `ValueShard`."""
    after: dict[str, WholeValue] = field(default_factory=dict)
    """Parameters after the step, by name."""

    @classmethod
    def of(cls, recording: Recording, step: int) -> WholeStep:
        """Run the step of each rank again, and put the values together.

        Raises:
            ConfigError: a record was changed.
        """
        found = cls()
        for rank in sorted(recording.roots):
            found._add_rank(recording, recording.read(rank, step))
        return found

    def _add_rank(self, recording: Recording, record: StepRecord) -> None:
        rank, programs = record.rank, dict.fromkeys(call.program for call in record.calls)
        values, parameters = dict[str, dict[str, ValueShard]](), dict[str, tuple[Shape, Shape]]()
        for name in programs:
            values[name], held = recording.shards(rank, name)
            parameters |= held
        counts, microbatches = Counter[str](), list[int]()
        for call in record.calls:
            microbatches.append(counts[call.program])
            counts[call.program] += 1
        for name in programs:
            self._add_inputs(recording, record, name, values[name])

        def look(number: int, node: str, array: Array) -> None:
            if shard := values[record.calls[number].program].get(node):
                self._add(shard, rank, microbatches[number], array)

        after = replay(recording, rank, record.step, look=look).after
        for name, stored in record.state.items():
            for of, array, when in ((self.before, record.array(stored), "before"), (self.after, after[name], "after")):
                shape, start = parameters.get(name, (array.shape, (0,) * array.ndim))
                shard = ValueShard(name, name, f"parameter {name} {when} the step", 0, shape, start, array.shape)
                of.setdefault(name, WholeValue(shard.place, name)).add(rank, 0, array, shard)

    def _add_inputs(
        self, recording: Recording, record: StepRecord, program: str, values: dict[str, ValueShard]
    ) -> None:
        inputs = mind_ir.ModelProto.FromString(recording.program(record.rank, program)).graph.input
        calls = [call for call in record.calls if call.program == program]
        for position, described in enumerate(inputs):
            if shard := values.get(described.name):
                where = TensorSlice(shard.start, shard.size)
                for microbatch, call in enumerate(calls):
                    array = record.array(call.inputs[position])
                    self._add(shard, record.rank, microbatch, array[where.slices])

    def _add(self, shard: ValueShard, rank: int, microbatch: int, array: Array) -> None:
        value = self.computed.setdefault(shard.key, WholeValue(shard.place, shard.name, shard.order))
        value.add(rank, microbatch, array, shard)


def _is_float(array: Array) -> bool:
    return array.dtype.kind not in "iub"
