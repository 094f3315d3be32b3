# SPDX-License-Identifier: Apache-2.0
"""The layers of a network: the Cells that are assigned to the stages of a pipeline, and that recomputation counts."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from sporeloom.models.cells import PartlyForwardCell
from sporeloom.models.paths import path_matches


def matching_cells(net: nn.Cell, patterns: Sequence[str]) -> list[str]:
    """Paths of the Cells that match, pattern by pattern, in the order in which the network holds them."""
    paths = [path for path, _ in net.cells_and_names()]
    return [path for pattern in patterns for path in paths if path_matches(pattern, path)]


def layers_of(net: nn.Cell, patterns: Sequence[str]) -> list[str]:
    """Paths of the layers: the Cells that match, or without patterns the items of the list of Cells (`nn.CellList`,
    `nn.SequentialCell`) that has the most parameters; without such a list the Cells that the network consists of."""
    if patterns:
        aside = tuple(f"{path}." for path in forward_parts(net))
        return [path for path in matching_cells(net, patterns) if not path.startswith(aside)]
    lists = [
        (path, cell)
        for path, cell in net.cells_and_names()
        if isinstance(cell, (nn.CellList, nn.SequentialCell)) and len(cell) > 1
    ]
    if lists:
        path, found = max(lists, key=lambda each: _num_elements(each[1]))
    else:
        path, found = "", net
        while len(children := found.name_cells()) == 1 and next(iter(children.values())).name_cells():
            ((name, found),) = children.items()
            path = f"{path}.{name}" if path else name
    return [f"{path}.{name}" if path else name for name in found.name_cells()]


def forward_parts(net: nn.Cell) -> Sequence[str]:
    """Paths of the parts that have no backward pass."""
    return net.without_backward if isinstance(net, PartlyForwardCell) else ()


def forward_layers(net: nn.Cell, patterns: Sequence[str]) -> list[list[str]]:
    """Paths of the layers of each part that has no backward pass."""
    found = matching_cells(net, patterns)
    return [[path for path in found if path.startswith(f"{part}.")] for part in forward_parts(net)]


def _num_elements(cell: nn.Cell) -> int:
    return sum(parameter.size for parameter in cell.get_parameters())
