# SPDX-License-Identifier: Apache-2.0
"""The kernels of a graph with their costs, in the order in which the executor launches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sporeloom.dry_run.memory.liveness import VIEWS, first_come, num_bytes
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.dry_run.time.simulate import COMPUTE, GroupAxis, Task
from sporeloom.dry_run.work import COLLECTIVES, FLASH_PRODUCTS, NAMES, PRODUCTS, attention_flops, product_flops
from sporeloom.partition.graph import Graph, Name, Node, TensorType, is_effect
from sporeloom.partition.grid import STAGES, DeviceGrid
from sporeloom.partition.rank_shapes import along_first_dim
from sporeloom.runtime.spmd.step_graphs import types_of

COMMUNICATION = "communication"
"""The stream of collectives inside graphs."""
FREE = NAMES | VIEWS
PICKING = frozenset(
    ("Gather", "GatherD", "EmbeddingLookup", "StridedSlice", "Slice", "SliceExt", "SliceOfRank", "Split", "GatherNd")
)
"""Operators that read of their input what they return."""
WRITING = frozenset(("ScatterNdUpdate",))
"""Operators that write some entries of a parameter, in place on devices; on CPUs MindSpore's copy the parameter."""
ALONE = frozenset(
    ("Gather", "GatherD", "EmbeddingLookup", "UnsortedSegmentSum", "Sort", "TopK", "GatherNd", "ScatterNd")
)
"""Operators that no compiler fuses with others: their addresses depend on data."""


@dataclass(slots=True)
class Kernel:
    """Operators that run at once."""

    nodes: list[Node]
    needs: set[int] = field(default_factory=set)
    """Numbers of the kernels whose results it reads or waits for."""


@dataclass(frozen=True)
class Graphs:
    """Settings that all graphs of a rank share."""

    device: DeviceModel
    grid: DeviceGrid
    rank: int
    known: Mapping[Name, TensorType]
    """Local types of values that other graphs compute."""

    def tasks(self, graph: Graph) -> list[Task]:
        """The kernels of a graph as tasks, in the order of their launch.

        Collectives are chained, as the runtime chains them, and so are all kernels of a device that runs one at a time. A
        collective over several stages `meets` those of the others.
        """
        nodes, types = along_first_dim(graph), dict(self.known) | types_of(graph)
        for node in nodes:
            types |= {name: type for name, type in zip(node.outputs, node.types, strict=True) if type is not None}
        kernels, costs = fused(nodes, graph, self.device.cluster.fused), _Costs(self, graph, types, nodes)
        last: int | None = None
        for number, kernel in enumerate(kernels):
            if kernel.nodes[0].kind in COLLECTIVES:
                kernel.needs |= set() if last is None else {last}
                last = number
        order = first_come([kernel.needs for kernel in kernels])
        assert len(order) == len(kernels), "kernels wait for each other"
        place = {number: position for position, number in enumerate(order)}
        tasks = list[Task]()
        for position, number in enumerate(order):
            needs = {place[needed] for needed in kernels[number].needs}
            if self.device.one_at_a_time and position:
                needs.add(position - 1)
            tasks.append(costs.task(kernels[number], tuple(sorted(needs))))
        return tasks

    def group_axes(self, node: Node) -> tuple[GroupAxis, ...]:
        """The group of a collective, from which that of any rank of the stage follows."""
        stages, found = node.attributes.get("stages"), list[GroupAxis]()
        for axis in node.attributes["axes"]:
            first, *others = self.grid.group(0, [axis])
            stride = others[0] - first if others else 1
            chosen = tuple(stages) if stages and axis == STAGES else tuple(range(len(others) + 1))
            found.append(GroupAxis(stride, len(others) + 1, chosen))
        return tuple(found)

    def group(self, node: Node) -> tuple[list[int], bool]:
        """The ranks of a collective, and whether they are of several stages."""
        axes, stages = node.attributes["axes"], node.attributes.get("stages")
        ranks = self.grid.group(self.rank, axes)
        if stages and len(stages) < len(ranks):
            ranks = [ranks[stage] for stage in stages]
        return sorted(ranks), STAGES in axes


def fused(nodes: Sequence[Node], graph: Graph, fuses: bool = True) -> list[Kernel]:
    """Group operators into kernels; unless the device `fuses`, each is one.

    Operators that pass over memory and feed each other are one kernel if no product, collective or full sum lies on a way
    between any two of them: they have the same level, the number of such barriers before them.
    """
    kernels: list[Kernel] = []
    level: dict[Name, int] = {}
    makers: dict[Name, set[int]] = {}
    """Value -> the kernels that it depends on directly."""
    joined: list[int] = []
    levels: list[int | None] = []
    """Level of each kernel that others may join; None: of none."""

    def root(number: int) -> int:
        while joined[number] != number:
            joined[number] = joined[joined[number]]
            number = joined[number]
        return number

    chain = 0  # a collective follows the one before it, so it is as deep
    for node in nodes:
        inputs = list(node.flat_inputs())
        depth = max((level.get(name, 0) for name in inputs), default=0)
        if node.kind in COLLECTIVES:
            depth = max(depth, chain)
            chain = depth + 1
        needed = {root(number) for name in inputs for number in makers.get(name, ())}
        if node.kind in FREE:
            needed = {max(needed)} if node.kind == "UpdateState" and needed else needed
            for name in node.outputs:
                level[name], makers[name] = depth, needed
            continue
        is_barrier = _is_barrier(node) or is_effect(node, graph)
        kernels.append(Kernel([node], needed))
        joined.append(len(joined))
        levels.append(None if is_barrier or not fuses else depth)
        number = len(kernels) - 1
        for other in sorted(needed) if levels[number] is not None else ():
            if levels[other] == depth:
                number = _join(kernels, joined, other, root(number))
        ends = is_barrier or _is_full_sum(node)
        for name in node.outputs:
            level[name], makers[name] = depth + ends, {number}
    numbers = {number: i for i, number in enumerate(n for n in range(len(kernels)) if joined[n] == n)}
    for number in numbers:
        kernel = kernels[number]
        kernel.needs = {numbers[root(needed)] for needed in kernel.needs} - {numbers[number]}
    return [kernels[number] for number in numbers]


