# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import pytest

from sporeloom.checkpoint.content_hash import MASK, content_hash

SHAPES = [(), (1,), (17,), (6, 8), (1, 5), (3, 4, 5)]


def array(shape, dtype=np.float32, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_the_hashes_of_slices_add_up(shape, dtype):
    whole = array(shape, dtype)
    rng = np.random.RandomState(1)
    for _ in range(10):
        cuts = [sorted({0, n, *rng.randint(0, n + 1, 2).tolist()}) for n in shape]
        total = 0
        for bounds in itertools.product(*(list(itertools.pairwise(c)) for c in cuts)):
            part = whole[tuple(slice(*b) for b in bounds)]
            total += content_hash(part, [start for start, _ in bounds])
        assert total & MASK == content_hash(whole)


def test_it_is_what_the_documentation_says():
    def weight(dim, index):
        z = ((index + 1) * 0x9E3779B97F4A7C15 + dim + 1) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) | 1

    values = array((3, 4))
    bits = values.view(np.uint32) ^ (values.view(np.uint32) >> 16)
    expected = sum(int(bits[i, j]) * weight(0, i) * weight(1, j) for i in range(3) for j in range(4)) & MASK
    assert content_hash(values) == expected
    assert f"{content_hash(np.arange(6, dtype=np.float32).reshape(2, 3)):016x}" == "265a850aebdc3ce0"


def test_every_bit_counts():
    whole = array((5, 7))
    expected = content_hash(whole)
    for position in range(whole.nbytes):
        for bit in range(8):
            damaged = bytearray(whole.tobytes())
            damaged[position] ^= 1 << bit
            assert content_hash(np.frombuffer(bytes(damaged), np.float32).reshape(5, 7)) != expected


def test_entries_that_trade_places_count():
    whole = array((20, 20))
    for seed in range(200):
        rng = np.random.RandomState(seed)
        (a, b), (c, d) = rng.randint(0, 20, (2, 2))
        swapped = whole.copy()
        swapped[a, b], swapped[c, d] = whole[c, d], whole[a, b]
        assert (content_hash(swapped) == content_hash(whole)) == ((a, b) == (c, d))
    assert content_hash(whole.T.copy()) != content_hash(whole)


def test_a_tensor_larger_than_a_block():
    whole = array((1500, 1000))
    halves = content_hash(whole[:700]) + content_hash(whole[700:], (700, 0))
    assert halves & MASK == content_hash(whole)
