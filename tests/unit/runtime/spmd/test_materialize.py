# SPDX-License-Identifier: Apache-2.0
"""A parameter that is to be read or drawn gets the part its rank holds, and only that is asked for."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.common.initializer import (
    Constant,
    HeNormal,
    HeUniform,
    Normal,
    One,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    VarianceScaling,
    XavierNormal,
    XavierUniform,
    Zero,
    initializer,
)
from mindspore.nn.utils import no_init_parameters

from sporeloom.runtime.spmd.drawing import drawing_later
from sporeloom.runtime.spmd.program import SOURCES, Source, materialize
from sporeloom.strategy.tensor_slice import TensorSlice

VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def parameters():
    """One that this rank holds half of, one that it holds whole, one of another stage, one that is drawn."""
    ms.set_device("CPU")
    with no_init_parameters():
        found = [Parameter(initializer(Normal(1.0), (4, 6), ms.float32), name=name) for name in ("half", "all", "none")]
    return [*found, Parameter(Tensor(VALUE), name="drawn")]


def graph_of(*names):
    half = SimpleNamespace(stored_slice=lambda shape, rank, groups: TensorSlice((0, 3 * rank), (shape[0], 3)))
    return SimpleNamespace(layouts={"half": half, "drawn": half}, parameters=names, rank=1, groups={})


def test_each_gets_its_part_once(parameters):
    asked = []
    for parameter in parameters[:3]:

        def read(part, name=parameter.name):
            asked.append((name, [part.shape]))
            return VALUE[part.slices]

        SOURCES.set(parameter, Source((4, 6), read))
    half, every, none, drawn = parameters
    half.shape = [4, 3]  # as MindSpore leaves it where it compiled
    for _ in range(2):
        materialize(parameters, graph_of("half", "all", "drawn"))
        np.testing.assert_array_equal(half.asnumpy(), VALUE[:, 3:])
        np.testing.assert_array_equal(every.asnumpy(), VALUE)
        np.testing.assert_array_equal(drawn.asnumpy(), VALUE[:, 3:])
        assert half.sliced and drawn.sliced and none.has_init
    assert asked == [("half", [(4, 3)]), ("all", [(4, 6)])]
    materialize(parameters, graph_of("none"))  # in a graph of another network
    assert asked[2:] == [("none", [(4, 6)])] and not none.has_init


KINDS = (
    Normal(),
    TruncatedNormal(),
    One(),
    Uniform(),
    VarianceScaling(),
    Orthogonal(),
    Constant(3),
    XavierNormal(),
    HeUniform(),
    Zero(),
    XavierUniform(),
    HeNormal(),
)
AT_ONCE = next(i for i, kind in enumerate(KINDS) if isinstance(kind, Orthogonal))
"""What is not known to take one number."""


def made():
    return [Parameter(initializer(kind, (4, 6), ms.float32), name=str(i)) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize("held", [(1,), (0, 3, 8, 11), (2, 6, 7, 9, 10), ()])
def test_what_is_drawn_later_is_what_would_have_been_drawn_and_only_what_is_held(held):
    ms.set_device("CPU")
    ms.set_seed(3)
    expected = [*made(), *made()]
    ms.set_seed(3)
    with drawing_later():
        found = made()
    found += made()  # what comes after is the same as well
    graph = graph_of(*map(str, held))
    graph.layouts = {str(i): graph.layouts["half"] for i in held}
    materialize(found[: len(KINDS)], graph)
    for i, (whole, parameter) in enumerate(zip(expected, found, strict=True)):
        if i in held:
            np.testing.assert_array_equal(parameter.asnumpy(), whole.asnumpy()[:, 3:])
        elif i >= len(KINDS) or i == AT_ONCE:
            np.testing.assert_array_equal(parameter.asnumpy(), whole.asnumpy())
        else:
            assert parameter.has_init, i
