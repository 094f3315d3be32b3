# SPDX-License-Identifier: Apache-2.0
"""Write a training checkpoint anew, cut in another way, one tensor at a time; or as a model folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mindloom.checkpoint.content_hash import MASK, content_hash
from mindloom.checkpoint.contents import MOMENTS, model_of
from mindloom.checkpoint.manifest import MANIFEST, Manifest, Part, TensorEntry, checkpoints, read_manifest
from mindloom.checkpoint.model_folder import copy_beside, load_config, load_weights, write_config
from mindloom.checkpoint.sharded import CheckpointReader, publish
from mindloom.checkpoint.tensor_files import Described, write_model_files, write_tensor_by_tensor
from mindloom.errors import ConfigError

Cut = tuple[str, tuple[slice, ...]]
"""A file, and the part of a tensor that goes there."""


def find_checkpoint(folder: Path) -> Path:
    """`folder` itself, or the newest checkpoint in it.

    Raises:
        ConfigError: there is none.
    """
    if (folder / MANIFEST).exists():
        return folder
    if found := checkpoints(folder):
        return found[0]
    raise ConfigError(f"{folder}: holds neither {MANIFEST} nor folders step-*; give a training checkpoint")


def reshard(source: Path, target: Path, cuts: Mapping[str, Sequence[Cut]], strategy: Mapping[str, Any]) -> Manifest:
    """Write the checkpoint `source` as `target`, each tensor in the parts that `cuts` says.

    Raises:
        ConfigError: the source is damaged, the target exists or cannot be written.
    """
    manifest = read_manifest(source)
    reader = CheckpointReader(source, manifest)
    parts: dict[str, list[Part]] = {name: [] for name in manifest.tensors}
    partial = new_folder(target)
    by_file: dict[str, list[tuple[str, tuple[slice, ...]]]] = {}
    for name, of_tensor in cuts.items():
        for file, slices in of_tensor:
            by_file.setdefault(file, []).append((name, slices))
    try:
        for file, wanted in sorted(by_file.items()):
            arrays = _read_and_hash(reader, file, wanted, parts)
            _write(partial / file, {name: _described(manifest, name, slices) for name, slices in wanted}, arrays)
        copy_beside(source, partial, but=())
        tensors = {name: _with_parts(source, name, entry, parts[name]) for name, entry in manifest.tensors.items()}
        files = {file: (partial / file).stat().st_size for file in sorted(by_file)}
        new = replace(manifest, tensors=tensors, files=files, strategy=dict(strategy))
        new.write(partial)
        publish_new(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return new


def export(source: Path, target: Path, max_shard_bytes: int) -> int:
    """Write the weights of a training checkpoint, whole, as a model folder. Returns the bytes.

    Files hold at most `max_shard_bytes` each, or one tensor that is larger; with more than one there is an index.

    Raises:
        ConfigError: the source is damaged, the target exists or cannot be written.
    """
    manifest = read_manifest(source)
    if manifest.state.get("lora"):
        raise ConfigError(f"{source}: holds adapters alone; the run writes them with their configuration when it ends")
    beside = manifest.state.get("beside") or {}
    weights = {n: entry for n, entry in manifest.tensors.items() if not n.startswith(MOMENTS) and n not in beside}
    reader, partial = CheckpointReader(source, manifest), new_folder(target)
    described = {name: Described(entry.dtype, entry.shape) for name, entry in weights.items()}
    try:
        num_bytes = write_model_files(partial, described, lambda names: _read_and_check(reader, names), max_shard_bytes)
        write_config(partial, *model_of(manifest, source))
        copy_beside(source, partial)
        publish_new(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_bytes


def export_merged(source: Path, target: Path, max_shard_bytes: int) -> int:
    """Write a folder of adapters as a model folder, merged into the weights they are for. Returns the bytes.

    Raises:
        ConfigError: adapters or model are damaged or do not fit, the target exists or cannot be written.
    """
    weights, (family, model) = load_weights(source), load_config(source)
    partial = new_folder(target)
    described = {name: Described("float32", tuple(value.shape)) for name, value in weights.items()}
    try:
        num_bytes = write_model_files(
            partial, described, lambda names: [weights[name] for name in names], max_shard_bytes
        )
        write_config(partial, family, model)
        copy_beside(source, partial)
        publish_new(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_bytes


def publish_new(partial: Path, target: Path) -> None:
    """Give a folder its name, unless another process was faster."""
    if target.exists():
        raise ConfigError(f"{target}: exists; choose another name")
    publish(partial, target)


def new_folder(target: Path) -> Path:
    """A folder beside `target`, to be filled before it gets that name.

    Raises:
        ConfigError: `target` exists, or cannot be made.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists; choose another name")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
    return partial


def _write(path: Path, described: Mapping[str, Described], arrays: Iterator[NDArray[Any]]) -> None:
    try:
        write_tensor_by_tensor(path, described, arrays)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _described(manifest: Manifest, name: str, slices: tuple[slice, ...]) -> Described:
    return Described(manifest.tensors[name].dtype, tuple(s.stop - s.start for s in slices))


def _read_and_hash(
    reader: CheckpointReader, file: str, wanted: Sequence[tuple[str, tuple[slice, ...]]], parts: dict[str, list[Part]]
) -> Iterator[NDArray[Any]]:
    for name, slices in wanted:
        array = reader.read(name, slices)
        start = tuple(s.start for s in slices)
        parts[name].append(Part(file, start, tuple(array.shape), f"{content_hash(array, start):016x}"))
        yield array


def _read_and_check(reader: CheckpointReader, names: Sequence[str]) -> Iterator[NDArray[Any]]:
    for name in names:
        entry = reader.manifest.tensors[name]
        array = reader.read(name, tuple(slice(0, length) for length in entry.shape))
        if f"{content_hash(array):016x}" != entry.hash:
            raise ConfigError(_damaged(reader.folder, name, entry))
        yield array


def _with_parts(source: Path, name: str, old: TensorEntry, parts: list[Part]) -> TensorEntry:
    """The entry with other parts. Their hashes, made of what was read, must sum to the old one."""
    if f"{sum(int(part.hash, 16) for part in parts) & MASK:016x}" != old.hash:
        raise ConfigError(_damaged(source, name, old))
    return replace(old, parts=tuple(parts))


def _damaged(folder: Path, name: str, entry: TensorEntry) -> str:
    files = ", ".join(sorted({part.file for part in entry.parts}))
    return f"{folder}: {name} in {files}: the content is not what was written (its hash differs)"
