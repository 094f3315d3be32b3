# SPDX-License-Identifier: Apache-2.0
"""The manifest of a training checkpoint: which file holds which shard of each tensor. docs/reference/checkpoint_format.md

A checkpoint is a folder `step-00000020` of safetensors files, one a rank at most, and `manifest.json`. Tensors have the
model's names, whatever the mesh was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.checkpoint.tensor_files import DTYPES
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import recover_folder, write_text_atomically
from sporeloom.core.hashes import TENSORS, check_hashes
from sporeloom.core.json_text import json_text
from sporeloom.core.reader import read_json
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.tensor_slice import TensorSlice

FORMAT, VERSION = "sporeloom-checkpoint", 1
MANIFEST, LATEST = "manifest.json", "latest"
FOLDER = "step-{:08d}"
_FOLDER, _DIGEST = re.compile(r"step-\d{8,}"), re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Name of a file of the folder itself: no path, not hidden."""

MAX_DIMS, MAX_PARTS, ROWS = 8, 1 << 14, 256
"""Maximum number of dims of a tensor, as in MindSpore; of parts of one; and of those that are compared with all
others at once."""


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor, as one file holds it under the tensor's name."""

    file: str
    bounds: TensorSlice
    hash: str
    """Its contribution to the tensor's hash, 16 hexadecimal digits."""

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "start": self.bounds.start, "shape": self.bounds.shape, "hash": self.hash}


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor."""

    shape: Shape
    dtype: str
    """NumPy's name of the type."""
    hash: str
    """Hash of the full content, however it is sharded: see content_hash.py."""
    parts: tuple[StoredSlice, ...]

    def to_dict(self) -> dict[str, Any]:
        parts = [part.to_dict() for part in self.parts]
        return {"shape": self.shape, "dtype": self.dtype, "hash": self.hash, "parts": parts}


