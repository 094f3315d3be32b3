# SPDX-License-Identifier: Apache-2.0
"""Slots are read, written and overwritten alike where parameters are memory and where they are copied from a device."""

from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor

from sporeloom.inference.slot_memory import SlotMemory
from sporeloom.strategy.tensor_slice import TensorSlice

SHAPE = (3, 2, 10, 4)


@pytest.fixture(params=["CPU", "GPU"])
def memory(request):
    """Of two caches, of which this rank holds the last three of five rows; and those caches."""
    draw = np.random.default_rng(2)
    caches = [
        Parameter(Tensor(draw.normal(size=SHAPE).astype(np.float32)), name=f"layers.0.cache.{name}") for name in "kv"
    ]
    weight = Parameter(Tensor(np.ones((2, 2), np.float32)), name="layers.0.weight")
    report = SimpleNamespace(of=lambda name: SimpleNamespace(global_shape=(5, *SHAPE[1:])))
    net = SimpleNamespace(get_parameters=lambda: [weight, *caches], parallel_report=report)
    engine = SimpleNamespace(target=request.param, held_slice=lambda name, shape: TensorSlice((2, 0, 0, 0), SHAPE))
    return SlotMemory(engine, net), caches


def test_what_is_read_is_written_to_another_row(memory):
    slots, caches = memory
    before = [cache.asnumpy().copy() for cache in caches]
    read = slots.read(3, 2, 6)
    for found, whole in zip(read, before, strict=True):
        np.testing.assert_array_equal(found, whole[1, :, 2:6])
    slots.write(4, 5, read)
    for cache, whole in zip(caches, before, strict=True):
        whole[2, :, 5:9] = whole[1, :, 2:6]
        np.testing.assert_array_equal(cache.asnumpy(), whole)


def test_what_was_read_does_not_change_with_the_row(memory):
    slots, _ = memory
    read = slots.read(3, 2, 6)
    copies = [found.copy() for found in read]
    slots.clear(3, 0)
    np.testing.assert_array_equal(read, copies)


def test_the_end_of_a_row_is_overwritten(memory):
    slots, caches = memory
    before = [cache.asnumpy().copy() for cache in caches]
    slots.clear(2, 7)
    for cache, whole in zip(caches, before, strict=True):
        whole[0, :, 7:] = 0
        np.testing.assert_array_equal(cache.asnumpy(), whole)


def test_rows_of_other_ranks_are_left_alone(memory):
    slots, caches = memory
    before = [cache.asnumpy().copy() for cache in caches]
    slots.clear(1, 0)
    assert slots.read(1, 0, 4) == []
    slots.write(1, 0, [])
    np.testing.assert_array_equal([cache.asnumpy() for cache in caches], before)
