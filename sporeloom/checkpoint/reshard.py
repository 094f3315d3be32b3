# SPDX-License-Identifier: Apache-2.0
"""Reshard a training checkpoint, one tensor at a time; or export it as a model folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sporeloom.checkpoint.content_hash import content_hash
from sporeloom.checkpoint.contents import AVERAGES, BESIDE_WEIGHTS, model_of
from sporeloom.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import copy_beside, load_config, load_weights, write_config
from sporeloom.checkpoint.sharded import CheckpointReader
from sporeloom.checkpoint.shards import Destinations, write_shards
from sporeloom.checkpoint.tensor_files import TensorDescription, write_model_files
from sporeloom.checkpoint.tensor_hashes import seal
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush_all, partial_name
from sporeloom.strategy.tensor_slice import TensorSlice


def find_checkpoint(folder: Path) -> Path:
    """`folder` itself, or the newest checkpoint in it.

    Raises:
        ConfigError: there is none.
    """
    if (folder / MANIFEST).exists():
        return folder
    if found := checkpoints(folder):
        return found[0]
    raise ConfigError(f"{folder}: contains neither {MANIFEST} nor folders step-*; give a training checkpoint")


def reshard(source: Path, target: Path, shards: Destinations, strategy: Mapping[str, Any]) -> Manifest:
    """Write the checkpoint `source` as `target`, each tensor in the shards of `shards`.

    Raises:
        ConfigError: the source is damaged, the target exists or cannot be written.
    """
    manifest = read_manifest(source)
    reader = CheckpointReader(source, manifest)
    described = {name: TensorDescription(entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    with new_folder(target) as partial:
        tensors, files = write_shards(partial, described, shards, lambda *of: iter([reader.read(*of)]))
        for name, entry in manifest.tensors.items():
            if tensors[name].hash != entry.hash:
                raise ConfigError(_damaged(source, name, entry))
        copy_beside(source, partial, but=())
        new = replace(manifest, tensors=tensors, files=files, strategy=dict(strategy))
        new.write(partial)
    return new


def export(source: Path, target: Path, max_shard_bytes: int, averaged: bool = False) -> int:
    """Write the weights of a training checkpoint, unsharded, as a model folder. Returns the bytes.

    `averaged`: the moving averages of the weights instead; a weight that is not trained has none.

    Files hold at most `max_shard_bytes` each, or one tensor that is larger; with more than one there is an index.

    Raises:
        ConfigError: the source is damaged, the target exists or cannot be written.
    """
    manifest = read_manifest(source)
    if manifest.state.get("lora"):
        raise ConfigError(
            f"{source}: contains adapters only; the run writes them with their configuration when it ends"
        )
    beside = manifest.state.get("beside") or {}
    weights = {
        n: entry for n, entry in manifest.tensors.items() if not n.startswith(BESIDE_WEIGHTS) and n not in beside
    }
    stored = {name: name for name in weights}
    if averaged:
        stored |= {name: AVERAGES + name for name in weights if AVERAGES + name in manifest.tensors}
        if all(name == of for name, of in stored.items()):
            raise ConfigError(f"{source}: has no averages of weights; only runs with --ema-decay save them")
    reader = CheckpointReader(source, manifest)
    described = {name: TensorDescription(entry.dtype, entry.shape) for name, entry in weights.items()}
    with new_folder(target) as partial:
        num_bytes = write_model_files(
            partial, described, lambda names: _read_and_check(reader, [stored[name] for name in names]), max_shard_bytes
        )
        write_config(partial, *model_of(manifest, source))
        copy_beside(source, partial)
    return num_bytes


def export_merged(source: Path, target: Path, max_shard_bytes: int) -> int:
    """Merge a folder of adapters into their model, as a model folder. Returns the bytes.

    Raises:
        ConfigError: adapters or model are damaged or do not fit, the target exists or cannot be written.
    """
    weights, (family, model) = load_weights(source), load_config(source)
    described = {name: TensorDescription("float32", tuple(value.shape)) for name, value in weights.items()}
    with new_folder(target) as partial:
        num_bytes = write_model_files(
            partial, described, lambda names: [weights[name] for name in names], max_shard_bytes
        )
        write_config(partial, family, model)
        copy_beside(source, partial)
    return num_bytes


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target` to fill, which then gets the hashes of its contents, and that name.

    Raises:
        ConfigError: `target` exists, or cannot be made; it cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists; choose another name")
    partial = partial_name(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        seal(partial)
        flush_all(partial)
        partial.rename(target)  # fails if another process was faster
    except OSError as error:
        if target.exists():
            raise ConfigError(f"{target}: exists; choose another name") from None
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_and_check(reader: CheckpointReader, names: Sequence[str]) -> Iterator[NDArray[Any]]:
    for name in names:
        entry = reader.manifest.tensors[name]
        array = reader.read(name, TensorSlice.full(entry.shape))
        if f"{content_hash(array):016x}" != entry.hash:
            raise ConfigError(_damaged(reader.folder, name, entry))
        yield array


def _damaged(folder: Path, name: str, entry: TensorEntry) -> str:
    files = ", ".join(sorted({part.file for part in entry.parts}))
    return f"{folder}: {name} in {files}: the content is not what was written (its hash differs)"
