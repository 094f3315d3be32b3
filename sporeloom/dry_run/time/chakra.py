# SPDX-License-Identifier: Apache-2.0
"""A simulated step as Chakra execution traces, a file a rank, for ASTRA-sim and other simulators of networks.

A file is a sequence of protocol buffers, each after its length: GlobalMetadata, then a Node for every task.

Source: schema/protobuf/et_def.proto of mlcommons/chakra, version 0.0.4.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from sporeloom.core.files import write_atomically, write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.dry_run.time.simulate import COMPUTE, GroupAxis, RankTime, Task

VERSION = "0.0.4"
COMPUTE_NODE, SEND_NODE, RECEIVE_NODE, COLLECTIVE_NODE = 4, 5, 6, 7
COLLECTIVE_TYPES = {"AllReduce": 0, "AllGather": 2, "AlltoAll": 6, "ReduceScatter": 7}
INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29
"""Fields of AttributeProto, by the type of the value."""
GROUPS = "comm_groups.json"


def write_chakra(step: Mapping[int, RankTime], num_ranks: int, folder: Path) -> None:
    """Write step.RANK.et for every rank, and comm_groups.json: name of a process group -> its ranks.

    Args:
        step: first rank of each stage -> its tasks; the other ranks of a stage have the same.
    """
    firsts, groups = sorted(step), dict[tuple[int, ...], str]()
    for rank in range(num_ranks):
        first = max(each for each in firsts if each <= rank)
        content = b"".join(encode(step[first], rank, rank - first, groups))
        write_atomically(folder / f"step.{rank}.et", partial(Path.write_bytes, data=content))
    names = {name: list(ranks) for ranks, name in groups.items()}
    write_text_atomically(folder / GROUPS, json_text(names, indent=1))


def encode(of: RankTime, rank: int, offset: int, groups: dict[tuple[int, ...], str]) -> Iterator[bytes]:
    """The messages of a rank's file.

    Args:
        offset: distance of the rank from the first of its stage.
        groups: names of process groups, to which those of this rank are added.
    """
    yield _delimited(_text(1, VERSION))
    for number, (task, deps, start, seconds) in enumerate(flattened(of)):
        data, control = deps
        node = [_number(1, number), _text(2, task.name), _number(3, _node_type(task))]
        node += [_packed(4, control), _packed(5, data)]
        node += [_number(6, round(start * 1e6)), _number(7, round(seconds * 1e6))]
        node += [_field(10, attribute) for attribute in _attributes(task, rank, offset, groups)]
        yield _delimited(b"".join(node))


Dependencies = tuple[list[int], list[int]]
"""Tasks whose results a task needs, and the one before it in its stream."""


def flattened(of: RankTime, start: float = 0.0) -> list[tuple[Task, Dependencies, float, float]]:
    """All tasks of a rank with their dependencies, start and duration. A task that stands for a graph is replaced by the
    tasks of the graph, which start after what it waits for; what needs the graph waits for the last task of each stream."""
    found: list[tuple[Task, Dependencies, float, float]] = []
    ends: list[list[int]] = []
    """For each task of the rank, the tasks with which it ends."""
    last: dict[str, list[int]] = {}
    for task, (begin, end, _) in zip(of.tasks, of.spans, strict=True):
        data = sorted({number for needed in task.needs for number in ends[needed]})
        control = [number for number in last.get(task.stream, []) if number not in data]
        if task.inside is None:
            ends.append([len(found)])
            found.append((task, (data, control), start + begin, end - begin))
        else:
            base, streams = len(found), dict[str, int]()
            for inner, (needs, before), at, seconds in flattened(task.inside, start + begin):
                own = [base + number for number in needs], [base + number for number in before]
                streams[inner.stream] = len(found)
                found.append((inner, own if any(own) else (data, control), at, seconds))
            ends.append(sorted(streams.values()))
        last[task.stream] = ends[-1]
    return found


def _node_type(task: Task) -> int:
    types = {"Send": SEND_NODE, "Receive": RECEIVE_NODE, **dict.fromkeys(COLLECTIVE_TYPES, COLLECTIVE_NODE)}
    return COMPUTE_NODE if task.stream == COMPUTE else types[task.kind]


def _attributes(task: Task, rank: int, offset: int, groups: dict[tuple[int, ...], str]) -> Iterator[bytes]:
    kind = _node_type(task)
    yield _attribute("is_cpu_op", BOOL, 0)
    if kind == COMPUTE_NODE:
        yield _attribute("num_ops", INT64, task.flops)
        return
    yield _attribute("comm_size", INT64, task.num_bytes)
    if kind == COLLECTIVE_NODE:
        members = group_of(rank, task.group)
        name = groups.setdefault(members, str(len(groups)))
        yield _attribute("comm_type", INT64, COLLECTIVE_TYPES[task.kind])
        yield _text_attribute("pg_name", name)
        return
    source, target = task.pair
    yield _attribute("comm_src", INT32, source + offset)
    yield _attribute("comm_dst", INT32, target + offset)
    yield _attribute("comm_tag", INT32, zlib.crc32(repr(task.meets).encode()) & 0x7FFFFFFF)


def group_of(rank: int, axes: Sequence[GroupAxis]) -> tuple[int, ...]:
    """The ranks of the communication group of a rank along some axes."""
    members = [rank - sum(axis.stride * (rank // axis.stride % axis.degree) for axis in axes)]
    for axis in axes:
        members = [member + axis.stride * index for member in members for index in axis.chosen]
    return tuple(sorted(members))


# Protocol buffers


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(content)


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _packed(field: int, values: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, values))
    return _field(field, content) if content else b""


def _attribute(name: str, type_field: int, value: int) -> bytes:
    return _text(1, name) + _number(type_field, value)


def _text_attribute(name: str, value: str) -> bytes:
    return _text(1, name) + _text(STRING, value)
