# SPDX-License-Identifier: Apache-2.0
"""What `engine: spmd` gives to each device, as far as it can be tried without one: every rank's graphs are made here."""

import inspect
from collections import deque

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore_partitioner import WORLD, virtual_ascend
from recorded_devices import EXPERTS, collectives_of, network, recorded

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir
from sporeloom.parallel.parallelize import shards_itself
from sporeloom.partition.rank_mindir import MAX_NAME, OF_COLLECTIVES, group_name
from sporeloom.runtime import engine
from sporeloom.runtime.by_mindspore.devices import Devices
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd import devices as native_spmd
from sporeloom.runtime.spmd.collectives import attributes, collective_nodes
from sporeloom.runtime.spmd.devices import NEVER_RUN, Communication, SpmdDevices
from sporeloom.strategy.loader import strategy_of

RULES = {"rules": "decoder"}
CASES = {
    "dp2_tp2_zero": ({"mesh": {"dp": 2, "tp": 2}, "optimizer_parallel": {}, **RULES}, {}),
    "tp2_pp2": ({"mesh": {"pp": 2, "tp": 2}, "pipeline": {"num_microbatches": 2}, **RULES}, {}),
    "ep2_tp2": ({"mesh": {"dp": 2, "ep": 2, "tp": 2}, "rules": "experts"}, EXPERTS),
}
KINDS = {
    "dp2_tp2_zero": {"AllReduce", "AllGather", "ReduceScatter"},
    "tp2_pp2": {"AllReduce"},
    "ep2_tp2": {"AllReduce", "AlltoAll"},
}
"""What each has at least."""


@pytest.fixture(scope="module")
def ranks():
    made = {}

    def of(name):
        made[name] = made.get(name) or recorded(*CASES[name])
        return made[name]

    return of


class StuckError(AssertionError):
    """Ranks wait for each other."""


def run_in_order(graphs, groups):
    """Let every rank do its collectives one after the other, as if each waited for all of its group.

    `graphs`: of each rank its collectives in order; `groups`: of each rank, name -> ranks.
    """
    left = [deque(each) for each in graphs]
    while any(left):
        for queue in filter(None, left):
            members = groups[left.index(queue)][queue[0].group]
            heads = [left[rank][0] if left[rank] else None for rank in members]
            if heads == [queue[0]] * len(members):
                for rank in members:
                    left[rank].popleft()
                break
        else:
            raise StuckError([queue[0] if queue else None for queue in left])


def in_order(backends):
    graphs = [[c for _, _, program in each.loaded for c in collectives_of(program.graph.model)] for each in backends]
    return graphs, [each.communication.groups for each in backends]


@pytest.mark.parametrize("name", CASES)
def test_all_members_of_a_group_do_the_same_in_one_order(ranks, name):
    backends = ranks(name)
    graphs, groups = in_order(backends)
    run_in_order(graphs, groups)
    assert {c.kind for c in graphs[0]} >= KINDS[name]
    for each, of in zip(graphs, groups, strict=True):
        assert {c.group for c in each} <= set(of)
        assert all(c.num_bytes > 0 for c in each)


def test_another_order_or_size_would_be_seen(ranks):
    backends = ranks("dp2_tp2_zero")
    graphs, groups = in_order(backends)
    first, *others = graphs
    with pytest.raises(StuckError):
        run_in_order([first[::-1], *others], groups)
    with pytest.raises(StuckError):
        run_in_order([first[1:], *others], groups)


@pytest.mark.parametrize("name", CASES)
def test_groups_are_created_by_all_members_in_one_order(ranks, name):
    backends = ranks(name)
    left = [deque(each.communication.created) for each in backends]
    for each in left:
        assert all(members == sorted(members) and len(members) > 1 for _, members in each)
    while any(left):
        for rank in _next_group(left)[1]:
            left[rank].popleft()


def _next_group(left):
    for queue in filter(None, left):
        group = queue[0]
        if all(left[rank] and left[rank][0] == group for rank in group[1]):
            return group
    raise StuckError([queue[0] if queue else None for queue in left])


@pytest.mark.parametrize("name", CASES)
def test_every_collective_waits_for_the_one_before_it(ranks, name):
    backends = ranks(name)
    for _, _, program in backends[0].loaded:
        graph = program.graph.model.graph
        inputs = {node.output[0]: list(node.input) for node in graph.node}
        previous = None
        for node, _ in collective_nodes(program.graph.model):
            assert previous is None or _reaches(inputs, node.output[0], previous)
            previous = node.output[0]