def _join(kernels: list[Kernel], joined: list[int], first: int, second: int) -> int:
    """Merge two kernels into the one with the smaller number."""
    first, second = min(first, second), max(first, second)
    if first != second:
        kernels[first].nodes += kernels[second].nodes
        kernels[first].needs |= kernels[second].needs
        joined[second] = first
    return first


def _is_barrier(node: Node) -> bool:
    return node.kind in COLLECTIVES or node.kind in PRODUCTS or node.kind in FLASH_PRODUCTS or node.kind in ALONE


def _is_full_sum(node: Node) -> bool:
    """Whether an operator reduces a tensor to a number."""
    return node.kind.startswith(("Reduce", "Sum")) and all(
        type is None or type.num_elements == 1 for type in node.types
    )


class _Costs:
    """Costs of the kernels of a graph."""

    def __init__(self, of: Graphs, graph: Graph, types: Mapping[Name, TensorType], nodes: Iterable[Node]):
        self.of, self.graph, self.types = of, graph, types
        self.source: dict[Name, Name] = {}
        """View -> the value whose storage it shares."""
        self.readers: dict[Name, list[int]] = {}
        """Value -> ids of the operators that read it, or a view of it."""
        for node in nodes:
            if node.kind in FREE:
                first = next(iter(node.flat_inputs()), None)
                if first is not None:
                    self.source |= dict.fromkeys(node.outputs, self.source.get(first, first))
                continue
            for name in node.flat_inputs():
                self.readers.setdefault(self.source.get(name, name), []).append(id(node))
        self.returned = {self.source.get(name, name) for name in graph.outputs}

    def task(self, kernel: Kernel, needs: tuple[int, ...]) -> Task:
        node, device = kernel.nodes[0], self.of.device
        if node.kind in COLLECTIVES:
            return self._collective(node, needs)
        kind, seconds, flops = self._compute(kernel)
        cell = next((each.scope.cell for each in kernel.nodes if each.scope and each.scope.cell), "")
        name = f"{cell}: {node.kind}" if cell else node.kind
        return Task(name, kind, COMPUTE, seconds + device.launch, device.launch, needs, flops)

    def _compute(self, kernel: Kernel) -> tuple[str, float, int]:
        """Kind, seconds and FLOPs."""
        node, device = kernel.nodes[0], self.of.device
        shapes = [self.types[name].shape for name in node.flat_inputs() if name in self.types]
        if node.kind in FLASH_PRODUCTS:
            flops = attention_flops(node.kind, *shapes[:2])
            return "attention", device.attention(flops, shapes[0][-1], True), flops
        if node.kind in PRODUCTS:
            flops, out = product_flops(node, self.types), next(type for type in node.types if type)
            if len(out.shape) == 4 and node.kind.startswith("BatchMatMul"):
                # Scores pass through memory; their factors are small.
                head = min(shapes[0][-1], shapes[0][-2], shapes[1][-1], shapes[1][-2])
                moved = device.passes(self._moved(kernel))
                return "attention", device.attention(flops, head, False) + moved, flops
            return "matmul", device.product(flops, self._moved(kernel), out.dtype == "float32"), flops
        return "memory", device.operator(node.kind, self._moved(kernel)), 0

    def _moved(self, kernel: Kernel) -> int:
        """Bytes that a kernel reads of other kernels and writes for them; it writes parameters that it updates, too."""
        own = {id(node) for node in kernel.nodes}
        made = {name for node in kernel.nodes for name in node.outputs}
        read, written = dict[Name, int](), 0
        for node in kernel.nodes:
            results = sum(map(num_bytes, node.types))
            if node.kind in WRITING and not self.of.device.cluster.is_cpu:
                _, *entries = (num_bytes(self.types[name]) for name in node.flat_inputs() if name in self.types)
                written += 2 * sum(entries)
                continue
            for given in node.flat_inputs():
                name = self.source.get(given, given)
                if name in made or given not in self.types:
                    continue
                size = num_bytes(self.types[given])
                read[name] = max(read.get(name, 0), min(size, results) if node.kind in PICKING else size)
                if given in self.graph.parameters and is_effect(node, self.graph):
                    written += size
            for name, type in zip(node.outputs, node.types, strict=True):
                if name in self.returned or any(reader not in own for reader in self.readers.get(name, ())):
                    written += num_bytes(type)
        return sum(read.values()) + written

    def _collective(self, node: Node, needs: tuple[int, ...]) -> Task:
        (type, *_), (ranks, crosses) = node.types, self.of.group(node)
        size = num_bytes(type) * (len(ranks) if node.kind == "ReduceScatter" else 1)
        kind = COLLECTIVES[node.kind]
        algorithm, seconds = self.of.device.collective(kind, size, ranks)
        meets = (node.outputs[0], tuple(ranks)) if crosses else None
        axes, name = self.of.group_axes(node), f"{kind} of {len(ranks)}"
        return Task(
            *(name, kind, COMMUNICATION, seconds),
            needs=needs,
            meets=meets,
            num_bytes=size,
            group=axes,
            algorithm=algorithm,
        )
