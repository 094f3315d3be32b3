# SPDX-License-Identifier: Apache-2.0
"""Initial values that are drawn when it is known which of them a rank holds: those that would have been drawn at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Parameter
from mindspore.common import initializer
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.runtime.cpu.executor import Source

DRAWS_NOTHING = (initializer.Zero, initializer.One, initializer.Constant)
DRAWS_ONCE = (
    *(initializer.Normal, initializer.TruncatedNormal, initializer.Uniform, initializer.VarianceScaling),
    *(initializer.XavierNormal, initializer.XavierUniform, initializer.HeNormal, initializer.HeUniform),
)
"""MindSpore's initializers that take one number of NumPy's generator, as a seed of their own."""


@contextmanager
def drawing_later() -> Iterator[None]:
    """Parameters made in the block have a `Source` in place of a value, but those of initializers that are not known here."""
    make = Parameter.__init__

    def make_undrawn(parameter: Parameter, *of: Any, **more: Any) -> None:
        make(parameter, *of, **more)
        if not parameter.has_init:
            return
        init, shape = parameter.init_mode.init, tuple(parameter.shape)
        if type(init) in DRAWS_ONCE:
            parameter.source = Source(shape, _drawn(init, shape, np.random.get_state()))
            np.random.randint(low=1, high=1 << 63, dtype=np.int64)  # the seed that it takes
        elif type(init) in DRAWS_NOTHING:
            parameter.source = Source(shape, lambda slices: _filled(init, [s.stop - s.start for s in slices]))
        else:
            parameter.init_data()

    with no_init_parameters():
        Parameter.__init__ = make_undrawn
        try:
            yield
        finally:
            Parameter.__init__ = make


def _drawn(init: Any, shape: tuple[int, ...], state: Any) -> Callable[[tuple[slice, ...]], NDArray[Any]]:
    """Gives a part of what is drawn with this state of the generator."""

    def read(slices: tuple[slice, ...]) -> NDArray[Any]:
        now = np.random.get_state()
        np.random.set_state(state)
        whole = _filled(init, shape)
        np.random.set_state(now)
        return np.ascontiguousarray(whole[slices])

    return read


def _filled(init: Any, shape: Any) -> NDArray[Any]:
    array = np.empty(shape, np.float32)
    init(array)
    return array
