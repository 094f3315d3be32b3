# SPDX-License-Identifier: Apache-2.0
"""Find the first operator, rank and tensor in which two recordings of the same program differ.

What one rank computes wrongly spreads to the others by messages. The cause is where something differs although all that it
was made of is equal: a parameter before the first step that differs, an operator of equal inputs, a message of which every
rank gave the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.recording import Array, RecordedCall, RecordedMessage, Recording, StepRecord
from sporeloom.runtime.cpu.replay import NodeResult, replay
from sporeloom.runtime.spmd.value_shards import ValueShard
from sporeloom.strategy.layout import Shape

Kind = Literal["parameter", "operator", "message", "input"]
CAUSES: tuple[Kind, ...] = ("parameter", "operator", "message", "input")
"""Kinds of differences, those that follow from no other first."""


NOT_AGAIN = ", which is another when the step runs again"
RECEIVED = ", which was received"


@dataclass(frozen=True)
class Message:
    """A collective of a graph, or a value that one pipeline stage sent to another, the same on all ranks of it."""

    tag: str
    call: int = -1
    """Number of the run of the graph; none outside of graphs."""
    program: str = ""


@dataclass(frozen=True)
class Difference:
    """The first difference of a rank in a step."""

    step: int
    rank: int
    kind: Kind
    what: str
    """Kind and operator, or the parameter."""
    tensor: str
    details: str = ""
    message: Message | None = None
    """The message that was received."""
    first: int = 0
    """Position in a message of the first number that differs."""

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}: {self.what}, tensor {self.tensor}{self.details}"


class OtherProgramError(Exception):
    """The ranks of two recordings run other graphs, so only whole values can be compared."""


def common_steps(a: Recording, b: Recording) -> list[int]:
    """The steps that all ranks of both have, in order.

    Raises:
        ConfigError: there is none.
    """
    if steps := sorted(set(a.common_steps()) & set(b.common_steps())):
        return steps
    raise ConfigError(
        f"{b.run}: has steps {b.common_steps()}, {a.run} {a.common_steps()}; none is in both: record more with --record"
    )


def first_difference(a: Recording, b: Recording, steps: Sequence[int]) -> Difference | None:
    """The cause of the first difference between two recordings; None if they are equal in these steps.

    Raises:
        ConfigError: a record was changed.
        OtherProgramError: they are of other meshes or programs.
    """
    if a.roots.keys() != b.roots.keys():
        raise OtherProgramError
    for step in steps:
        records = {rank: (a.read(rank, step), b.read(rank, step)) for rank in sorted(a.roots)}
        found = [d for rank, pair in records.items() if (d := _of_rank(a, b, *pair, is_first=step == steps[0]))]
        if found:
            causes = [each for each in found if not _is_spread(each, records)] or found
            first = min(causes, key=lambda each: (CAUSES.index(each.kind), each.rank))
            return _of_summing_rank(first, causes, records)
    return None


def _of_rank(a: Recording, b: Recording, one: StepRecord, other: StepRecord, is_first: bool) -> Difference | None:
    """The first difference of a rank in a step."""
    if one.state.keys() != other.state.keys() or [c.program for c in one.calls] != [c.program for c in other.calls]:
        raise OtherProgramError
    if is_first and any(_parts(a, one.rank, c.program) != _parts(b, one.rank, c.program) for c in one.calls):
        raise OtherProgramError
    for name, stored in one.state.items():
        if stored.sha256 != other.state[name].sha256:
            details = ", before the first common step" if is_first else ", which was equal after the step before"
            return Difference(one.step, one.rank, "parameter", f"parameter {name}", name, details)
    if _is_equal(one, other):
        return None
    return next(_in_calls(a, b, one, other), None)


@cache
def _parts(recording: Recording, rank: int, program: str) -> tuple[list[ValueShard], dict[str, tuple[Shape, Shape]]]:
    """The parts of values that a graph has; names of tensors may differ between two compilations."""
    values, parameters = recording.shards(rank, program)
    return sorted((replace(each, name="") for each in values.values()), key=lambda each: each.key), parameters


def _is_equal(one: StepRecord, other: StepRecord) -> bool:
    def values(record: StepRecord) -> list[object]:
        calls = [
            (
                [each.sha256 for each in call.inputs],
                [(each.tag, each.sent, each.received.sha256) for each in _by_tag(call)],
                call.outputs,
            )
            for call in record.calls
        ]
        return [calls, record.transfers, record.after]

    return values(one) == values(other)


def _by_tag(call: RecordedCall) -> list[RecordedMessage]:
    return sorted(call.messages.values(), key=lambda each: each.tag)


def _in_calls(a: Recording, b: Recording, one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    """Differences of a step whose parameters were equal, in the order of the program."""
    step, rank = one.step, one.rank
    mine, theirs = (replay(recording, rank, step, traced=True) for recording in (a, b))
    for number, (call, again) in enumerate(zip(one.calls, other.calls, strict=True)):
        yield from _in_transfers(one, other, number)
        for position, (x, y) in enumerate(zip(call.inputs, again.inputs, strict=False)):
            if x.sha256 != y.sha256:
                what = f"input {position} of {call.program}"
                yield Difference(step, rank, "input", what, str(position), f", of shape {list(x.shape)}")
        if [each.place for each in mine.trace[number]] != [each.place for each in theirs.trace[number]]:
            raise OtherProgramError
        for pair in zip(mine.trace[number], theirs.trace[number], strict=True):
            yield from _in_node(one, other, number, pair)
        for position, (left, right) in enumerate(zip(call.outputs, again.outputs, strict=True)):
            if left != right:
                details = NOT_AGAIN if mine.differences or theirs.differences else ""
                what = f"output {position} of {call.program}"
                yield Difference(step, rank, "operator", what, str(position), details)
    yield from _in_transfers(one, other, len(one.calls))
    for name, after in one.after.items():
        if after != other.after[name]:
            yield Difference(step, rank, "operator", f"update of parameter {name}", name)


def _in_node(
    one: StepRecord, other: StepRecord, call: int, pair: tuple[NodeResult, NodeResult]
) -> Iterator[Difference]:
    """The difference of the results of an operator or a collective."""
    mine, theirs = pair
    step, rank, node = one.step, one.rank, mine.node
    message, again = one.calls[call].messages.get(node), other.calls[call].messages.get(theirs.node)
    if message is None or again is None:
        if mine.sha256 != theirs.sha256:
            yield Difference(step, rank, "operator", mine.place, node)
        return
    if (mine.sent, theirs.sent) != (message.sent, again.sent):
        yield Difference(step, rank, "operator", f"value given to {message.place}", node, NOT_AGAIN)
    if mine.sha256 != theirs.sha256:
        key = Message(message.tag, call, one.calls[call].program)
        first = _first_differing(one.array(message.received), other.array(again.received))
        yield Difference(step, rank, "message", message.place, node, RECEIVED, key, first)


def _in_transfers(one: StepRecord, other: StepRecord, call: int) -> Iterator[Difference]:
    """Differences of what other stages sent before a call."""
    received = [
        [each for each in record.transfers if each.is_received and each.call == call] for record in (one, other)
    ]
    for mine, theirs in zip(*received, strict=False):
        if mine.sha256 != theirs.sha256:
            yield Difference(one.step, one.rank, "message", mine.place, mine.tag, RECEIVED, Message(mine.tag))


def _is_spread(found: Difference, records: Mapping[int, tuple[StepRecord, StepRecord]]) -> bool:
    """Whether a difference is of a message of which some rank gave another value."""
    message = found.message
    if message is None:
        return False
    return any(_sent(one, message) != _sent(other, message) for one, other in records.values())


def _sent(record: StepRecord, message: Message) -> list[str]:
    """Hashes of the values that a rank gave to a message; none if it takes no part in it."""
    if message.call < 0:
        return [each.sha256 for each in record.transfers if not each.is_received and each.tag == message.tag]
    call = record.calls[message.call] if message.call < len(record.calls) else None
    if call is None or call.program != message.program:
        return []
    return [each.sent for each in call.messages.values() if each.tag == message.tag]


def _first_differing(x: Array, y: Array) -> int:
    if x.shape != y.shape:
        return 0
    item = x.dtype.itemsize
    return int(np.argmax(np.frombuffer(x.tobytes(), np.uint8) != np.frombuffer(y.tobytes(), np.uint8))) // item


def _of_summing_rank(
    found: Difference, causes: Sequence[Difference], records: Mapping[int, tuple[StepRecord, StepRecord]]
) -> Difference:
    """Prefer, in a sum that is wrong on all ranks in the same way, the rank that computed its wrong part.

    Each rank of a group sums one part of a large array, and the others receive that part from it.
    """
    message = found.message
    if message is None or message.call < 0:
        return found
    group = [rank for rank, (one, _) in sorted(records.items()) if _sent(one, message)]
    wrong = {each.rank: each for each in causes if each.message == message}
    if len(group) < 3 or sorted(wrong) != group or len({each.first for each in wrong.values()}) > 1:
        return found
    size = _size_of(records[found.rank][0], found)
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(size), len(group))])
    return wrong[group[int(np.searchsorted(ends, found.first, "right"))]]


def _size_of(record: StepRecord, found: Difference) -> int:
    assert found.message
    shape = record.calls[found.message.call].messages[found.tensor].received.shape
    return int(np.prod(shape, dtype=np.int64))
