# SPDX-License-Identifier: Apache-2.0
"""Partitions the graph of an update, from gradients to new parameters, over the stages of a pipeline.

All stages run at the same time, each on the parameters that it holds. A number that depends on several stages, such as the
norm of all gradients, is all-reduced over stages; so are gradients of a parameter that several stages share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sporeloom.partition.assemble import assemble, with_names
from sporeloom.partition.graph import Graph, Name, Node, TensorType, followed, is_effect
from sporeloom.partition.grid import STAGES
from sporeloom.partition.sharded_graph import PartitionError

Stages = frozenset[int]


def cut_updates(
    graph: Graph, num_stages: int, holders: Mapping[Name, Stages], gradients: Mapping[Name, Stages]
) -> list[Graph]:
    """Build the update graph of each stage.

    Args:
        graph: the update, sharded over the ranks of a stage.
        holders: parameter -> stages that hold it; default: all stages.
        gradients: input -> stages that hold that gradient's parameter; each of several stages has a summand of the gradient.

    Raises:
        PartitionError: a value that one stage computes and another needs cannot be sent.
    """
    return _Updates(graph, num_stages, holders, gradients).run()


@dataclass(slots=True)
class _Entry:
    """An operator and the stages that compute it."""

    node: Node
    stages: Stages
    is_message: bool = False


@dataclass(slots=True)
class _Updates:
    graph: Graph
    num_stages: int
    holders: Mapping[Name, Stages]
    gradients: Mapping[Name, Stages]
    entries: list[_Entry] = field(default_factory=list)
    available: dict[Name, Stages] = field(default_factory=dict)
    types: dict[Name, TensorType | None] = field(default_factory=dict)
    sent: dict[Name, Name] = field(default_factory=dict)
    """Value -> its name after broadcast to all stages."""

    @property
    def all_stages(self) -> Stages:
        return frozenset(range(self.num_stages))

    def run(self) -> list[Graph]:
        self.types = {**self.graph.parameters, **self.graph.inputs}
        for node in self.graph.nodes:
            self.types |= zip(node.outputs, node.types, strict=True)
        self.available = {name: self.holders.get(name, self.all_stages) for name in self.graph.parameters}
        renamed: dict[Name, Name] = {}
        for name in self.graph.inputs:
            stages = self.gradients.get(name, self.all_stages)
            self.available[name] = stages
            if name in self.gradients and len(stages) > 1:
                renamed[name] = self.added_up(dict.fromkeys(stages, name), name)
        for node in self.graph.nodes:
            self.place(with_names(node, renamed))
        outputs = [self.everywhere(renamed.get(name, name)) for name in self.graph.outputs]
        return [self.of_stage(stage, outputs) for stage in range(self.num_stages)]

    def place(self, node: Node) -> None:
        if node.kind in ("Constant", "UpdateState"):
            self.put(node, self.all_stages)
            return
        if node.kind == "Depend":
            self.put(node, self.available[next(node.flat_inputs())])
            return
        names = [name for name in node.flat_inputs() if name in self.available]
        if is_effect(node, self.graph):
            written = next(name for name in names if name in self.graph.parameters)
            stages = self.available[written]
        else:
            large = any(
                self.num_elements(name) > 1 for name in names
            )  # scalars are sent to the stages that have the tensors
            there = [name for name in names if not large or self.num_elements(name) != 1]
            stages = self.all_stages.intersection(*(self.available[name] for name in there))
        if not stages and node.kind == "AddN":
            self.add_up(node)
            return
        stages = stages or self.of_the_largest(names)
        replaced = {name: self.everywhere(name) for name in names if not stages <= self.available[name]}
        self.put(with_names(node, replaced), stages)

    def of_the_largest(self, names: Sequence[Name]) -> Stages:
        """Stages that have the largest of some values, if no stage has all: the smaller values are sent there."""
        stages = self.all_stages
        for name in sorted(names, key=self.num_elements, reverse=True):
            stages = stages & self.available[name] or stages
        return stages

    def num_elements(self, name: Name) -> int:
        type = self.types[name]
        return 0 if type is None else type.num_elements

    def put(self, node: Node, stages: Stages) -> None:
        self.entries.append(_Entry(node, stages))
        self.available |= dict.fromkeys(node.outputs, stages)
        self.types |= zip(node.outputs, node.types, strict=True)

    def add_up(self, node: Node) -> None:
        """A sum of values of different stages: each stage sums its own values first."""
        own: dict[int, list[Name]] = {}
        for name in node.flat_inputs():
            own.setdefault(min(self.available[name]), []).append(name)
        shares = {}
        for stage, names in own.items():
            shares[stage] = names[0]
            if len(names) > 1:
                shares[stage] = f"{node.outputs[0]}.stage{stage}"
                part = replace(node, inputs=(tuple(names),), outputs=(shares[stage],))
                self.put(part, frozenset([stage]))
        self.sent[node.outputs[0]] = self.added_up(shares, node.outputs[0], node.outputs[0])

    def everywhere(self, name: Name) -> Name:
        """The name of a value in all stages; broadcast it if needed."""
        if self.available[name] == self.all_stages:
            return name
        if name not in self.sent:
            self.sent[name] = self.added_up({min(self.available[name]): name}, name)
        return self.sent[name]

    def added_up(self, shares: Mapping[int, Name], name: Name, result: Name = "") -> Name:
        """All-reduce a value, over the stages that have a summand if it is a gradient, else over all stages (zeros in
        the others)."""
        type = self.types[name]
        if type is not None and type.dtype == "bool":
            return self.is_true_anywhere(shares, name, type)
        if type is None or not type.dtype.startswith(("float", "bfloat", "int")):
            raise PartitionError(
                f"{name.rpartition(':')[2]}: one stage of the pipeline computes what others need; only numbers are sent"
            )
        is_gradient = name in self.gradients and len(shares) > 1
        stages = frozenset(shares) if is_gradient else self.all_stages
        result = result or f"{name}.all_stages"
        zeros = f"{name}.nothing"
        if stages - set(shares):
            value = np.zeros((), np.float32 if type.dtype == "bfloat16" else type.dtype)
            self.put(Node("Constant", (), (zeros,), (type,), value=value), stages - set(shares))
        attributes: dict[str, Any] = {"axes": (STAGES,), "op": "sum", "stages": tuple(sorted(stages))}
        for stage in sorted(stages):
            node = Node("AllReduce", (shares.get(stage, zeros),), (result,), (type,), attributes)
            self.entries.append(_Entry(node, frozenset([stage]), is_message=True))
        self.available[result], self.types[result] = stages, type
        return result

    def is_true_anywhere(self, shares: Mapping[int, Name], name: Name, type: TensorType) -> Name:
        """Logical or of a value over stages, communicated as a sum of numbers."""
        number, stages = TensorType(type.shape, "float32"), frozenset(shares)
        one, zero, sent, result = (f"{name}.{each}" for each in ("one", "zero", "number", "true"))
        for constant, value in ((one, 1.0), (zero, 0.0)):
            self.put(Node("Constant", (), (constant,), (number,), value=value), self.all_stages)
        for stage, share in shares.items():
            self.put(Node("Select", (share, one, zero), (f"{sent}{stage}",), (number,)), frozenset([stage]))
        self.types[sent] = number
        summed = self.added_up({stage: f"{sent}{stage}" for stage in stages}, sent)
        self.put(Node("NotEqual", (summed, zero), (result,), (type,)), self.available[summed])
        return result

    def of_stage(self, stage: int, outputs: Sequence[Name]) -> Graph:
        entries = [entry for entry in self.entries if stage in entry.stages]
        makers = {name: entry for entry in entries for name in entry.node.outputs}
        messages = [entry.node.outputs[0] for entry in entries if entry.is_message]
        roots = [entry for entry in entries if entry.is_message or is_effect(entry.node, self.graph)]
        roots += [makers[name] for name in outputs if name in makers]
        kept: set[int] = set()
        todo = list(roots)
        while todo:
            entry = todo.pop()
            if id(entry) in kept:
                continue
            kept.add(id(entry))
            todo += [makers[name] for name in followed(entry.node) if name in makers]
        nodes = [entry.node for entry in entries if id(entry) in kept]
        used = {name for node in nodes for name in node.flat_inputs()}
        inputs = [name for name in self.graph.inputs if name in used]
        inputs += [name for name in outputs if name in self.graph.inputs and name not in inputs]
        return assemble(nodes, self.graph.parameters, inputs, outputs, self.types, messages)