def _reaches(inputs, name, target):
    todo, seen = [name], set()
    while todo:
        name = todo.pop()
        if name == target:
            return True
        if name not in seen:
            seen.add(name)
            todo += inputs.get(name, [])
    return False


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_the_parts_of_those_of_the_cell(ranks, name):
    """Together the ranks of a stage hold each element of a parameter equally often; each with the value of one device."""
    whole = {p.name: p.asnumpy() for p in network(CASES[name][1]).get_parameters()}
    held = {key: [] for key in whole}
    backends = ranks(name)
    for backend in backends:
        mine = {}
        for _, _, program in backend.loaded:
            in_graph = {p.name.rpartition(":")[2]: tuple(p.dims) for p in program.graph.model.graph.parameter}
            loaded = {p.name: tuple(p.shape) for p in program.cell.get_parameters()}
            assert in_graph == loaded
            assert {owner.name for _, owner in program._pairs} == set(loaded)
            mine |= {owner.name: parameter for parameter, owner in program._pairs}
        for key in whole.keys() & mine.keys():
            slices = backend.layouts[key].stored_slice(whole[key].shape, backend.rank, backend.groups).slices
            np.testing.assert_array_equal(mine[key].asnumpy(), whole[key][slices])
            held[key].append(slices)
    for key, parts in held.items():
        count = np.zeros(whole[key].shape, int)
        for slices in parts:
            count[slices] += 1
        assert count.min() == count.max() >= 1, key
    assert name != "dp2_tp2_zero" or any(len({str(s) for s in parts}) == 4 for parts in held.values())


@pytest.mark.parametrize("name", CASES)
def test_mindspore_loads_and_compiles_every_graph_for_ascend_up_to_the_kernels(ranks, name):
    """Its loader reads the bytes, its front end passes over the graph for an Ascend target, and what it would hand to the
    kernels has the same collectives, in the same order."""
    backends = ranks(name)
    size = len(backends)
    for backend in (backends[0], backends[-1]):
        for number, (_, _, program) in enumerate(backend.loaded):
            written, graph = program.graph.model, program.graph.model.graph
            inputs = [
                Tensor(np.zeros(list(each.tensor[0].dims), _numpy(each.tensor[0].data_type))) for each in graph.input
            ]
            with virtual_ascend(backend.rank, size):
                program.cell._add_attr("graph_load_from_mindir", program.cell.graph)
                phase, _ = cell_graph_executor.compile(
                    program.cell, *inputs, phase=f"export.mindir.{name}.{backend.rank}.{number}", do_convert=False
                )
                read = cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)
            compiled = mind_ir.ModelProto.FromString(read)
            assert _told(compiled) == _told(written)
            outputs = [tuple(o.tensor[0].dims) for o in compiled.graph.output if o.tensor]
            assert outputs == [tuple(o.tensor[0].dims) for o in written.graph.output if o.tensor] or not outputs


def _numpy(data_type):
    return {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}[data_type]


ADDED = ("input_names", "output_names", "is_load", "group_rank_ids")
"""What MindSpore adds when it loads a graph; the last in processes that have compiled by its partitioner."""


def _told(model):
    """Collectives without what MindSpore adds."""
    told = []
    for collective in collectives_of(model):
        how = {key: value for key, value in collective.how if key not in ADDED}
        told.append((collective.group, collective.kind, how, collective.num_bytes))
    return told


class Communicating(nn.Cell):
    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.MAX, group=WORLD)
        self.all_gather, self.reduce_scatter = ops.AllGather(group=WORLD), ops.ReduceScatter(group=WORLD)
        self.all_to_all = ops.AlltoAll(2, 0, 1, group=WORLD)

    def construct(self, x):
        return self.all_to_all(self.reduce_scatter(self.all_gather(self.all_reduce(x))))


