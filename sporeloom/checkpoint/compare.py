# SPDX-License-Identifier: Apache-2.0
"""Compare two training checkpoints, one tensor at a time; equal hashes make reading unnecessary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sporeloom.checkpoint.manifest import Manifest
from sporeloom.checkpoint.sharded import CheckpointReader
from sporeloom.strategy.tensor_slice import TensorSlice


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between both."""

    name: str
    count: int = 0
    """Number of entries that differ."""
    largest: float = 0.0
    """Largest absolute difference."""
    problem: str = ""
    """Reason why it was not compared: missing in one, or another shape."""


def compare(first: Path, manifest: Manifest, second: Path, other: Manifest) -> list[Difference]:
    """The tensors that differ, by name.

    Raises:
        ConfigError: a damaged file.
    """
    readers = CheckpointReader(first, manifest, False), CheckpointReader(second, other, False)
    found = []
    for name in sorted({*manifest.tensors, *other.tensors}):
        a, b = manifest.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            found.append(Difference(name, problem=f"only in {first if b is None else second}"))
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(Difference(name, problem=f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"))
        elif a.hash != b.hash:
            full = TensorSlice.full(a.shape)
            x, y = (reader.read(name, full) for reader in readers)
            gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
            found.append(Difference(name, int((x != y).sum()), float(gap.max())))
    return found
