# SPDX-License-Identifier: Apache-2.0
"""The simulated pool against a map of every 512 bytes of it."""

import random

import pytest

from sporeloom.dry_run.memory.allocator import ALIGNMENT, Pool, aligned


class Map:
    """The same pool as a list of slots: a block is searched by looking at all of them."""

    def __init__(self):
        self.slots = []

    def allocate(self, count):
        holes, start = [], None
        for i, used in enumerate([*self.slots, True]):
            if not used and start is None:
                start = i
            if used and start is not None:
                holes.append((i - start, start))
                start = None
        fitting = [hole for hole in holes if hole[0] >= count]
        first = min(fitting)[1] if fitting else len(self.slots)
        if not fitting and holes and sum(holes[-1]) == len(self.slots):
            first = holes[-1][1]
        self.slots += [False] * (first + count - len(self.slots))
        self.slots[first : first + count] = [True] * count
        return first

    def free(self, first, count):
        self.slots[first : first + count] = [False] * count


@pytest.mark.parametrize("seed", range(30))
def test_the_pool_is_the_one_that_a_map_of_its_slots_finds(seed):
    rng, pool, slots, held = random.Random(seed), Pool(), Map(), []
    for _ in range(300):
        if held and rng.random() < 0.48:
            address, size = held.pop(rng.randrange(len(held)))
            pool.free(address, size)
            slots.free(address // ALIGNMENT, aligned(size) // ALIGNMENT)
        else:
            size = rng.randint(1, 9000)
            address = pool.allocate(size)
            assert address == ALIGNMENT * slots.allocate(aligned(size) // ALIGNMENT)
            held.append((address, size))
        assert pool.reserved == ALIGNMENT * len(slots.slots)
    free = sum(size for _, size in pool.free_blocks)
    assert pool.reserved == free + sum(aligned(size) for _, size in held)


def test_all_is_one_block_again_when_everything_is_freed():
    pool = Pool()
    held = [(pool.allocate(size), size) for size in (100, 5000, 512, 1)]
    for address, size in (held[2], held[0], held[3], held[1]):
        pool.free(address, size)
    assert pool.free_blocks == [(0, pool.reserved)]


def test_a_hole_that_is_too_small_makes_the_pool_grow():
    pool = Pool()
    first, _ = pool.allocate(1024), pool.allocate(512)
    pool.free(first, 1024)
    assert pool.allocate(1536) == 1536
    assert pool.reserved == 3072  # 2048 are in use


def test_nothing_takes_nothing():
    pool = Pool()
    pool.free(pool.allocate(0), 0)
    assert pool.reserved == 0
    assert pool.free_blocks == []
