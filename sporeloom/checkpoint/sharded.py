# SPDX-License-Identifier: Apache-2.0
"""Write and read the shards of a training checkpoint. NumPy and files only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from sporeloom.checkpoint.content_hash import MASK, content_hash
from sporeloom.checkpoint.finite import is_finite
from sporeloom.checkpoint.manifest import FOLDER, LATEST, Manifest, StoredSlice, TensorEntry, checkpoints
from sporeloom.checkpoint.tensor_files import TensorDescription, not_finite_tensors, numpy_dtype, write_tensor_by_tensor
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush, remove, remove_folder, replace_folder, write_text_atomically
from sporeloom.core.hashes import write_hashes
from sporeloom.core.lines import first_line
from sporeloom.core.reader import read_json
from sporeloom.strategy.tensor_slice import TensorSlice

WAIT_S = 1800.0
MAPPED_BYTES = 64 << 20


@dataclass(frozen=True)
class LocalTensor:
    """This rank's slice of a tensor, in memory."""

    array: NDArray[Any]
    start: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def bounds(self) -> TensorSlice:
        return TensorSlice(self.start, tuple(self.array.shape))


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_parts(folder: Path, rank: int, slices: Mapping[str, LocalTensor]) -> None:
    """Write this rank's slices, then an index, which marks them as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(rank)
    entries: dict[str, Any] = {}
    if slices:
        described = {key: TensorDescription(part.array.dtype.name, part.bounds.shape) for key, part in slices.items()}
        write_tensor_by_tensor(folder / name, described, (part.array for part in slices.values()))
    for key, part in slices.items():
        digest = f"{content_hash(part.array, part.start):016x}"
        entry = StoredSlice(name, part.bounds, digest)
        entries[key] = {"whole": part.global_shape, "dtype": part.array.dtype.name, "part": entry.to_dict()}
    write_text_atomically(folder / f"rank-{rank:05d}.json", json.dumps(entries))


def finish(
    partial: Path, root: Path, num_ranks: int, step: int, about: Mapping[str, Any], wait_s: float = WAIT_S
) -> Path:
    """Wait up to `wait_s` for the files of all ranks, write the manifest, and give the folder its name; then move `latest`.

    `about`: the fields of the manifest besides tensors and files.

    Raises:
        TimeoutError: a rank did not write its part.
    """
    indices = [partial / f"rank-{rank:05d}.json" for rank in range(num_ranks)]
    deadline = time.monotonic() + wait_s
    for rank, index in enumerate(indices):
        while not index.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not write its part of the checkpoint to {partial}")
            time.sleep(0.01)
    entries = [read_json(index).mapping for index in indices]
    files = {path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))}
    Manifest(step=step, tensors=_join(entries), files=files, **about).write(partial)
    for index in indices:
        index.unlink()
    write_hashes(partial)
    folder = root / FOLDER.format(step)
    replace_folder(partial, folder)
    write_text_atomically(root / LATEST, folder.name + "\n")
    flush(root)
    return folder


def _join(entries: Iterable[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for of_rank in entries:
        for name, value in of_rank.items():
            old = tensors.get(name) or TensorEntry(tuple(value["whole"]), value["dtype"], "0", ())
            written = value["part"]
            bounds = TensorSlice(tuple(written["start"]), tuple(written["shape"]))
            part = StoredSlice(written["file"], bounds, written["hash"])
            digest = f"{(int(old.hash, 16) + int(part.hash, 16)) & MASK:016x}"
            tensors[name] = TensorEntry(old.shape, old.dtype, digest, (*old.parts, part))
    return dict(sorted(tensors.items()))


def remove_old(root: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` checkpoints and remove the others."""
    for folder in checkpoints(root)[keep_last:]:
        remove_folder(folder)


def remove_leftovers(root: Path) -> None:
    """Remove the unfinished folders of killed runs."""
    checkpoints(root)  # one that was being replaced gets its name back
    for folder in root.glob(".step-*"):
        remove(folder)


class CheckpointReader:
    """The tensors of a checkpoint, by slices; only the files that are needed are read.

    `only_finite`: NaN and infinity are an error.
    """

    def __init__(self, folder: Path, manifest: Manifest, only_finite: bool = True):
        self.folder, self.manifest, self.only_finite = folder, manifest, only_finite
        self._files: dict[str, Any] = {}
        self._bytes_mapped = 0

    def read(self, name: str, wanted: TensorSlice) -> NDArray[Any]:
        """Read one slice of a tensor from all files that hold parts of it.

        Raises:
            ConfigError: a damaged file, or numbers that are not finite.
        """
        entry = self.manifest.tensors[name]
        for part in entry.parts:  # a file that has all of it needs no copy
            if part.bounds.overlap(wanted) == wanted:
                return self._read(part, name, wanted.within(part.bounds))
        result = np.empty(wanted.shape, numpy_dtype(entry.dtype))
        for part in entry.parts:
            if common := part.bounds.overlap(wanted):
                result[common.within(wanted).slices] = self._read(part, name, common.within(part.bounds))
        return result

    def verify(self, part: StoredSlice, name: str) -> str | None:
        """Check the content of a part; returns the problem or None."""
        bounds = part.bounds
        try:
            array = self._read(part, name, TensorSlice.full(bounds.shape))
        except ConfigError as error:
            return error.problems[0]
        if tuple(array.shape) != bounds.shape or f"{content_hash(array, bounds.start):016x}" != part.hash:
            return f"{self.folder / part.file}: {name}: the content is not what was written (its hash differs)"
        return None

    def _read(self, part: StoredSlice, name: str, inside: TensorSlice) -> NDArray[Any]:
        """Read a slice of what a file holds of a tensor, counted from where that begins."""
        path = self.folder / part.file
        if self._bytes_mapped > MAPPED_BYTES:  # pages once read count as this process's memory while a file is open
            self._files.clear()
            self._bytes_mapped = 0
        try:
            if part.file not in self._files:
                self._files[part.file] = safetensors.safe_open(path, framework="numpy")
            file = self._files[part.file]
            is_scalar = not inside.shape
            array = np.asarray(file.get_tensor(name)) if is_scalar else file.get_slice(name)[inside.slices]
            array = array.view(numpy_dtype(array.dtype.name))
            self._bytes_mapped += array.nbytes
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{path}: {name} cannot be read: {first_line(error)}") from None
        if self.only_finite and not is_finite(array):
            raise ConfigError(list(not_finite_tensors(self.folder / file for file in self.manifest.files)))
        return array


def damage(folder: Path, manifest: Manifest, share: slice = slice(None)) -> str | None:
    """Check the contents of the files; returns the first problem or None. `share`: which of the parts to check."""
    reader = CheckpointReader(folder, manifest)
    parts = [(name, part) for name, entry in manifest.tensors.items() for part in entry.parts]
    return next((problem for name, part in parts[share] if (problem := reader.verify(part, name))), None)
