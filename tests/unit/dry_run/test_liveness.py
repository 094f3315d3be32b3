# SPDX-License-Identifier: Apache-2.0
"""Lifetimes against an oracle that steps through a graph and asks before each operator who is still needed."""

import random

import pytest

from sporeloom.dry_run.memory.liveness import VIEWS, breadth_first, lifetimes, num_bytes
from sporeloom.partition.graph import Graph, Node, TensorType

FLOAT = TensorType((8,), "float32")


def node(kind, inputs, outputs, *types, **attributes):
    return Node(kind, tuple(inputs), tuple(outputs), types or (FLOAT,) * len(outputs), attributes)


def random_graph(rng):
    """Operators with one or two outputs, views, and waits, over two inputs and a parameter."""
    sizes = {"p": TensorType((4,), "float32"), "x": TensorType((rng.randint(1, 9),), "float32"), "y": FLOAT}
    graph = Graph({"p": sizes["p"]}, {name: sizes[name] for name in "xy"}, [], [])
    for number in range(rng.randint(3, 25)):
        known = list(sizes)
        if rng.random() < 0.3:
            source = rng.choice(known)
            waits = [rng.choice(known)] if rng.random() < 0.5 else []
            made = node("Depend" if waits else "Reshape", [source, *waits], [f"n{number}"], sizes[source])
        else:
            outputs = [f"n{number}#{i}" for i in range(rng.randint(1, 2))]
            types = [TensorType((rng.randint(1, 64),), "float32") for _ in outputs]
            made = node("Op", rng.choices(known, k=rng.randint(1, 3)), outputs, *types)
        graph.nodes.append(made)
        sizes |= zip(made.outputs, made.types, strict=True)
    values = [name for each in graph.nodes for name in each.outputs]
    graph.outputs = rng.sample(values, k=min(len(values), rng.randint(1, 3)))
    return graph, sizes


def alive_by_oracle(graph, sizes):
    """Bytes during each operator of what is there: not yet made is nothing, made and still to be read or returned is all.
    Inputs and parameters are left out."""
    origin = {name: name for name in sizes}
    for each in graph.nodes:
        if each.kind in VIEWS:
            origin[each.outputs[0]] = origin[each.inputs[0]]
    given = {*graph.parameters, *graph.inputs}
    result = []
    for now in range(len(graph.nodes)):
        made = {origin[name] for each in graph.nodes[: now + 1] for name in each.outputs}
        reading = graph.nodes[now:]
        needed = {origin[n] for e in reading for n in (e.inputs[:1] if e.kind == "Depend" else e.inputs)}
        needed |= {origin[name] for name in graph.outputs} | set(graph.nodes[now].outputs)
        result.append(sum(4 * sizes[name].num_elements for name in (made & needed) - given if origin[name] == name))
    return result


@pytest.mark.parametrize("seed", range(40))
def test_what_is_alive_during_each_operator_is_what_an_oracle_finds(seed):
    graph, sizes = random_graph(random.Random(seed))
    of = lifetimes(graph, order="written")
    alive, found = set(), []
    for born, dying in zip(of.born, of.dying, strict=True):
        alive |= set(born)
        found.append(sum(of.sizes[storage] for storage in alive))
        alive -= set(dying)
    assert found == alive_by_oracle(graph, sizes)
    assert alive == {storage for storage in of.outputs if storage is not None and storage >= len(graph.inputs)}


@pytest.mark.parametrize("seed", range(20))
def test_an_order_keeps_all_operators_behind_their_inputs(seed):
    graph, _ = random_graph(random.Random(seed))
    ordered, known = breadth_first(graph.nodes), {"p", "x", "y"}
    assert sorted(map(id, ordered)) == sorted(map(id, graph.nodes))
    for each in ordered:
        assert set(each.flat_inputs()) <= known
        known |= set(each.outputs)


def test_an_operator_runs_as_soon_as_its_inputs_are_there():
    nodes = [node("Op", ["x"], ["a"]), node("Op", ["a"], ["b"]), node("Constant", [], ["c"]), node("Op", ["c"], ["d"])]
    assert [each.outputs[0] for each in breadth_first(nodes)] == ["a", "c", "b", "d"]


def test_an_operator_that_writes_a_parameter_allocates_nothing():
    graph = Graph({"p": FLOAT}, {"x": FLOAT}, [node("Assign", ["p", "x"], ["w"], FLOAT, side_effect_mem=True)], ["w"])
    of = lifetimes(graph)
    assert of.born == [[]] and of.outputs == [None]


def test_a_constant_is_reported_apart():
    graph = Graph({}, {"x": FLOAT}, [node("Constant", [], ["c"]), node("Add", ["x", "c"], ["y"])], ["y"])
    of = lifetimes(graph)
    assert of.constants == [("c", 32)]
    assert [of.names[storage] for born in of.born for storage in born] == ["y"]


def test_gathering_along_another_dim_takes_two_transposes():
    whole = TensorType((4, 16), "float32")
    gather = node("AllGather", ["x"], ["y"], whole, dim=1, axes=("tp",))
    of = lifetimes(Graph({}, {"x": TensorType((4, 8), "float32")}, [gather], ["y"]), order="written")
    assert [each.kind for each in of.nodes] == ["Transpose", "AllGather", "Transpose"]
    assert [[of.sizes[storage] for storage in born] for born in of.born] == [[128], [256], [256]]
    assert [len(dying) for dying in of.dying] == [0, 1, 1]


def test_bfloat16_takes_two_bytes_on_devices_and_four_on_cpus():
    half = TensorType((3,), "bfloat16")
    assert num_bytes(half) == 6
    assert num_bytes(half, half_bytes=4) == 12
    assert num_bytes(None) == 0
