# SPDX-License-Identifier: Apache-2.0
"""A MindIR graph as a list of entries without names: parameters, inputs, nodes, and its outputs.

Entries refer to each other by position. Numbers of layers are separate from the rest of an entry, which equal layers share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.depth.units import Units

IDS = {
    "unique_id": "operator",
    "forward_unique_id": "operator",
    "recompute_id": "repeated",
    "recompute_sub_graph": "cell",
}
"""Attributes with numbers by which MindSpore's nodes refer to others -> what is numbered. An entry refers to the first node
that has the number."""
NAMES_OF_NODES = ("forward_node_name",)
"""Attributes with names of nodes, which nothing reads."""
TUPLES = ("MakeTuple", "make_list")
"""Operators whose types follow from their inputs, of which there may be some for each layer; so do those of a Depend on
one."""
ABSENT = -1
_OPERATOR_NUMBER = re.compile(r"-op\d+$")

Label = Callable[[mind_ir.TensorProto], str | None]
"""Name of a constant, if it depends on the number of a layer."""


@dataclass(slots=True)
class Entry:
    """A parameter, an input, a node, or the outputs of a graph."""

    kind: str
    content: tuple[Hashable, ...]
    """Everything but the names, positions and layer numbers."""
    texts: tuple[str, ...]
    """Texts of the content that may contain layer numbers."""
    units: tuple[int, ...]
    """The layer units in these, one after another."""
    inputs: tuple[int, ...]
    ids: tuple[int, ...]
    """For each attribute of IDS that it has: the first node with the same number, or ABSENT."""
    proto: Any
    primitive: Any = None

    @property
    def operator(self) -> str:
        """Kind of an operator; empty for what is none."""
        return "" if self.primitive is None else str(self.primitive.op_type)

    @property
    def refs(self) -> tuple[int, ...]:
        return self.inputs + self.ids


def read_entries(model: mind_ir.ModelProto, units: Units, of_inputs: Sequence[str], label: Label) -> list[Entry]:
    """Read a graph without functions.

    Args:
        of_inputs: for each input, the name of what it is; for gradients that of the parameter.
    """
    return _Reader(model, units, label).entries(of_inputs)


class _Reader:
    def __init__(self, model: mind_ir.ModelProto, units: Units, label: Label):
        self.graph, self.units, self.label = model.graph, units, label
        self.primitives = {primitive.name: primitive for primitive in model.primitives}
        self.of_primitives: dict[str, tuple[tuple[Hashable, ...], list[str]]] = {}
        self.positions: dict[str, int] = {}
        self.tuples: set[str] = set()
        self.first: dict[tuple[str, Any], int] = {}

    def entries(self, of_inputs: Sequence[str]) -> list[Entry]:
        found: list[Entry] = []
        for parameter in self.graph.parameter:
            rest = type(parameter)()
            rest.CopyFrom(parameter)
            rest.name = rest.ref_key = ""
            self.positions[parameter.name] = len(found)
            name = parameter.name.rpartition(":")[2]
            found.append(self.entry("parameter", [rest.SerializeToString()], [name], parameter))
        for given, name in zip(self.graph.input, of_inputs, strict=True):
            rest = type(given)()
            rest.CopyFrom(given)
            rest.name = ""
            self.positions[given.name] = len(found)
            found.append(self.entry("input", [rest.SerializeToString()], [name], given))
        unordered = self.waited_for()
        for node in self.graph.node:
            position = self.positions[node.output[0]] = len(found)
            for name, value in _ids(node):
                self.first.setdefault((IDS[name], value), position)
            entry = self.node(node, position)
            if node.output[0] in unordered:
                entry.inputs = tuple(sorted(entry.inputs))
            found.append(entry)
        outputs = [self.positions[output.name] for output in self.graph.output]
        found.append(self.entry("outputs", [], [], self.graph.output, outputs))
        return found

    def entry(
        self, kind: str, content: Iterable[Hashable], texts: Iterable[str], proto: Any, inputs: Sequence[int] = (),
        ids: Sequence[int] = (), primitive: Any = None,
    ) -> Entry:  # fmt: skip
        parts = [self.units.split(text) for text in texts]
        templates, found = tuple(text for text, _ in parts), tuple(unit for _, units in parts for unit in units)
        return Entry(kind, (kind, *content, *templates), templates, found, tuple(inputs), tuple(ids), proto, primitive)

    def waited_for(self) -> set[str]:
        """Tuples of values that only an UpdateState waits for: their order says nothing, and MindSpore's varies."""
        users: dict[str, set[str]] = {}
        for node in self.graph.node:
            kind = self.kind(node)
            for name in node.input:
                users.setdefault(name, set()).add(kind)
        for output in self.graph.output:
            users.setdefault(output.name, set()).add("output")
        return {
            node.output[0]
            for node in self.graph.node
            if self.kind(node) == "MakeTuple" and users.get(node.output[0]) == {"UpdateState"}
        }

    def kind(self, node: mind_ir.NodeProto) -> str:
        primitive = self.primitives.get(node.op_type.removeprefix("REF::"))
        return primitive.op_type if primitive else node.op_type

    def node(self, node: mind_ir.NodeProto, position: int) -> Entry:
        if node.op_type == "Constant":
            return self.constant(node)
        kind, ids = self.kind(node), []
        content, texts = self.primitive(node.op_type.removeprefix("REF::"))
        is_tuple = kind in TUPLES or (kind == "Depend" and node.input[0] in self.tuples)
        if is_tuple:
            self.tuples.add(node.output[0])
        for name, value in _ids(node):
            at = self.first.get((IDS[name], value), ABSENT)
            ids.append(at if at <= position else ABSENT)
        rest = [each for each in (*node.primal_attr, *node.node_attr) if each.name not in (*IDS, *NAMES_OF_NODES)]
        return self.entry(
            "tuple" if is_tuple else "operator",
            [
                *content,
                len(node.output),
                *(() if is_tuple else map(_serialized, node.attribute)),
                *sorted(map(_serialized, rest)),
                *(name for name, _ in _ids(node)),
            ],
            [_OPERATOR_NUMBER.sub("", node.domain), *texts],
            node,
            [self.positions[name] for name in node.input],
            ids,
            self.primitives[node.op_type.removeprefix("REF::")],
        )

    def constant(self, node: mind_ir.NodeProto) -> Entry:
        value = node.attribute[0]
        name = self.label(value.tensors[0]) if len(value.tensors) == 1 else None
        if name is None:
            return self.entry("constant", map(_serialized, node.attribute), [], node)
        tensor = value.tensors[0]
        return self.entry("labelled", [tuple(tensor.dims), tensor.data_type], [name], node)

    def primitive(self, name: str) -> tuple[tuple[Hashable, ...], list[str]]:
        """Content and texts of a primitive."""
        if name not in self.of_primitives:
            rest = type(self.primitives[name])()
            rest.CopyFrom(self.primitives[name])
            rest.name, texts = "", []
            for attribute in rest.attribute:
                if attribute.s:
                    texts.append(attribute.s.decode())
                    attribute.s = b""
            self.of_primitives[name] = ((rest.SerializeToString(),), texts)
        return self.of_primitives[name]


def _serialized(attribute: Any) -> bytes:
    content: bytes = attribute.SerializeToString()
    return content


def _ids(node: mind_ir.NodeProto) -> list[tuple[str, Any]]:
    """Attributes of IDS that a node has, in a fixed order."""
    found: dict[str, Any] = {each.name: each.s for each in node.primal_attr if each.name in IDS}
    found |= {each.name: each.i for each in node.node_attr if each.name in IDS}
    return sorted(found.items())
