# SPDX-License-Identifier: Apache-2.0
"""Sums that MindSpore's compiler does not change.

Its pass `adjust_all_reduce_mul_add` takes `AddN(Mul(AllReduce(x), y), z)` for a gradient with weight decay and makes
`Mul(AllReduce(AddN(x, z)), y)` of it, which is the same for y = 1 / ranks only: with any other factor z is multiplied, and
added up over the ranks. MindSpore adds up gradients, and decays weights, by AddN. The pass looks for no other operator, so
here they are added by Add. What is still added by AddN is checked in the graph (`graph_checks`).
"""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
from mindspore import ops

_places: list[tuple[Any, str, ops.AddN]] = []
"""Modules of MindSpore, their names for an AddN, and the AddN."""
_looked_at: set[str] = set()
_add, _add_n = ops.Add(), ops.AddN()


def add_up(values: Any) -> Any:
    """Result of `ops.AddN()(values)`. Booleans, whose gradients are zeros, have no Add and no AllReduce."""
    if values[0].dtype == ms.bool_:
        return _add_n(values)
    total = values[0]
    for each in values[1:]:
        total = _add(total, each)
    return total


def add_up_tensors(values: Any) -> Any:
    """`add_up`, but not for numbers: in a pipeline a number stands for the gradient of each microbatch, and
    MindSpore finds them by their AddN."""
    if values[0].ndim == 0:
        return _add_n(values)
    return add_up(values)


def add_by_pairs(pipeline: bool) -> None:
    """Let MindSpore's own functions and optimizers add without AddN in all further compilations of this process."""
    for name in sys.modules.keys() - _looked_at:
        _looked_at.add(name)
        module = sys.modules[name]
        if name.startswith("mindspore."):
            _places.extend((module, held, value) for held, value in vars(module).items() if isinstance(value, ops.AddN))
    for module, held, _ in _places:
        setattr(module, held, add_up_tensors if pipeline else add_up)


def add_by_add_n() -> None:
    """Undo `add_by_pairs`: in a graph of one device, MindSpore's recomputation makes cycles of sums without AddN."""
    for module, held, value in _places:
        setattr(module, held, value)
