# SPDX-License-Identifier: Apache-2.0
"""The manifest of a training checkpoint: which file holds which part of each tensor. docs/checkpoint_format.md

A checkpoint is a folder `step-00000020` of safetensors files, one a rank at most, and `manifest.json`. Tensors have the
model's names, whatever the mesh was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindloom.errors import ConfigError
from mindloom.files import write_text_atomically

FORMAT, VERSION = "mindloom-checkpoint", 1
MANIFEST, LATEST = "manifest.json", "latest"
FOLDER = "step-{:08d}"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A slice of a tensor, as one file holds it under the tensor's name."""

    file: str
    start: Shape
    shape: Shape
    hash: str
    """What it adds to the tensor's hash, 16 hexadecimal digits."""

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor."""

    shape: Shape
    dtype: str
    """NumPy's name."""
    hash: str
    """Of the whole content, whatever the parts: see content_hash.py."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and what it was made by."""

    step: int
    """Optimizer steps done."""
    tensors: dict[str, TensorEntry] = field(repr=False)
    files: dict[str, int]
    """File -> bytes."""
    state: dict[str, Any]
    """What a run needs to go on: data cursor, seed, learning-rate schedule."""
    model: dict[str, Any]
    """Family and configuration."""
    strategy: dict[str, Any]
    """What it was trained under; not needed to read it."""
    versions: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def write(self, folder: Path) -> None:
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_text_atomically(folder / MANIFEST, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, found complete in itself; the files are not opened.

    Raises:
        ConfigError: missing, damaged, of another format or version, a file that is missing or has another size, or
            parts that do not cover their tensor.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; the checkpoint is not complete")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ConfigError(f"{path}: not a manifest of a training checkpoint")
        if (version := values.pop("version")) != VERSION:
            raise ConfigError(
                f"{path}: format version {version}; this release reads version {VERSION}; use the release that wrote it"
            )
        tensors = {name: _entry(entry) for name, entry in values.pop("tensors").items()}
        manifest = Manifest(tensors=tensors, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    if problems := list(_problems(manifest, folder)):
        more = [f"{folder}: and {len(problems) - 4} more problems"] if len(problems) > 4 else []
        raise ConfigError(problems[:4] + more)
    return manifest


def _entry(values: Mapping[str, Any]) -> TensorEntry:
    parts = tuple(Part(p["file"], tuple(p["start"]), tuple(p["shape"]), p["hash"]) for p in values["parts"])
    return TensorEntry(tuple(values["shape"]), values["dtype"], values["hash"], parts)


def _problems(manifest: Manifest, folder: Path) -> Iterator[str]:
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            held = [tensor for tensor, entry in manifest.tensors.items() if any(p.file == name for p in entry.parts)]
            yield f"{path}: missing; it holds {_some(held)}"
        elif path.stat().st_size != size:
            yield f"{path}: {path.stat().st_size} bytes, the manifest says {size}; it was cut off or overwritten"
    for name, entry in manifest.tensors.items():
        covered = sum(math.prod(part.shape) for part in entry.parts)
        if covered != math.prod(entry.shape):
            yield f"{folder / MANIFEST}: {name}: the parts hold {covered} of its {math.prod(entry.shape)} entries"
        if sum(int(part.hash, 16) for part in entry.parts) % (1 << 64) != int(entry.hash, 16):
            yield f"{folder / MANIFEST}: {name}: the hashes of its parts do not add up"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, newest first, complete or not."""
    return sorted(root.glob("step-*"), reverse=True) if root.is_dir() else []
