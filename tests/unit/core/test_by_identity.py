# SPDX-License-Identifier: Apache-2.0
"""Values kept for objects of other packages."""

import gc

import numpy as np

from sporeloom.core.by_identity import ByIdentity


class Array(np.ndarray):
    """Equal to others entry by entry, and so no key of a dictionary."""


def array():
    return np.zeros(2).view(Array)


def test_equal_objects_have_values_of_their_own():
    table, first, second = ByIdentity(), array(), array()
    table.set(first, "first")
    assert (table.get(first), table.get(second)) == ("first", None)
    table.set(second, "second")
    table.set(first, "again")
    assert (table.get(first), table.get(second)) == ("again", "second")
    table.remove(first)
    table.remove(first)
    assert (table.get(first), table.get(second)) == (None, "second")


def test_an_entry_ends_with_its_object():
    table, kept = ByIdentity(), array()
    table.set(kept, 1)
    for number in range(100):  # later ones may have the identity of earlier ones
        table.set(array(), number)
    gc.collect()
    assert len(table) == 1 and table.get(kept) == 1 and table.get(array()) is None
