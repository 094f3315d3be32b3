# SPDX-License-Identifier: Apache-2.0
"""FLOPs of products: two for each multiplication, whatever MindSpore calls the operator."""

import pytest

from sporeloom.dry_run.work import PRODUCTS
from sporeloom.partition.operators import CONTRACTIONS

CASES = [
    ("MatMul", (4, 5), (4, 3), (3, 5), 4 * 5 * 3),
    ("MatMul", (4, 5), (3, 4), (3, 5), 4 * 5 * 3),  # transposed
    ("MatMul", (4, 5), (4, 4), (4, 5), 4 * 5 * 4),
    ("BatchMatMul", (2, 6, 4, 5), (2, 6, 4, 3), (2, 6, 3, 5), 12 * 4 * 5 * 3),
    ("BatchMatMul", (2, 6, 4, 5), (4, 3), (2, 6, 3, 5), 12 * 4 * 5 * 3),  # one matrix for all
    ("MatMulExt", (2, 4, 5), (4, 3), (2, 3, 5), 2 * 4 * 5 * 3),
    ("MatMulExt", (), (7,), (7,), 7),
    ("BatchMatMulExt", (2, 4, 5), (2, 4, 3), (2, 3, 5), 2 * 4 * 5 * 3),
    ("Dense", (8, 2, 5), (8, 2, 3), (5, 3), 16 * 5 * 3),
    # Rows of three experts, 7 in all, and the gradient of their matrices.
    ("GroupedMatmulV4", (7, 5), (7, 4), (3, 4, 5), 7 * 4 * 5),
    ("GroupedMatmulV4", (3, 4, 5), (4, 7), (7, 5), 7 * 4 * 5),
    # An image (N, C, H, W) = (2, 6, 8, 8) to (2, 4, 6, 6) by filters of 3 x 3, in two groups.
    ("Conv2D", (2, 4, 6, 6), (2, 6, 8, 8), (4, 3, 3, 3), (2 * 4 * 36) * 27),
    ("Conv2DBackpropInput", (2, 6, 8, 8), (2, 4, 6, 6), (4, 3, 3, 3), (2 * 4 * 36) * 27),
    ("Conv2DTranspose", (2, 6, 8, 8), (2, 4, 6, 6), (4, 3, 3, 3), (2 * 4 * 36) * 27),
    ("Conv2DBackpropFilter", (4, 3, 3, 3), (2, 4, 6, 6), (2, 6, 8, 8), (2 * 4 * 36) * 27),
    ("Conv3D", (1, 4, 2, 6, 6), (1, 3, 4, 8, 8), (4, 3, 3, 3, 3), (4 * 72) * 81),
    ("Conv3DTranspose", (1, 3, 4, 8, 8), (1, 4, 2, 6, 6), (4, 3, 3, 3, 3), (4 * 72) * 81),
    ("Conv3DBackpropInput", (1, 3, 4, 8, 8), (4, 3, 3, 3, 3), (1, 4, 2, 6, 6), (4 * 72) * 81),
    ("Conv3DBackpropFilter", (4, 3, 3, 3, 3), (1, 3, 4, 8, 8), (1, 4, 2, 6, 6), (4 * 72) * 81),
]


@pytest.mark.parametrize(("kind", "out", "first", "second", "multiplications"), CASES)
def test_a_product_is_counted_by_its_shapes(kind, out, first, second, multiplications):
    assert PRODUCTS[kind](out, first, second) == multiplications


def test_every_product_that_is_sharded_is_counted():
    assert set(PRODUCTS) == CONTRACTIONS == {kind for kind, *_ in CASES}
