# SPDX-License-Identifier: Apache-2.0
"""A builder with which decompositions emit simpler operators, each of which is sharded like an operator of the source
graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sporeloom.partition.graph import Name, Node, TensorType
from sporeloom.partition.layout import replicated
from sporeloom.partition.sharded_graph import Held, PartitionError, Value
from sporeloom.strategy.layout import Shape


class Building(Held, ABC):
    """Values by name, and the `Builder` of decompositions."""

    @abstractmethod
    def visit(self, node: Node) -> None:
        """Shard one operator."""

    def add_constant(self, node: Node) -> None:
        type = node.types[0]
        layout = None if type is None else replicated(len(type.shape))
        self.result.graph.nodes.append(node)
        self.values[node.outputs[0]] = Value(type, layout, node.outputs[0], node.value, is_constant=True)

    def type_of(self, name: Name) -> TensorType:
        type = self.values[name].type
        assert type is not None, name
        return type

    def value_of(self, name: Name) -> Any:
        if not self.values[name].is_constant:
            raise PartitionError(f"{self.consumer}: an input that must be known is computed")
        return self.values[name].constant

    def put(self, kind: str, inputs: Sequence[Any], shape: Shape, dtype: str = "") -> Name:
        type = TensorType(shape, dtype or self.type_of(inputs[0]).dtype)
        names = tuple(each if isinstance(each, str) else self.known(each, type.dtype) for each in inputs)
        self.visit(Node(kind, names, (name := self.fresh(kind),), (type,), scope=self.scope))
        return name

    def known(self, value: Any, dtype: str) -> Name:
        type = TensorType((), dtype) if isinstance(value, float) else None
        self.add_constant(Node("Constant", (), (name := self.fresh("constant"),), (type,), value=value))
        return name

    def wait(self, result: Name, other: Name) -> Name:
        type, waiting = self.type_of(result), self.fresh("Depend")
        self.visit(Node("Depend", (result, other), (waiting,), (type,), scope=self.scope))
        return waiting

    def update(self, parameter: Name, value: Name, monad: Name, result: Name) -> Name:
        type, written = self.type_of(parameter), self.fresh("Assign")
        attributes = {"side_effect_mem": True}
        self.visit(Node("Assign", (parameter, value, monad), (written,), (type,), attributes, scope=self.scope))
        return self.wait(result, written)
