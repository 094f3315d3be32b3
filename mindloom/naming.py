# SPDX-License-Identifier: Apache-2.0
"""What a weight is called elsewhere."""

from typing import NamedTuple


class Name(NamedTuple):
    """A name in another code base."""

    name: str
    transposed: bool = False
    """The other code stores this matrix as (in, out); ours is (out, in)."""


def expand(table: dict[str, Name], num_repeated: int) -> dict[str, Name]:
    """Fill `{i}` of a name table with 0 .. num_repeated-1."""
    result = {}
    for ours, other in table.items():
        for i in range(num_repeated) if "{i}" in ours else (0,):
            result[ours.replace("{i}", str(i))] = Name(other.name.replace("{i}", str(i)), other.transposed)
    return result
