# SPDX-License-Identifier: Apache-2.0
"""ZeRO-2 and ZeRO-3 / FSDP: gradients of each microbatch are reduce-scattered; with ZeRO-3 parameters are gathered anew for
the forward and the backward pass, each when its first user is due, so that no rank ever has all of them gathered."""

from __future__ import annotations

from abc import ABC

from sporeloom.partition.graph import OF_THIS_PASS, Graph, Name, Node, followed
from sporeloom.partition.graph_builder import Building
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout, fitted
from sporeloom.partition.sharded_graph import Value
from sporeloom.strategy.layout import Layout


class Resharding(Building, ABC):
    """Values by name, of which those made of parameters alone can be gathered once for each pass."""

    def __init__(self, source: Graph, grid: DeviceGrid):
        super().__init__(source, grid)
        self.reshards = False
        self.original: dict[Name, Name] = {}
        """Recomputed value -> the value of the forward pass."""
        self.scattered: dict[Name, Layout] = {}
        """Gradient, or a summand of one -> the layout of its parameter."""
        self._of_parameters = {*source.parameters}
        """Values that depend on parameters and constants alone."""
        self._due: dict[tuple[Name, bool], Name] = {}
        """Such a value, and whether in the backward pass -> the same, which waits for its first user to be due."""

    def note(self, node: Node) -> None:
        """Note whether the outputs of a node that was sharded depend on parameters alone."""
        names = [next(node.flat_inputs())] if node.kind == "Load" else list(followed(node))
        depends = [name in self._of_parameters for name in names if not self.values[name].is_constant]
        if depends and all(depends) and not node.attributes.get("side_effect_mem"):
            self._of_parameters |= {*node.outputs}

    def scatter(self, node: Node) -> None:
        """Reduce-scatter outputs that are gradients, if each rank has a partial sum of them."""
        for name in node.outputs:
            value, dims = self.values[name], self.scattered.get(name)
            if dims is None or value.type is None or value.layout is None:
                continue
            target = fitted(dims, value.type.shape, self.grid)
            axes = {axis for dim in target for axis in dim}
            if value.layout.partial & axes:
                self.lay_out(name, ValueLayout(target, value.layout.partial - axes))

    def is_repeated(self, node: Node) -> bool:
        """Take the value of the forward pass for one that is made of parameters and recomputed, such as the cast of a weight,
        if it was gathered: without `reshards` this is done once. Returns whether it is such a one."""
        names = [name for name in node.flat_inputs() if not self.values[name].is_constant]
        if self.reshards or node.again not in self.values or len(node.outputs) != 1:
            return False
        if not names or not self._of_parameters.issuperset(names) or node.attributes.get("side_effect_mem"):
            return False
        (name,), before = node.outputs, self.values[node.again]
        if len({self.grid.degree(layout.axes) for layout in (before.layout, *before.copies) if layout}) < 2:
            return False  # every rank has as much of it as it needs
        self.values[name], self.original[name] = before, node.again
        return True

    def _is_gathered(self, value: Value, layout: ValueLayout) -> bool:
        assert value.layout is not None
        return self.grid.degree(layout.axes) < self.grid.degree(value.layout.axes)

    def is_resharded(self, name: Name) -> bool:
        """Whether a value is to stay as it is, and is gathered for each pass."""
        return self.reshards and name in self._of_parameters

    def forget(self, parameter: Name) -> None:
        """Forget what waits, because the parameter is written."""
        self._due = {key: due for key, due in self._due.items() if key[0] != parameter}

    def when_due(self, node: Node, given: Name, wanted: ValueLayout | None) -> Name:
        """An input of a node. If it is made of parameters and must be gathered, it waits for another input of the first
        node of this pass that uses it."""
        value = self.values[given]
        if not self.is_resharded(given) or value.layout is None or wanted is None:
            return given
        if not self._is_gathered(value, wanted) or node.attributes.get("side_effect_mem"):
            return given
        key = given, node.scope is not None and node.scope.is_backward
        if key not in self._due and (other := self._other_input(node)):
            due, waits = self.fresh("Depend"), {OF_THIS_PASS: True}
            self.visit(Node("Depend", (given, other), (due,), (self.type_of(given),), waits, scope=node.scope))
            self._due[key] = due
        return self._due.get(key, given)

    def _other_input(self, node: Node) -> Name | None:
        for name in node.flat_inputs():
            value = self.values[name]
            if value.type is not None and not value.is_constant and name not in self._of_parameters:
                return name
        return None
