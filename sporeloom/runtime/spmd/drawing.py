# SPDX-License-Identifier: Apache-2.0
"""Deferred initialization: initial values are drawn once a rank's shard is known, and equal those of immediate
initialization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Parameter
from mindspore.common import initializer
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.runtime.spmd.program import SOURCES, Source
from sporeloom.strategy.tensor_slice import TensorSlice

DRAWS_NOTHING = (initializer.Zero, initializer.One, initializer.Constant)
DRAWS_ONCE = (
    *(initializer.Normal, initializer.TruncatedNormal, initializer.Uniform, initializer.VarianceScaling),
    *(initializer.XavierNormal, initializer.XavierUniform, initializer.HeNormal, initializer.HeUniform),
)
"""MindSpore's initializers that take one number from NumPy's generator as their seed."""


@contextmanager
def drawing_later() -> Iterator[None]:
    """Defer the initialization of parameters created in the block by a `Source`; those with other initializers are
    initialized."""
    make = Parameter.__init__

    def make_undrawn(parameter: Parameter, *of: Any, **more: Any) -> None:
        make(parameter, *of, **more)
        if not parameter.has_init:
            return
        init, shape = parameter.init_mode.init, tuple(parameter.shape)
        if type(init) in DRAWS_ONCE:
            SOURCES.set(parameter, Source(shape, _drawn(init, shape, np.random.get_state())))
            np.random.randint(low=1, high=1 << 63, dtype=np.int64)  # the seed that the initializer would take
        elif type(init) in DRAWS_NOTHING:
            SOURCES.set(parameter, Source(shape, lambda part: _filled(init, part.shape)))
        else:
            parameter.init_data()

    with no_init_parameters():
        Parameter.__init__ = make_undrawn
        try:
            yield
        finally:
            Parameter.__init__ = make


def _drawn(init: Any, shape: tuple[int, ...], state: Any) -> Callable[[TensorSlice], NDArray[Any]]:
    """A function that returns a slice of the values drawn with this state of the generator."""

    def read(part: TensorSlice) -> NDArray[Any]:
        now = np.random.get_state()
        np.random.set_state(state)
        whole = _filled(init, shape)
        np.random.set_state(now)
        return np.ascontiguousarray(whole[part.slices])

    return read


def _filled(init: Any, shape: Any) -> NDArray[Any]:
    array = np.empty(shape, np.float32)
    init(array)
    return array
