# SPDX-License-Identifier: Apache-2.0
"""Context parallelism in other libraries' settings."""

from __future__ import annotations

from collections.abc import Mapping

from sporeloom.dialects.settings import InputKeys
from sporeloom.strategy.config import ContextMethod, Strategy
from sporeloom.strategy.mesh import Mesh


def context_method(book: InputKeys, key: str, mesh: Mesh, methods: Mapping[str, ContextMethod]) -> ContextMethod:
    """`context_parallel`, which another library names by one of `methods`."""
    theirs = book.peek(key)
    if mesh.cp == 1 or theirs is None or theirs not in methods:
        book.note(
            key,
            "no effect" if mesh.cp == 1 or theirs is None else "approximated",
            "there is no context parallelism"
            if mesh.cp == 1
            else f"{theirs} is not supported; gather gives the same numbers",
        )
        return "gather"
    book.note(key, "renamed", f"context_parallel {methods[theirs]}")
    return methods[theirs]


def written_context(
    strategy: Strategy, methods: Mapping[str, ContextMethod], degree: str, method: str
) -> dict[str, int | str]:
    """Context parallel settings of another library, under its names; empty where there is none."""
    theirs = next(theirs for theirs, ours in methods.items() if ours == strategy.context_parallel)
    return {degree: strategy.mesh.cp, method: theirs} if strategy.mesh.cp > 1 else {}
