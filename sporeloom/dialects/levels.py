# SPDX-License-Identifier: Apache-2.0
"""MindFormers' `optimizer_level`: what it shards over the replicas, and when weights are gathered."""

from sporeloom.dialects.settings import InputKeys
from sporeloom.strategy.checks import RESHARD
from sporeloom.strategy.config import Recompute
from sporeloom.strategy.mesh import Mesh


def gathers_again(book: InputKeys, key: str, recompute: Recompute | None, mesh: Mesh) -> bool:
    """Whether `level3` is set and has an effect: MindSpore gathers weights again only for recomputed layers."""
    if book.peek(key) != "level3":
        return False
    again = recompute == Recompute() and mesh.pp == 1
    book.note(
        key,
        "renamed" if again else "approximated",
        RESHARD if again else "MindSpore gathers weights once a step without full recomputation, or in a pipeline",
    )
    return again
