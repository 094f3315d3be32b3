# SPDX-License-Identifier: Apache-2.0
"""Kernels and their costs, against small graphs and numbers counted by hand."""

import dataclasses

import pytest

from sporeloom.dry_run.time.device_model import KERNELS_OF_LAYER, DeviceModel
from sporeloom.dry_run.time.kernels import COMMUNICATION, Graphs, fused
from sporeloom.dry_run.time.simulate import COMPUTE, simulate
from sporeloom.partition.graph import Graph, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.planner.cluster import Cluster, Efficiency, ProcessRates
from sporeloom.planner.rates import MESSAGE_S

PERFECT = Efficiency(matmul=1, attention=1, memory=1, intra_node=1, inter_node=1, layer_overhead_us=16)
CLUSTER = Cluster(
    chip="ascend910b",
    peak_tflops=1,
    memory_gb=1,
    reserved_gb=0.5,
    memory_gb_per_s=1,
    devices_per_node=2,
    intra_node_gb_per_s=0.5,
    inter_node_gb_per_s=0.1,
    host_gb_per_s=0.25,
    efficiency=PERFECT,
)
DEVICE = DeviceModel(CLUSTER)


def tensor(*shape, dtype="bfloat16"):
    return TensorType(shape, dtype)


def node(kind, inputs, output, *shape, dtype="bfloat16", **attributes):
    return Node(kind, tuple(inputs), (output,), (tensor(*shape, dtype=dtype),), attributes)


def mlp():
    """Two products with a bias and an activation between them, whose sum is reduced."""
    nodes = [
        node("MatMul", ["x", "w"], "a", 8, 32),
        node("Add", ["a", "bias"], "b", 8, 32),
        node("GeLU", ["b"], "c", 8, 32),
        Node("Reshape", ("c",), ("d",), (tensor(8, 32),)),
        node("MatMul", ["d", "v"], "e", 8, 16),
        node("AllReduce", ["e"], "f", 8, 16, axes=("tp",), op="sum"),
        node("Add", ["f", "x"], "g", 8, 16),
    ]
    parameters = {"w": tensor(16, 32), "bias": tensor(32), "v": tensor(32, 16)}
    return Graph(parameters, {"x": tensor(8, 16)}, nodes, ["g"])


def kinds(kernels):
    return [[each.kind for each in kernel.nodes] for kernel in kernels]


def test_passes_between_products_are_one_kernel():
    graph = mlp()
    kernels = fused(graph.nodes, graph)
    assert kinds(kernels) == [["MatMul"], ["Add", "GeLU"], ["MatMul"], ["AllReduce"], ["Add"]]
    assert [kernel.needs for kernel in kernels] == [set(), {0}, {1}, {2}, {3}]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_process_that_runs_one_operator_at_a_time_computes_nothing_during_a_collective(at_once):
    rates = ProcessRates(processes=2, efficiency=PERFECT, operators_at_once=at_once)
    device = DeviceModel(dataclasses.replace(CLUSTER, efficiency=None, fused=False, measured=[rates]))
    nodes = [
        node("AllReduce", ["x"], "sum", 512, 512, axes=("tp",), op="sum"),
        node("MatMul", ["x", "w"], "product", 512, 512),
        node("AllReduce", ["sum"], "again", 512, 512, axes=("tp",), op="sum"),
    ]
    graph = Graph({"w": tensor(512, 512)}, {"x": tensor(512, 512)}, nodes, ["product", "again"])
    tasks = Graphs(device, DeviceGrid({"tp": 2}), 0, {}).tasks(graph)
    first, product, second = (next(t.seconds for t in tasks if t.name.startswith(n)) for n in ("AllR", "Mat", "AllR"))
    (of,) = simulate({0: tasks}).values()
    assert of.end == pytest.approx(first + second + (product if at_once == 1 else 0))
    assert sum(of.exposed().values()) == pytest.approx(first + second - (0 if at_once == 1 else product))


