# SPDX-License-Identifier: Apache-2.0
"""Write sharded tensors, each rank's shards in a file of its own, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sporeloom.checkpoint.content_hash import MASK, content_hash
from sporeloom.checkpoint.manifest import Part, TensorEntry
from sporeloom.checkpoint.tensor_files import TensorDescription, write_tensor_by_tensor
from sporeloom.core.errors import ConfigError

Slices = tuple[slice, ...]
Shard = tuple[str, Slices]
"""A file, and the slice of a tensor that it gets."""
Rows = Iterator[NDArray[Any]]
"""A tensor or a part of it, some rows at a time."""


def whole(shape: Sequence[int]) -> Slices:
    return tuple(slice(0, length) for length in shape)


def write_shards(
    folder: Path,
    described: Mapping[str, TensorDescription],
    shards: Mapping[str, Sequence[Shard]],
    rows: Callable[[str, Slices], Rows],
) -> tuple[dict[str, TensorEntry], dict[str, int]]:
    """Write the files of `shards` into a folder. `rows`: reads a slice of a tensor. Returns a manifest's entries,
    with hashes made of what was written, and the files' sizes.

    Raises:
        ConfigError: a file cannot be written.
    """
    by_file: dict[str, list[tuple[str, Slices]]] = {}
    for name, of_tensor in shards.items():
        for file, slices in of_tensor:
            by_file.setdefault(file, []).append((name, slices))
    hashes = {(file, name): 0 for file, wanted in by_file.items() for name, _ in wanted}

    def hashed(file: str, name: str, slices: Slices) -> Rows:
        start = [s.start for s in slices]
        for array in rows(name, slices):
            hashes[file, name] = (hashes[file, name] + content_hash(array, tuple(start))) & MASK
            yield array
            if start:
                start[0] += len(array)

    for file, wanted in sorted(by_file.items()):
        parts = {name: TensorDescription(described[name].dtype, _lengths(slices)) for name, slices in wanted}
        try:
            write_tensor_by_tensor(folder / file, parts, (hashed(file, name, slices) for name, slices in wanted))
        except OSError as error:
            raise ConfigError(f"{folder / file}: cannot be written: {error.strerror}") from None
    entries = {}
    for name, of_tensor in sorted(shards.items()):
        held = [
            Part(file, tuple(s.start for s in slices), _lengths(slices), f"{hashes[file, name]:016x}")
            for file, slices in sorted(of_tensor, key=lambda shard: shard[0])
        ]
        digest = f"{sum(int(part.hash, 16) for part in held) & MASK:016x}"
        entries[name] = TensorEntry(described[name].shape, described[name].dtype, digest, tuple(held))
    return entries, {file: (folder / file).stat().st_size for file in sorted(by_file)}


def _lengths(slices: Slices) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in slices)
