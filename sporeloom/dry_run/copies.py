# SPDX-License-Identifier: Apache-2.0
"""Copies of a microbatch: the order of their collectives, by which a device computes one while another communicates."""

from __future__ import annotations

import re

from sporeloom.private_names import mind_ir
from sporeloom.runtime.cpu.lowering import attributes, collective_nodes
from sporeloom.runtime.places import place_of

_COPY = re.compile(r"interleave_inputs-CellList/(\d+)-_MicroBatch")


def order_of_copies(model: mind_ir.ModelProto, groups: dict[str, list[int]]) -> list[tuple[int, str]]:
    """(copy, place) of the forward pass's collectives, in the order of the graph, which MindSpore's dependencies between the
    copies decide. The copies are written out in it."""
    depends = {f"REF::{p.name}" for p in model.primitives if p.op_type == "Depend"} | {"Depend"}
    communicating = {n.output[0] for n, p in collective_nodes(model) if len(groups[attributes(p)["group"]]) > 1}
    copies: dict[str, frozenset[int]] = {}  # which copies' rows a value is made of
    found = []
    for node in model.graph.node:
        own = _COPY.search(node.domain)
        given = node.input[:1] if node.op_type in depends else node.input  # the rest is order alone
        of = frozenset([int(own[1])]) if own else frozenset().union(*(copies.get(name, frozenset()) for name in given))
        copies[node.output[0]] = of
        place = place_of(node.domain)
        if node.output[0] in communicating and len(of) == 1 and place.endswith(", forward"):
            found.append((next(iter(of)), place.removesuffix(", forward")))
    return found