@dataclass(frozen=True)
class Manifest:
    """Contents and origin of a checkpoint."""

    step: int
    """Number of optimizer steps done."""
    tensors: dict[str, TensorEntry] = field(repr=False)
    files: dict[str, int]
    """File -> bytes."""
    state: dict[str, Any]
    """State that a resumed run needs: data cursor, seed, learning rate schedule."""
    model: dict[str, Any]
    """Family and configuration of the model."""
    strategy: dict[str, Any]
    """Strategy it was trained under; not needed to read it."""
    versions: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def write(self, folder: Path) -> None:
        values = {"format": FORMAT, "version": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        values["tensors"] = {name: entry.to_dict() for name, entry in self.tensors.items()}
        write_text_atomically(folder / MANIFEST, json_text(values, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path, is_trusted: bool = False) -> Manifest:
    """Read the manifest of a checkpoint folder and check that it is complete, and that everything else there but
    the contents of tensors is as it was written.

    `is_trusted`: whatever the hashes of the files say.

    Raises:
        ConfigError: missing, damaged, edited, of another format or version, a file that is missing or has another size, or
            parts that do not cover their tensor.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; the checkpoint is not complete")
    if not is_trusted:
        check_hashes(folder, is_required=True, but=TENSORS)  # the manifest lists the contents of missing files
    try:
        values = read_json(path).mapping
    except ConfigError as error:
        raise ConfigError(
            f"{path}: damaged: {problem.removeprefix(f'{path}: ')}" for problem in error.problems
        ) from None
    if values.pop("format", None) != FORMAT:
        raise ConfigError(f"{path}: not a manifest of a training checkpoint")
    if (version := values.pop("version", None)) != VERSION:
        raise ConfigError(
            f"{path}: format version {version}; this release reads version {VERSION}; use the release that wrote it"
        )
    try:
        manifest = _manifest(values)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged: {error}") from None
    if problems := list(_problems(manifest, folder)):
        more = [f"{folder}: and {len(problems) - 4} more problems"] if len(problems) > 4 else []
        raise ConfigError(problems[:4] + more)
    if not is_trusted:
        check_hashes(folder)
    return manifest


def _manifest(values: dict[str, Any]) -> Manifest:
    """Read the manifest from plain values, with every type checked.

    Raises:
        ValueError: what is missing, unknown or wrong.
    """
    names = [f.name for f in fields(Manifest)]
    if wrong := [name for name in names if name not in values] + [name for name in values if name not in names]:
        raise ValueError(f"{wrong[0]} is {'missing' if wrong[0] in names else 'unknown'}")
    _expect(_is_count(values["step"]), f"step must be a whole number, got {values['step']!r}")
    for name in ("tensors", "files", "state", "model", "strategy", "versions"):
        _expect(isinstance(values[name], dict), f"{name} must be a mapping")
    for name, size in values["files"].items():
        _expect(_FILE.fullmatch(name), f"files: {name!r} is not a file of this folder")
        _expect(_is_count(size), f"files: {name} must have a number of bytes, got {size!r}")
    tensors = {name: _entry(name, entry, values["files"]) for name, entry in values["tensors"].items()}
    return Manifest(**{**values, "tensors": tensors})


def _entry(name: str, values: Any, files: Mapping[str, int]) -> TensorEntry:
    _expect(
        isinstance(values, dict) and set(values) == {"shape", "dtype", "hash", "parts"},
        f"{name}: not the entry of a tensor",
    )
    shape = _shape(values["shape"], name)
    _expect(isinstance(values["dtype"], str) and values["dtype"] in DTYPES, f"{name}: dtype {values['dtype']!r}")
    _expect(isinstance(values["parts"], list), f"{name}: parts must be a list")
    _expect(
        len(values["parts"]) <= MAX_PARTS, f"{name}: {len(values['parts']):,} parts; at most {MAX_PARTS:,} are read"
    )
    parts = []
    for part in values["parts"]:
        _expect(
            isinstance(part, dict) and set(part) == {"file", "start", "shape", "hash"},
            f"{name}: not the entry of a part",
        )
        start, length = _shape(part["start"], name), _shape(part["shape"], name)
        inside = len(start) == len(length) == len(shape)
        inside = inside and all(a + n <= whole for a, n, whole in zip(start, length, shape, strict=True))
        _expect(inside, f"{name}: a part of {length} at {start} lies outside of {shape}")
        _expect(
            isinstance(part["file"], str) and part["file"] in files, f"{name}: {part['file']!r} is not among the files"
        )
        parts.append(StoredSlice(part["file"], TensorSlice(start, length), _hash(part["hash"], name)))
    return TensorEntry(shape, values["dtype"], _hash(values["hash"], name), tuple(parts))


def _expect(condition: Any, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _shape(values: Any, name: str) -> Shape:
    _expect(isinstance(values, list) and all(map(_is_count, values)), f"{name}: {values!r} is not a shape")
    _expect(len(values) <= MAX_DIMS, f"{name}: {len(values)} dims; a tensor has at most {MAX_DIMS}")
    return tuple(values)


def _hash(value: Any, name: str) -> str:
    _expect(isinstance(value, str) and _DIGEST.fullmatch(value), f"{name}: {value!r} is not a hash of 16 digits")
    return str(value)


def _problems(manifest: Manifest, folder: Path) -> Iterator[str]:
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            held = [tensor for tensor, entry in manifest.tensors.items() if any(p.file == name for p in entry.parts)]
            yield f"{path}: missing; it contains {_some(held)}"
        elif path.stat().st_size != size:
            yield f"{path}: {path.stat().st_size} bytes, the manifest says {size}; it was cut off or overwritten"
    for name, entry in manifest.tensors.items():
        covered = sum(part.bounds.num_entries for part in entry.parts)
        if covered != math.prod(entry.shape):
            yield f"{folder / MANIFEST}: {name}: the parts hold {covered} of its {math.prod(entry.shape)} entries"
        elif _overlap(entry):
            yield f"{folder / MANIFEST}: {name}: its parts overlap"
        if sum(int(part.hash, 16) for part in entry.parts) % (1 << 64) != int(entry.hash, 16):
            yield f"{folder / MANIFEST}: {name}: the hashes of its parts do not add up"


def _overlap(entry: TensorEntry) -> bool:
    """Whether two parts have a common entry: each is compared with each, some at a time."""
    parts = [part.bounds for part in entry.parts if part.bounds.num_entries]
    starts = np.array([part.start for part in parts], np.int64).reshape(len(parts), len(entry.shape))
    stops = np.array([part.stop for part in parts], np.int64).reshape(starts.shape)
    for first in range(0, len(parts), ROWS):
        rows = slice(first, first + ROWS)
        meet = (starts[rows, None] < stops) & (starts < stops[rows, None])
        if np.count_nonzero(meet.all(-1)) > len(starts[rows]):  # each overlaps itself
            return True
    return False


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, newest first, complete or not. Folders with other names do not count; one
    whose replacement was killed gets its name back."""
    if not root.is_dir():
        return []
    for replaced in root.glob(".step-*.replaced"):
        recover_folder(root / replaced.name.removeprefix(".").removesuffix(".replaced"))
    found = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
