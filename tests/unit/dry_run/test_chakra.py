# SPDX-License-Identifier: Apache-2.0
"""Chakra traces, decoded by the wire format of protocol buffers alone, have every task with its dependencies."""

import json

import pytest

from sporeloom.dry_run.time.chakra import GROUPS, group_of, write_chakra
from sporeloom.dry_run.time.simulate import COMPUTE, PASS, GroupAxis, Task, simulate
from sporeloom.partition.grid import DeviceGrid


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    """(number, value) of each field of a message: numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            assert key & 7 == 2, "no other wire type is in these messages"
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value
    assert at == len(data)


def packed(data):
    at, found = 0, []
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


def attribute(data):
    found = dict(fields(data))
    name = found.pop(1).decode()
    ((kind, value),) = found.items()
    return name, value.decode() if kind == 29 else value


def decoded(path):
    """Metadata and nodes of a file."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size, at = varint(data, at)
        messages.append(data[at : at + size])
        at += size
    nodes = []
    for message in messages[1:]:
        node = {"ctrl": [], "data": [], "attr": {}}
        for number, value in fields(message):
            if number == 10:
                name, of = attribute(value)
                node["attr"][name] = of
            elif number in (4, 5):
                node["ctrl" if number == 4 else "data"] = packed(value)
            else:
                node[number] = value.decode() if number == 2 else value
        nodes.append(node)
    return dict(fields(messages[0])), nodes


TP, STAGE = GroupAxis(1, 2, (0, 1)), GroupAxis(2, 2, (0, 1))


def tasks(stage):
    """A graph with a product and a sum that depends on it, then a message from stage 0 to 1."""
    graph = [
        Task("mlp: MatMul", "matmul", COMPUTE, 3e-6, flops=300),
        Task("AllReduce of 2", "AllReduce", "communication", 2e-6, needs=(0,), num_bytes=64, group=(TP,)),
        Task("Add", "memory", COMPUTE, 1e-6),
    ]
    run = Task("forward of part 0", PASS, COMPUTE, 5e-6, inside=simulate({0: graph})[0])
    meets = (0, 2, ("program", "x", 0))
    kind, name = ("Send", "Send to 2") if stage == 0 else ("Receive", "Receive from 0")
    message = Task(
        name, kind, "from 0 to 2", 4e-6, needs=(0,) if stage == 0 else (), meets=meets, num_bytes=16, pair=(0, 2)
    )
    after = Task("square", "memory", COMPUTE, 1e-6, needs=(1,) if stage else (0,))
    norm = Task("AllReduce of 2", "AllReduce", "all", 1e-6, needs=(2,), meets="norm", num_bytes=4, group=(STAGE,))
    return [run, message, after, norm]


@pytest.fixture
def folder(tmp_path):
    write_chakra(simulate({0: tasks(0), 2: tasks(1)}), 4, tmp_path)
    return tmp_path


def test_every_rank_has_a_file_with_the_version_of_the_schema(folder):
    assert sorted(path.name for path in folder.iterdir()) == [GROUPS, *(f"step.{rank}.et" for rank in range(4))]
    for rank in range(4):
        metadata, nodes = decoded(folder / f"step.{rank}.et")
        assert metadata == {1: b"0.0.4"}
        assert [node[1] for node in nodes] == list(range(6))
        assert [node[3] for node in nodes] == [4, 7, 4, 5 if rank < 2 else 6, 4, 7]


def test_dependencies_are_kept(folder):
    _, nodes = decoded(folder / "step.0.et")
    assert [(node["data"], node["ctrl"]) for node in nodes] == [
        ([], []),
        ([0], []),  # the sum of the product
        ([], [0]),  # after it in the stream
        ([1, 2], []),  # the message needs the graph: the last task of each of its streams
        ([1, 2], []),
        ([4], []),
    ]
    assert [(node[6], node[7]) for node in nodes[:2]] == [(0, 3), (3, 2)]
    assert nodes[0]["attr"] == {"is_cpu_op": 0, "num_ops": 300}


def test_groups_and_pairs_are_those_of_the_rank(folder):
    groups = json.loads((folder / GROUPS).read_text())
    expected = {0: ([0, 1], [0, 2]), 1: ([0, 1], [1, 3]), 2: ([2, 3], [0, 2]), 3: ([2, 3], [1, 3])}
    tags = set()
    for rank in range(4):
        _, nodes = decoded(folder / f"step.{rank}.et")
        of_stage, of_all = (nodes[at]["attr"] for at in (1, 5))
        assert [groups[each["pg_name"]] for each in (of_stage, of_all)] == list(expected[rank])
        assert (of_stage["comm_type"], of_stage["comm_size"]) == (0, 64)
        message = nodes[3]["attr"]
        assert (message["comm_src"], message["comm_dst"]) == (rank % 2, rank % 2 + 2)
        assert message["comm_size"] == 16
        tags.add(message["comm_tag"])
    assert len(tags) == 1


@pytest.mark.parametrize("axes", [["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
def test_groups_of_any_rank_are_those_of_the_grid(axes):
    grid = DeviceGrid({"a": 2, "b": 3, "c": 4})
    described = []
    for axis in axes:
        first, second, *_ = grid.group(0, [axis])
        degree = grid.degrees[axis]
        described.append(GroupAxis(second - first, degree, tuple(range(degree))))
    for rank in range(grid.size):
        assert list(group_of(rank, described)) == sorted(grid.group(rank, axes))
