# SPDX-License-Identifier: Apache-2.0
"""A call as a Cell from Tensors to Tensors, whatever is nested in its result. MindIR has neither dicts nor None."""

from __future__ import annotations

import itertools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import constexpr

_shown: dict[int, object] = {}
"""Structure of a call's result, by number of the call."""
_serial = itertools.count()


@constexpr
def _show(number, structure):
    _shown[number] = structure
    return True


def _structure_of(x):
    if isinstance(x, Tensor):
        return "tensor"
    if isinstance(x, dict):
        return ("dict", tuple(x.keys()), _structures_of(tuple(x.values())))
    if isinstance(x, tuple):
        return ("tuple", _structures_of(x))
    if isinstance(x, list):
        return ("list", _structures_of(tuple(x)))
    return ("literal", x)


def _structures_of(items):
    found = ()
    for each in items:
        found = (*found, _structure_of(each))
    return found


def _tensors_of(x):
    if isinstance(x, Tensor):
        return (x,)
    if isinstance(x, dict):
        return _tensors_in(tuple(x.values()))
    if isinstance(x, (tuple, list)):
        return _tensors_in(tuple(x))
    return ()


def _tensors_in(items):
    found = ()
    for each in items:
        found = found + _tensors_of(each)
    return found


def _numbers_of(x):
    """Scalars that may mark a completed action: an optimizer returns True for each update."""
    if isinstance(x, (bool, int, float)):
        return (x,)
    if isinstance(x, dict):
        return _numbers_in(tuple(x.values()))
    if isinstance(x, (tuple, list)):
        return _numbers_in(tuple(x))
    return ()


def _numbers_in(items):
    found = ()
    for each in items:
        found = found + _numbers_of(each)
    return found


class Call(nn.Cell):
    """Calls a Cell with Tensors; returns the Tensors in its result, or a 0.

    Args:
        call: calls `called`, its first argument, with the Tensors that follow in their places.
        report: of a parallelized network outside `called`, which uses its parameters alone.
        parameters: that its graph holds, and `called` does not own.
    """

    def __init__(self, called, call, report=None, parameters=()):
        super().__init__(auto_prefix=False)
        for number, parameter in enumerate(parameters):
            setattr(self, f"parameter_{number}", parameter)
        self.called, self.number = called, next(_serial)
        self.parallel_report = report
        self.takes_batch = report is None
        """Whether its inputs are batches, whose rows data parallelism shards."""
        self.call = call
        self.nothing = Tensor(np.zeros((), np.float32))
        self.structure = None
        """Structure of its result, once it is compiled."""

    def construct(self, *tensors):
        given = self.call(self.called, *tensors)
        _show(self.number, _structure_of(given))
        found, numbers = _tensors_of(given), _numbers_of(given)
        if len(found) == 0:
            found = (self.nothing,)
        if len(numbers) == 0:
            return found
        return (ops.depend(found[0], numbers), *found[1:])

    def take_structure(self):
        """The structure of its result, after it was compiled here."""
        return _shown.pop(self.number)
