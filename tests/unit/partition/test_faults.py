# SPDX-License-Identifier: Apache-2.0
"""Each kind of fault, planted in a graph of one operator and computed by all ranks in NumPy, gives what its name says."""

import numpy as np
import pytest
from ranks import communicated

from sporeloom.partition.faults import KINDS, Program, kind_of, sites_in, with_fault
from sporeloom.partition.graph import Graph, IsFirst, Node, RankOffset, Scope, TensorType
from sporeloom.partition.grid import STAGES, DeviceGrid
from sporeloom.partition.sharded_graph import COLLECTIVE_OF

GRID = DeviceGrid({"dp": 2, "tp": 2})
HELD = [np.arange(8.0, dtype=np.float32).reshape(4, 2) + 10 * rank for rank in range(4)]
"""What each rank holds of x."""
STEP_OF = {kind: step for step, kind in COLLECTIVE_OF.items()}
COMPUTE = {
    "Mul": lambda a, b: a * b,
    "RealDiv": lambda a, b: a / b,
    "Sub": lambda a, b: a - b,
    "ReduceSum": lambda x, dims, *_: x.sum(dims),
    "Slice": lambda x, begin, size: x[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))],
    "Concat": np.concatenate,
    "Reshape": np.reshape,
    "Round": lambda x: x,
    "AssignSub": lambda weight, step: weight - step,
}


def collective(kind, shape, axes=("tp",), dim=0, to_dim=0, op="sum", dtype="float32"):
    attributes = {"axes": axes, "dim": dim, "to_dim": to_dim, "op": op}
    return Node(kind, ("x",), ("y",), (TensorType(shape, dtype),), attributes)


def graph_of(*nodes, parameters=(), made=True):
    """A graph of some nodes, which read x: the result of an operator of the backward pass, or an input."""
    x = TensorType((4, 2), "float32")
    maker = Node("Round", ("given",), ("x",), (x,), scope=Scope("layer", is_backward=True))
    inputs = {"given": x} if made else {"x": x, "tokens": TensorType((4, 2), "int32")}
    return Graph(dict.fromkeys(parameters, x), inputs, [*([maker] if made else []), *nodes], [nodes[-1].outputs[0]])


def computed(graphs, held=HELD):
    """The output of every rank. All ranks run the same operators, but for constants."""
    values = dict.fromkeys(("given", "x", "weight"), held)
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        node = nodes[0]
        if node.kind == "Constant":
            found = [n.value for n in nodes]
        elif node.kind in STEP_OF:
            a = node.attributes
            found = communicated(
                STEP_OF[node.kind], values[node.inputs[0]], a["axes"], GRID, a["dim"], a["to_dim"], a["op"]
            )
        else:
            given = lambda name, rank: (  # noqa: E731
                tuple(values[n][rank] for n in name) if isinstance(name, tuple) else values[name][rank]
            )
            found = [COMPUTE[node.kind](*(given(n, rank) for n in node.inputs)) for rank in range(4)]
        if node.types[0] is not None and node.kind != "Constant":
            assert [np.shape(f) for f in found] == [node.types[0].shape] * 4, node
        values[node.outputs[0]] = found
    return values[graphs[0].outputs[0]]


def faulty(kind, graph):
    return [with_fault(Program(graph, GRID, rank), kind_of(kind), ["y"]) for rank in range(4)]


def group(rank, axes):
    return [HELD[other] for other in GRID.group(rank, axes)]


def rotated(rank):
    own, other = group(rank, ("tp",))
    return np.concatenate([other, own])


def own_weights(rank):
    own = np.split(HELD[rank], 2)[GRID.coordinate(rank, "dp")]
    return own / (own.sum() * 2)