def test_collectives_are_written_as_mindspore_writes_its_own(ranks):
    ms.set_context(mode=ms.GRAPH_MODE)
    with virtual_ascend(0, 2):
        cell, x = Communicating(), Tensor(np.zeros((4, 4), np.float32))
        phase, _ = cell_graph_executor.compile(cell, x, phase="export.mindir.own", do_convert=False)
        written = cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)
    own = {p.op_type: attributes(p) for p in mind_ir.ModelProto.FromString(written).primitives}
    assert set(own) == set(OF_COLLECTIVES)
    ours = {}
    for name in ("dp2_tp2_zero", "ep2_tp2"):
        for _, _, program in ranks(name)[0].loaded:
            ours |= {p.op_type: attributes(p) for _, p in collective_nodes(program.graph.model)}
    assert set(ours) == set(own)
    for kind, known in own.items():
        assert set(ours[kind]) == set(known) - {"group_rank_ids"}, kind
        for key, value in OF_COLLECTIVES[kind].items():
            assert known[key] == value, f"{kind} {key}"


@pytest.mark.parametrize("count", [2, 16, 17, 64, 4096])
def test_the_name_of_a_group_is_short_enough_and_its_own(count):
    names = {group_name(range(start, start + count)) for start in range(4)}
    assert len(names) == 4 and max(map(len, names)) <= MAX_NAME


def test_mindspores_functions_are_called_as_they_are_declared(monkeypatch):
    """Global ranks, and the group by its name."""
    told, tensor = [], Tensor(np.zeros(2, np.float32))

    def watch(module, name):
        declared = inspect.signature(getattr(module, name))
        monkeypatch.setattr(module, name, lambda *given: told.append((name, dict(declared.bind(*given).arguments))))

    for name in ("isend", "recv", "broadcast"):
        watch(mint.distributed, name)
    watch(native_spmd, "create_group")
    communication = Communication(2)
    communication.create_groups([("b", [2, 3]), ("no", [0, 1]), ("a", [0, 2])])
    communication.create_groups([("a", [0, 2])])
    communication.send(tensor, 3, "b")
    assert communication.receive(tensor, 3, "b") is tensor is communication.broadcast(tensor, 0, "a")
    assert told == [
        ("create_group", {"group": "a", "rank_ids": [0, 2]}),
        ("create_group", {"group": "b", "rank_ids": [2, 3]}),
        ("isend", {"tensor": tensor, "dst": 3, "group": "b"}),
        ("recv", {"tensor": tensor, "src": 3, "group": "b"}),
        ("broadcast", {"tensor": tensor, "src": 0, "group": "a"}),
    ]


def test_a_pipeline_has_a_channel_for_each_direction(ranks):
    backends = ranks("tp2_pp2")
    created = [[name for name, _ in each.communication.created if name.startswith("from_")] for each in backends]
    assert created == [["from_0_to_2", "from_2_to_0"], ["from_1_to_3", "from_3_to_1"]] * 2


# Which backend it is


@pytest.fixture
def joined(monkeypatch):
    """What an engine joins on a device."""
    found = []
    monkeypatch.setattr(ms, "get_context", lambda name: {"device_target": "Ascend"}[name])
    monkeypatch.setattr(engine, "launched_processes", lambda: 2)
    for kind in (Devices, SpmdDevices):
        monkeypatch.setattr(kind, "join", classmethod(lambda cls, strategy: found.append(cls) or cls))
    monkeypatch.setattr(Engine, "__init__", lambda self, *_: None)
    return found


@pytest.mark.parametrize(
    ("settings", "kind"), [({}, SpmdDevices), ({"engine": "mindspore"}, Devices), ({"engine": "spmd"}, SpmdDevices)]
)
def test_on_devices_mindspore_partitions_only_where_the_strategy_says_so(joined, settings, kind):
    strategy = strategy_of({"mesh": {"dp": 2}, **settings})
    Engine.start(strategy)
    assert joined == [kind]
    assert shards_itself(strategy) == (kind is SpmdDevices)


def test_schedules_that_mindspore_lacks_are_refused_for_its_engine(joined):
    settings = {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4, "schedule": "zero_bubble_h1"}}
    with pytest.raises(ConfigError, match="zero_bubble_h1"):
        Engine.start(strategy_of({**settings, "engine": "mindspore"}))
    Engine.start(strategy_of(settings))
    assert joined == [SpmdDevices]


def test_it_says_that_it_has_never_run_on_ascend(monkeypatch, capsys):
    monkeypatch.setattr(native_spmd, "meet", lambda strategy: 0)
    backend = SpmdDevices.join(strategy_of({"mesh": {"dp": 2}, "engine": "spmd"}))
    assert backend.rank == 0 and "never been run on Ascend hardware" in NEVER_RUN
    assert capsys.readouterr().err.count(NEVER_RUN) == 1
