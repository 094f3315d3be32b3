# SPDX-License-Identifier: Apache-2.0
"""List the operators of a network that rules can name, with suggested rules where they are worth writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspore import nn

from sporeloom.parallel.choose import pairs, products
from sporeloom.parallel.operators import operators, parameter_uses
from sporeloom.strategy.layout import Layout, Shape, show

Shapes = tuple[Sequence[Shape], Sequence[Shape]]
"""Shapes of an operator's inputs and outputs on one device."""


def suggested_rules(net: nn.Cell, shapes: Mapping[str, Shapes] | None = None) -> dict[str, tuple[Layout, ...]]:
    """Suggest layouts of inputs by operator path: pairs of products by columns and rows, embedding tables by rows
    where the number of dims of their indices is known."""
    rules: dict[str, tuple[Layout, ...]] = {}
    for wide, narrow in pairs(products(net)):
        rules |= {product.path: product.by_columns for product in wide}
        rules[narrow.path] = narrow.by_rows
    for use in parameter_uses(operators(net)):
        shape, path = tuple(use.parameter.shape), use.operator.path
        if use.operator.primitive.name != "Gather" or use.position or len(shape) != 2 or shape[0] <= shape[1]:
            continue
        dims = 1 if isinstance(use.operator.cell, nn.Embedding) else 0  # which makes one row of its indices
        if shapes and path in shapes:
            dims = len(shapes[path][0][1])
        if dims:
            rules[path] = ((("tp",), ()), (("dp",), *[()] * (dims - 1)))
    return rules


def table_of_operators(net: nn.Cell, shapes: Mapping[str, Shapes] | None = None) -> str:
    """Format one line for each operator: path, kind, shapes or else its parameter, and its rule in a strategy
    file.

    Args:
        shapes: by path, where the network was compiled.
    """
    found, suggested = operators(net), suggested_rules(net, shapes)
    weights = {use.operator.path: use.parameter for use in parameter_uses(found)}
    rows = [("operator", "kind", "shapes" if shapes else "parameter", "suggested rule")]
    for operator in found:
        layouts, weight = suggested.get(operator.path), weights.get(operator.path)
        if shapes is None:
            told = f"{weight.name} {tuple(weight.shape)}" if weight is not None else ""
        elif operator.path in shapes:
            given, made = shapes[operator.path]
            told = f"{', '.join(map(str, given))} -> {', '.join(map(str, made))}"
        else:  # the compiler has removed it
            continue
        rule = f"[{', '.join(map(show, layouts))}]" if layouts else ""
        rows.append((operator.path, operator.primitive.name, told, rule))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(f"{text:{width}}" for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    )