def test_costs_are_arithmetic_and_bytes():
    graph = mlp()
    tasks = Graphs(DEVICE, DeviceGrid({"tp": 2}), 0, {}).tasks(graph)
    launch = 16e-6 / KERNELS_OF_LAYER
    first = 2 * 8 * 16 * 32 / 1e12 + 2 * (8 * 16 + 16 * 32 + 8 * 32) / 1e9
    between = 2 * (8 * 32 + 32 + 8 * 32) / 1e9  # reads a and the bias, writes c; b exists in the kernel alone
    second = 2 * 8 * 16 * 32 / 1e12 + 2 * (8 * 32 + 32 * 16 + 8 * 16) / 1e9
    added_up = 2 * 8 * 16 / 0.5e9 + MESSAGE_S  # each sends all of it to the other
    last = 2 * 3 * 8 * 16 / 1e9
    expected = [first + launch, between + launch, second + launch, added_up, last + launch]
    assert [task.seconds for task in tasks] == pytest.approx(expected)
    assert [task.kind for task in tasks] == ["matmul", "memory", "matmul", "AllReduce", "memory"]
    assert [task.stream for task in tasks] == [COMPUTE] * 3 + [COMMUNICATION, COMPUTE]
    assert [task.flops for task in tasks] == [2 * 8 * 16 * 32, 0, 2 * 8 * 16 * 32, 0, 0]


@pytest.mark.parametrize(
    ("chip", "moved"), [("ascend910b", 2 * (4 * 3 * 4 + 4 * 8 * 2)), ("cpu", 3 * 64 * 8 * 2 + 112)]
)
def test_entries_of_a_cache_are_written_in_place_but_on_cpus(chip, moved):
    """There the operator reads and writes the whole parameter, and its copy is what others read."""
    written = node("ScatterNdUpdate", ["cache", "slots", "new"], "kept", 64, 8, side_effect_mem=True)
    given = {"slots": tensor(4, 3, dtype="int32"), "new": tensor(4, 8)}
    graph = Graph({"cache": tensor(64, 8)}, given, [written], ["kept"])
    device = DeviceModel(dataclasses.replace(CLUSTER, chip=chip))
    (task,) = Graphs(device, DeviceGrid({"tp": 1}), 0, {}).tasks(graph)
    assert task.seconds == pytest.approx(moved / 1e9 + device.launch)


def test_what_needs_a_full_sum_waits_for_it_in_another_kernel():
    nodes = [
        node("Square", ["x"], "a", 8, 16),
        node("ReduceSum", ["a"], "b"),
        node("Mul", ["x", "b"], "c", 8, 16),
    ]
    graph = Graph({}, {"x": tensor(8, 16)}, nodes, ["c"])
    assert kinds(fused(nodes, graph)) == [["Square", "ReduceSum"], ["Mul"]]


def test_what_meets_behind_a_product_is_not_merged_across_it():
    """x + f(product of x): the norm of x and the sum are on either side of a product, though x feeds both."""
    nodes = [
        node("Tanh", ["x"], "a", 8, 16),
        node("MatMul", ["a", "w"], "b", 8, 16),
        node("Add", ["a", "b"], "c", 8, 16),
    ]
    graph = Graph({"w": tensor(16, 16)}, {"x": tensor(8, 16)}, nodes, ["c"])
    kernels = fused(nodes, graph)
    assert kinds(kernels) == [["Tanh"], ["MatMul"], ["Add"]]
    assert kernels[2].needs == {0, 1}


def test_collectives_are_chained():
    nodes = [node("AllReduce", [name], f"{name}.sum", 4, axes=("tp",)) for name in "xyz"]
    graph = Graph({}, {name: tensor(4) for name in "xyz"}, nodes, ["x.sum", "y.sum", "z.sum"])
    tasks = Graphs(DEVICE, DeviceGrid({"tp": 2}), 0, {}).tasks(graph)
    assert [task.needs for task in tasks] == [(), (0,), (1,)]


