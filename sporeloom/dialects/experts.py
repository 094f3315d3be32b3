# SPDX-License-Identifier: Apache-2.0
"""Degrees of MindFormers beyond the replicas: experts, and optimizer state, over tensor parallel ranks as well."""

from __future__ import annotations

import math
from typing import Any

from sporeloom.dialects.settings import InputKeys


def expert_degree(book: InputKeys, key: str, dp: int, beyond: int) -> Any:
    """`mesh.ep`, which here is a part of the `dp` replicas. `beyond`: ranks of each replica that MindFormers'
    degree may span."""
    degree: Any = book.peek(key, 1)
    if type(degree) is int and degree > dp and type(dp) is int and (dp * beyond) % degree == 0:
        fitting = math.gcd(degree, dp)
        why = f"{degree} reaches over tensor parallel ranks, too; experts are sharded over replicas, of which there are {dp}"
        book.note(key, "not expressible", f"{why}: mesh.ep {fitting}")
        return fitting
    book.take(key, "mesh.ep", 1)
    return degree


def shard_size(book: InputKeys, key: str, size: Any, replicas: int) -> Any:
    """Number of replicas that a parameter is sharded over; None for all of them."""
    if type(size) is int and size > replicas and size % replicas == 0:
        book.renote(key, "approximated", f"{size} is more than the {replicas} replicas: over all of them")
        return None
    return size