CASES = {
    "a sum over ranks is left out": (collective("AllReduce", (4, 2)), lambda r: HELD[r]),
    "a sum over ranks is taken twice": (collective("AllReduce", (4, 2)), lambda r: 2 * sum(group(r, ("tp",)))),
    "a mean over ranks in place of a sum": (collective("AllReduce", (4, 2)), lambda r: sum(group(r, ("tp",))) / 2),
    "a sum over the wrong group": (collective("AllReduce", (4, 2)), lambda r: sum(group(r, ("dp",)))),
    "a sum over the first of its axes alone": (
        collective("AllReduce", (4, 2), ("dp", "tp")),
        lambda r: sum(group(r, ("dp",))),
    ),
    "a maximum over ranks is left out": (collective("AllReduce", (4, 2), op="max"), lambda r: HELD[r]),
    "a slice in place of a reduce-scatter": (
        collective("ReduceScatter", (2, 2)),
        lambda r: np.split(HELD[r], 2)[GRID.coordinate(r, "tp")],
    ),
    "a reduce-scatter over the wrong group": (
        collective("ReduceScatter", (2, 2)),
        lambda r: np.split(sum(group(r, ("dp",))), 2)[GRID.coordinate(r, "dp")],
    ),
    "an all-gather is left out: a rank repeats its own shard": (
        collective("AllGather", (4, 4), dim=1),
        lambda r: np.concatenate([HELD[r]] * 2, 1),
    ),
    "shards are gathered in the wrong order": (collective("AllGather", (8, 2)), rotated),
    "an all-gather over the wrong group": (
        collective("AllGather", (8, 2)),
        lambda r: np.concatenate(group(r, ("dp",))),
    ),
    "an all-to-all is left out": (
        collective("AllToAll", (8, 1), dim=0, to_dim=1),
        lambda r: HELD[r].reshape(8, 1),
    ),
    "a rank takes the slice of its neighbour": (
        collective("SliceOfRank", (2, 2)),
        lambda r: np.split(HELD[r], 2)[1 - GRID.coordinate(r, "tp")],
    ),
    "a slice begins one too early": (
        collective("SliceOfRank", (2, 2)),
        lambda r: HELD[r][(begin := max(2 * GRID.coordinate(r, "tp") - 1, 0)) : begin + 2],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_of_a_collective(kind):
    node, expected = CASES[kind]
    graph = graph_of(node)
    found = computed(faulty(kind, graph))
    for rank in range(4):
        np.testing.assert_array_equal(found[rank], expected(rank))
    assert any(not np.array_equal(a, b) for a, b in zip(found, computed([graph] * 4), strict=True))


OF_INPUTS = {
    "an input, such as a mask, is sliced for the wrong group": lambda r: np.split(HELD[r], 2)[GRID.coordinate(r, "tp")],
    "losses are divided by the number of a rank's own tokens": own_weights,
}


@pytest.mark.parametrize("kind", OF_INPUTS)
def test_a_fault_of_an_input(kind):
    node = collective("SliceOfRank", (2, 2), ("dp",))
    found = computed(faulty(kind, graph_of(node, made=False)))
    for rank in range(4):
        np.testing.assert_allclose(found[rank], OF_INPUTS[kind](rank), rtol=1e-6)
    assert not list(sites(graph_of(node), kind))  # of a value that the graph computes


def sites(graph, kind):
    return (site for site in sites_in("step", Program(graph, GRID, 0)) if site.kind == kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("a rank counts from the offset of its neighbour", [5, 0, 5, 0]),
        ("every rank counts from the offset of the first", [0, 0, 0, 0]),
    ],
)
def test_a_fault_of_an_offset(kind, expected):
    graph = graph_of(Node("Constant", (), ("y",), (None,), value=RankOffset(("tp",), 5)))
    values = [graphs.nodes[-1].value for graphs in faulty(kind, graph)]
    written = [v.stride * GRID.coordinate(r, "tp") if isinstance(v, RankOffset) else v for r, v in enumerate(values)]
    assert written == expected


def test_every_rank_counts_as_the_first():
    graph = graph_of(Node("Constant", (), ("y",), (TensorType((), "float32"),), value=IsFirst(("tp",))))
    values = [each.nodes[-1].value for each in faulty("every rank counts as the first", graph)]
    assert values == [IsFirst(())] * 4


def test_an_update_that_is_lost_leaves_the_weight():
    node = Node(
        *("AssignSub", ("weight", "x"), ("y",), (TensorType((4, 2), "float32"),)), attributes={"side_effect_mem": True}
    )
    found = computed(faulty("a weight stays stale: its update is lost", graph_of(node, parameters=["weight"])))
    assert all(np.array_equal(found[rank], HELD[rank]) for rank in range(4))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 2), "the gradient of a weight that stages share is of one stage alone"),
        ((), "a number is not added up over stages"),
    ],
)
def test_a_sum_over_stages_is_told_from_one_within_a_stage(shape, kind):
    grid = DeviceGrid({"pp": 2, "dp": 2})
    node = Node("AllReduce", ("x",), ("y",), (TensorType(shape, "float32"),), {"axes": (STAGES,), "op": "sum"})
    program = Program(graph_of(node), grid, 0)
    assert [site.kind for site in sites_in("update", program)] == [kind]
    assert with_fault(program, kind_of(kind)).nodes[-1].kind == "Mul"


def test_the_gradient_of_a_vector_is_told_from_other_sums():
    kind = "the gradient of a norm's weight or of a bias is not added up"
    vector = collective("AllReduce", (4,))
    assert [site.description for site in sites(graph_of(vector), kind)] == ["AllReduce over tp of shape [4] at layer"]
    assert not list(sites(graph_of(collective("AllReduce", (4, 2))), kind))
    assert not list(sites(graph_of(collective("AllReduce", (4,), dtype="int32")), kind))


def test_a_maximum_that_is_only_subtracted_may_be_any_number():
    kind, maximum = "the maximum over ranks as their sum", collective("AllReduce", (4, 2), op="max")
    type = maximum.types[0]
    shifted = graph_of(maximum, Node("Sub", ("x", "y"), ("z",), (type,)))
    assert not list(sites(shifted, kind))
    read = graph_of(maximum, Node("Mul", ("x", "y"), ("z",), (type,)))
    (site,) = sites(read, kind)
    assert site.operator == "y"
    graphs = [with_fault(Program(read, GRID, rank), kind_of(kind)) for rank in range(4)]
    assert np.array_equal(computed(graphs)[0], HELD[0] * (HELD[0] + HELD[1]))


def test_each_kind_has_a_name_of_its_own():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    assert set(CASES) | set(OF_INPUTS) <= set(names)
