# SPDX-License-Identifier: Apache-2.0
import itertools
from functools import partial

import numpy as np
import pytest

from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.tensor_slice import TensorSlice, rank_slice

SHAPE = (4, 6)
ALL = [
    TensorSlice((a, b), (c, d))
    for a, b in itertools.product(range(4), range(6))
    for c, d in itertools.product(range(1, 5 - a), range(1, 7 - b))
]


def entries(part):
    return set(map(tuple, np.argwhere(covered(part))))


def covered(part):
    mask = np.zeros(SHAPE, bool)
    mask[part.slices] = True
    return mask


@pytest.mark.parametrize("one", ALL[::13], ids=str)
def test_the_overlap_of_two_slices_is_what_both_have(one):
    for other in ALL[::7]:
        common, both = one.overlap(other), entries(one) & entries(other)
        assert (entries(common) if common else set()) == both
        if common:
            inside = covered(one)[one.slices].copy()
            inside[:] = False
            inside[common.within(one).slices] = True
            assert inside.sum() == common.num_entries == len(both)


def test_a_scalar_has_one_slice_and_it_is_all():
    full = TensorSlice.full(())
    assert full.overlap(full) == full
    assert full.num_entries == 1
    assert np.float32(3.0).reshape(())[full.slices] == 3.0


def test_the_slices_of_all_ranks_are_the_tensor_in_the_order_of_the_axes():
    mesh, layout = Mesh(dp=2, tp=3), (("tp",), ("dp",))
    parts = [rank_slice((6, 4), layout, mesh.degree, partial(mesh.coordinate, rank)) for rank in range(6)]
    assert [part.start for part in parts] == [(0, 0), (2, 0), (4, 0), (0, 2), (2, 2), (4, 2)]
    assert {part.shape for part in parts} == {(2, 2)}
    both = rank_slice((6, 4), (("dp", "tp"), ()), mesh.degree, partial(mesh.coordinate, 5))
    assert (both.start, both.shape) == ((5, 0), (1, 4))


def test_rows_shard_a_slice_further():
    part = TensorSlice((4, 1), (8, 2))
    assert [part.rows(index, 4) for index in range(4)] == [TensorSlice((4 + 2 * i, 1), (2, 2)) for i in range(4)]
    assert str(part.rows(3, 4)) == "[10:12, 1:3]"
