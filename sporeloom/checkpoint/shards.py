# SPDX-License-Identifier: Apache-2.0
"""Write sharded tensors, each rank's shards in a file of its own, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sporeloom.checkpoint.content_hash import MASK, content_hash
from sporeloom.checkpoint.manifest import StoredSlice, TensorEntry
from sporeloom.checkpoint.tensor_files import TensorDescription, write_tensor_by_tensor
from sporeloom.core.errors import ConfigError
from sporeloom.strategy.tensor_slice import TensorSlice

Destinations = Mapping[str, Sequence[tuple[str, TensorSlice]]]
"""Tensor -> each file that gets a slice of it, with the slice."""
Rows = Iterator[NDArray[Any]]
"""A tensor or a part of it, some rows at a time."""


def write_shards(
    folder: Path,
    described: Mapping[str, TensorDescription],
    shards: Destinations,
    rows: Callable[[str, TensorSlice], Rows],
) -> tuple[dict[str, TensorEntry], dict[str, int]]:
    """Write the files of `shards` into a folder. `rows`: reads a slice of a tensor. Returns a manifest's entries,
    with hashes made of what was written, and the files' sizes.

    Raises:
        ConfigError: a file cannot be written.
    """
    by_file: dict[str, list[tuple[str, TensorSlice]]] = {}
    for name, of_tensor in shards.items():
        for file, part in of_tensor:
            by_file.setdefault(file, []).append((name, part))
    hashes = {(file, name): 0 for file, wanted in by_file.items() for name, _ in wanted}

    def hashed(file: str, name: str, part: TensorSlice) -> Rows:
        start = list(part.start)
        for array in rows(name, part):
            hashes[file, name] = (hashes[file, name] + content_hash(array, tuple(start))) & MASK
            yield array
            if start:
                start[0] += len(array)

    for file, wanted in sorted(by_file.items()):
        parts = {name: TensorDescription(described[name].dtype, part.shape) for name, part in wanted}
        try:
            write_tensor_by_tensor(folder / file, parts, (hashed(file, name, part) for name, part in wanted))
        except OSError as error:
            raise ConfigError(f"{folder / file}: cannot be written: {error.strerror}") from None
    entries = {}
    for name, of_tensor in sorted(shards.items()):
        held = [
            StoredSlice(file, part, f"{hashes[file, name]:016x}")
            for file, part in sorted(of_tensor, key=lambda shard: shard[0])
        ]
        digest = f"{sum(int(part.hash, 16) for part in held) & MASK:016x}"
        entries[name] = TensorEntry(described[name].shape, described[name].dtype, digest, tuple(held))
    return entries, {file: (folder / file).stat().st_size for file in sorted(by_file)}