def test_a_collective_over_stages_meets_theirs():
    stages = node("AllReduce", ["x"], "y", 4, axes=("pp",), stages=(0, 2))
    graph = Graph({}, {"x": tensor(4)}, [stages], ["y"])
    grid = DeviceGrid({"pp": 3, "tp": 2})
    (first,), (last,) = (Graphs(DEVICE, grid, rank, {}).tasks(graph) for rank in (0, 4))
    assert first.meets == last.meets == ("y", (0, 4))


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("AllReduce", [0, 1], 2 * (0.5e9 / 0.5e9 + MESSAGE_S)),
        (
            "AllGather",
            [0, 1, 2, 3],
            0.25e9 / 0.1e9 + 0.5e9 / 0.5e9 + 2 * MESSAGE_S,
        ),  # from the other server, then inside
        ("ReduceScatter", [0, 2, 4, 6], 0.75e9 / 0.1e9 + 2 * MESSAGE_S),
        ("AlltoAll", [0, 1, 2, 3], 0.25e9 / 0.5e9 + 0.5e9 / 0.1e9 + 3 * MESSAGE_S),
        ("Message", [1, 2], 1e9 / 0.1e9 + MESSAGE_S),
        ("AllReduce", [3], 0.0),
    ],
)
def test_collectives_by_topology(kind, ranks, expected):
    assert DEVICE.collective(kind, 1e9, ranks).seconds == pytest.approx(expected, rel=1e-6)


def test_attention_of_kernels_skips_half_and_takes_as_long_for_narrow_heads():
    assert DEVICE.attention(1e12, 128, in_one_kernel=True) == pytest.approx(0.5)
    assert DEVICE.attention(1e12, 64, in_one_kernel=True) == pytest.approx(1.0)
    assert DEVICE.attention(1e12, 64, in_one_kernel=False) == pytest.approx(1.0)
    assert DEVICE.attention(1e12, 65, in_one_kernel=False) == pytest.approx(12.0)


def test_float32_products_are_slower_and_the_host_is_far():
    assert DEVICE.product(1e12, 0, in_float32=True) == pytest.approx(2.0)
    assert DEVICE.host(1e9) == pytest.approx(4.0)
    faster = DeviceModel(dataclasses.replace(CLUSTER, peak_tflops=2.0))
    assert faster.product(1e12, 1e9, in_float32=False) == pytest.approx(1.5)


def test_chained_collectives_and_fused_passes_never_wait_for_each_other():
    """The second collective follows the first one, which needs what a pass before the second one's user computes."""
    nodes = [
        node("MatMul", ("x", "w", "f", "f"), "m", 8, 8),
        node("ReLU", ("m",), "a", 8, 8),
        node("AllReduce", ("a",), "c1", 8, 8, axes=("dp",), op="sum"),
        node("AllGather", ("p",), "c2", 8, 8, axes=("dp",), dim=0),
        node("Mul", ("a", "c2"), "d", 8, 8),
    ]
    graph = Graph({"w": tensor(8, 8), "p": tensor(4, 8)}, {"x": tensor(8, 8)}, nodes, ["c1", "d"])
    device = DeviceModel(CLUSTER)
    tasks = Graphs(device, DeviceGrid({"dp": 2}), 0, {}).tasks(graph)
    assert sorted(task.kind for task in tasks) == ["AllGather", "AllReduce", "matmul", "memory", "memory"]
    assert all(needed < number for number, task in enumerate(tasks) for needed in task.needs)


def test_a_device_that_fuses_nothing_launches_every_operator():
    graph = mlp()
    alone = fused(graph.nodes, graph, fuses=False)
    assert [len(kernel.nodes) for kernel in alone] == [1] * len(alone)
    assert len(alone) > len(fused(graph.nodes, graph))
    assert sorted(node.kind for kernel in alone for node in kernel.nodes) == sorted(
        node.kind for kernel in fused(graph.nodes, graph) for node in kernel.nodes
    )
