# SPDX-License-Identifier: Apache-2.0
"""Choose a strategy for a custom network: pairs of products sharded by columns and rows over tp, the batch over
dp."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.operators import operators, parameter_uses
from sporeloom.strategy.layout import Layout, show

MIN_SHARE = 0.5
"""Minimum fraction of all parameters that the pairs must hold: each pair costs two all-reduces a step."""
MAX_TP = 8
"""Maximum tp: the number of devices of a server."""
BYTES_A_PARAMETER = 16
"""Bytes of weight, gradient and the two moments of Adam in float32."""
HEAD = "# Chosen by auto_parallel"


@dataclass(frozen=True)
class Product:
    """A matrix product with a parameter as its right factor."""

    path: str
    inner: int
    outer: int
    is_transposed: bool
    """Whether the parameter is (outer, inner)."""

    @property
    def parent(self) -> str:
        """Path of the cell that contains the product's own cell."""
        return ".".join(self.path.split(".")[:-2])

    @property
    def by_columns(self) -> tuple[Layout, Layout]:
        weight: Layout = (("tp",), ()) if self.is_transposed else ((), ("tp",))
        return ((("dp",), ()), weight)

    @property
    def by_rows(self) -> tuple[Layout, Layout]:
        weight: Layout = ((), ("tp",)) if self.is_transposed else (("tp",), ())
        return ((("dp",), ("tp",)), weight)


def products(net: nn.Cell) -> list[Product]:
    """Matrix products with a parameter nobody else uses, in the order the network's cells were made."""
    uses = list(parameter_uses(operators(net)))
    times = Counter(use.parameter.name for use in uses)
    found = []
    for use in uses:
        primitive, shape = use.operator.primitive, tuple(use.parameter.shape)
        if primitive.name != "MatMul" or use.position != 1 or len(shape) != 2 or times[use.parameter.name] > 1:
            continue
        is_transposed = bool(primitive.transpose_b)
        inner, outer = reversed(shape) if is_transposed else shape
        found.append(Product(use.operator.path, inner, outer, is_transposed))
    return found


def pairs(found: list[Product]) -> list[tuple[list[Product], Product]]:
    """Find products that widen, and the one of the same cell that takes their width back: the two or three
    matrices of an MLP.

    Square ones, as attention has, are left whole: what feeds what cannot be seen in their sizes.
    """
    result: list[tuple[list[Product], Product]] = []
    wide: list[Product] = []
    for product in found:
        if product.outer > product.inner:
            wide.append(product)
            continue
        widened = [w for w in wide if w.outer == product.inner and w.parent == product.parent]
        if widened and product.outer < product.inner:
            result.append((widened, product))
            wide = [w for w in wide if w not in widened]
    return result


def rules_of(found: list[tuple[list[Product], Product]]) -> list[str]:
    """Rules that shard pairs over tp: the products that widen by columns, the one that narrows by rows."""
    rules = []
    for wide, narrow in found:
        rules += [f"{p.path}: [{', '.join(map(show, p.by_columns))}]" for p in wide]
        rules.append(f"{narrow.path}: [{', '.join(map(show, narrow.by_rows))}]")
    return rules


def choose(net: nn.Cell, devices: int, memory_gb: float) -> str:
    """Write a strategy file for `net` on `devices`, with the reasons in its first lines.

    Raises:
        ConfigError: an impossible number of devices.
    """
    if devices < 1 or devices & (devices - 1):
        raise ConfigError(f"devices = {devices}: MindSpore derives layouts on 2^n devices only; give 2, 4, 8, ...")
    total = sum(math.prod(parameter.shape) for parameter in net.trainable_params())
    paired = pairs(products(net))
    held = sum(p.inner * p.outer for wide, narrow in paired for p in [*wide, narrow])
    widths = math.gcd(*(narrow.inner for _, narrow in paired)) if paired else 1
    possible = [tp for tp in (1, 2, 4, 8) if tp <= min(devices, MAX_TP) and widths % tp == 0]
    least = 2 if held >= MIN_SHARE * total and 2 in possible else 1
    enough = [
        tp for tp in possible if tp >= least and BYTES_A_PARAMETER * (total - held + held / tp) <= memory_gb * 2**30
    ]
    tp = enough[0] if enough else possible[-1]
    share = f"{len(paired)} pairs of products hold {held / max(1, total):.0%} of {total:,} parameters"
    lines = [
        f"{HEAD}, devices={devices}: {share}; {f'sharded over tp {tp}' if tp > 1 else 'the batch alone is sharded'}.",
        "# Read it, change it, and load it by its name.",
        f"mesh: {{dp: {devices // tp}, tp: {tp}}}" if tp > 1 else f"mesh: {{dp: {devices}}}",
    ]
    if tp > 1:
        lines += ["rules:", "  operators:", *(f"    {rule}" for rule in rules_of(paired))]
    return "\n".join(lines) + "\n"
