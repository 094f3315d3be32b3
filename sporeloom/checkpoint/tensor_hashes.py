# SPDX-License-Identifier: Apache-2.0
"""Hashes of the tensors of model folders, which have no manifest: written with the folder, verified by readers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.content_hash import MASK, content_hash
from sporeloom.checkpoint.manifest import MANIFEST
from sporeloom.checkpoint.tensor_files import CHUNK_NUMBERS, StoredTensor, numpy_dtype, stored_tensors
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import check_hashes, write_hashes

MAX_THREADS = 8


def seal(folder: Path) -> None:
    """Record the hashes of a complete folder of a model, of adapters or of a training checkpoint: see
    `sporeloom.core.hashes`."""
    write_hashes(folder, None if (folder / MANIFEST).exists() else tensor_hashes)


def tensor_hashes(path: Path) -> dict[str, str]:
    """The hash of each tensor of a file.

    Raises:
        ConfigError: it is damaged.
    """
    return _hashes(stored_tensors([path]))


def tensor_damage(folder: Path, share: slice = slice(None)) -> str | None:
    """The first tensor of a folder whose content differs from what was written, or None, also where the folder has
    no hashes. `share`: which of the tensors to read.

    Raises:
        ConfigError: another file is not as it was written.
    """
    files = check_hashes(folder) or {}
    for file, entry in files.items():
        if written := entry.get("tensors"):
            stored = stored_tensors([folder / file])
            names = sorted(stored)[share]
            found = _hashes({name: stored[name] for name in names})
            if wrong := next((name for name in names if found[name] != written.get(name)), None):
                return f"{folder / file}: {wrong}: the content is not what was written (its hash differs)"
    return None


def _hashes(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return dict(zip(stored, threads.map(_hash_of, stored.values()), strict=True))


def _hash_of(tensor: StoredTensor) -> str:
    """`content_hash` of a tensor on disk, some rows at a time."""
    num_rows, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, ())
    width = int(np.prod(rest, dtype=np.int64))
    step, total = max(1, CHUNK_NUMBERS // max(1, width)), 0
    for first in range(0, num_rows if width else 0, step):
        rows = min(step, num_rows - first)
        numbers = _read(tensor, first * width, rows * width)
        start = (first, *(0 for _ in rest)) if tensor.shape else ()
        total += content_hash(numbers.reshape((rows, *rest) if tensor.shape else ()), start)
    return f"{total & MASK:016x}"


def _read(tensor: StoredTensor, first: int, count: int) -> NDArray[Any]:
    kind = numpy_dtype(tensor.dtype)
    unsigned = np.dtype(f"<u{kind.itemsize}")
    try:
        return np.fromfile(tensor.path, unsigned, count, offset=tensor.offset + first * kind.itemsize)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tensor.path}: cannot be read: {error}") from None
