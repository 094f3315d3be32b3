# SPDX-License-Identifier: Apache-2.0
"""GroupedMatmulV4, the product of experts with their own rows, on CPUs, which have no such kernel: replaced by NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.grouped_product import grouped_outer_product, grouped_product
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.flash import constant_of, drop_unused
from sporeloom.runtime.cpu.pyfunc import add_pyfunc_primitive
from sporeloom.runtime.places import place_of

Array = NDArray[Any]
KIND = "GroupedMatmulV4"
COUNTS, SETTINGS, BY_ROWS = 8, 12, 0
"""Inputs: rows of each group; split_item, group_type, group_list_type and act_type; and the group_type of grouped rows."""
ABSENT = (*range(2, COUNTS), *range(COUNTS + 1, SETTINGS))
SUPPORTED = ([3, 0, 1, 0], [3, 2, 1, 0])
"""One result, counts of rows; groups of rows, or of the rows that are summed: the gradient of the matrices."""


def exchange_grouped_products(model: mind_ir.ModelProto) -> None:
    """Replace the uses of results of GroupedMatmulV4, in place, and remove the nodes.

    Raises:
        ConfigError: a node computes what the functions here do not.
    """
    kinds = {f"REF::{p.name}" for p in model.primitives if p.op_type == KIND}
    if not kinds:
        return
    nodes = {node.output[0]: node for node in model.graph.node}
    items = {f"REF::{p.name}" for p in model.primitives if p.op_type == "TupleGetItem"} | {"TupleGetItem"}
    results: dict[str, str] = {}
    for node in model.graph.node:
        source = nodes.get(node.input[0]) if node.op_type in items else None
        if source is None or source.op_type not in kinds:
            continue
        settings = _settings(source, nodes)
        tensors = [nodes[source.input[i]].input for i in (0, 1)]
        run = _rows_by_matrices if settings[1] == BY_ROWS else _rows_by_rows
        node.op_type = add_pyfunc_primitive(model, run, 3, name=KIND)
        node.input[:] = [*(each[0] for each in tensors), source.input[COUNTS]]
        results[source.output[0]] = node.output[0]
    for node in model.graph.node:  # what waits for a product waits for its result
        node.input[:] = [results.get(name, name) for name in node.input]
    drop_unused(model)


def _settings(node: mind_ir.NodeProto, nodes: Mapping[str, mind_ir.NodeProto]) -> list[int]:
    settings = [int(constant_of(nodes[node.input[SETTINGS + i]]).i) for i in range(4)]
    given = [i for i in ABSENT if constant_of(nodes[node.input[i]]).type != mind_ir.AttributeProto.NONE]
    if settings not in SUPPORTED or given:
        raise ConfigError(
            f"{KIND} of {place_of(node.domain)}: CPU processes compute it for one tensor of rows, one of matrices and a "
            "group_list of counts (split_item 3, group_type 0, group_list_type 1), without bias and quantization; use other "
            "operators, or run it on devices"
        )
    return settings


def _rows_by_matrices(x: Array, weight: Array, counts: Array) -> Array:
    return grouped_product(x, weight.swapaxes(1, 2), counts)


def _rows_by_rows(x: Array, y: Array, counts: Array) -> Array:
    """x (K, R), y (R, N) -> (E, K, N)."""
    return np.ascontiguousarray(grouped_outer_product(y, x.T, counts))
