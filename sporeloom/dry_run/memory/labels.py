# SPDX-License-Identifier: Apache-2.0
"""Labels of the storages of a graph: kind, layer and operator."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from sporeloom.dry_run.memory.liveness import Lifetimes
from sporeloom.partition.graph import Graph, Name, Node
from sporeloom.partition.sharded_graph import SENT

KINDS = (
    "parameter",
    "optimizer",
    "gradient",
    "activation",
    "recomputed",
    "communication",
    "temporary",
    "input",
    "constant",
    "auxiliary",
)
"""gradient: of a parameter, until the update; activation: from the forward to the backward pass; recomputed: an activation
in the backward pass; communication: the result of a collective, or a value that is sent or received; auxiliary: other models
and caches of a task, by closed formulas."""
_NUMBERED = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
_WRAPPERS = re.compile(r"^(?:step\.)?(?:network\.)?")


class Label(NamedTuple):
    """Kind and origin of a storage."""

    kind: str
    layer: str
    """Path of the layer, or of the first Cells where layers have no number; empty if unknown."""
    operator: str
    """The operator that allocates it: kind and path of its Cell; or the name of a parameter."""


def layer_of(path: str) -> str:
    """The layer that a path lies in: up to the first number, or else the first two names."""
    numbered = _NUMBERED.match(path)
    return numbered[0] if numbered else ".".join(path.split(".")[:2])


def cells_of(graph: Graph) -> dict[Name, str]:
    """Path of the Cell of each value: that of its operator, of the operator that it is a gradient of, or of its inputs."""
    found: dict[Name, str] = {}
    of_source: dict[Name, str] = {}
    for node in graph.nodes:
        scope, cell = node.scope, ""
        if scope is not None:
            cell = scope.cell or of_source.get(scope.forward, "") or of_source.get(scope.again, "")
            of_source.setdefault(scope.name, cell)
        if not cell:
            cell = next((found[name] for name in node.flat_inputs() if found.get(name)), "")
        found |= dict.fromkeys(node.outputs, cell)
    return {name: _WRAPPERS.sub("", cell) for name, cell in found.items()}


def of_parameter(full: Name, trained_network: Collection[str]) -> Label:
    """The label of a parameter: of the network, or else of the optimizer."""
    name = full.rpartition(":")[2]
    if name in trained_network:
        return Label("parameter", layer_of(name.rpartition(".")[0]), name)
    return Label("optimizer", layer_of(name.partition(".")[2].rpartition(".")[0]), name)


def labels(
    of: Lifetimes, cells: Mapping[Name, str], phases: Mapping[Name, str], kinds: Mapping[Name, str], phase: str
) -> list[Label]:
    """Label the storages of a graph.

    Args:
        cells: path of the Cell of each value.
        phases: phase of each value; `phase` is that of all others.
        kinds: kinds of values that other graphs read.
    """
    of_outputs = {of.names[storage]: storage for storage in of.outputs if storage is not None}
    result = []
    for number, (name, maker) in enumerate(zip(of.names, of.makers, strict=True)):
        if maker is None:
            result.append(Label("input", "", name.rpartition(":")[2]))
            continue
        cell = cells.get(name) or next((cells[each] for each in maker.flat_inputs() if cells.get(each)), "")
        when = phases.get(maker.outputs[0], phase)
        kind = kinds.get(name) if name in of_outputs else None
        if kind is None:
            kind = _kind(maker, when, {phases.get(reader.outputs[0], phase) for reader in of.readers[number]})
        what = f"gradient by {maker.kind}" if when == "backward" else maker.kind
        result.append(Label(kind, layer_of(cell), f"{cell or 'no cell'}: {what}"))
    return result


def _kind(maker: Node, when: str, read: Iterable[str]) -> str:
    read = set(read)
    if when == "forward" and read & {"backward", "recompute"}:
        return "activation"
    if when == "recompute":
        return "recomputed"
    if when == "backward" and "optimizer" in read:
        return "gradient"
    return "communication" if maker.kind in SENT else "temporary"
