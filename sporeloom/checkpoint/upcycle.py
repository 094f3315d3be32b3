# SPDX-License-Identifier: Apache-2.0
"""Sparse upcycling: the experts of a model are copies of the MLPs of a dense one. Some rows at a time.

Source: arXiv:2212.05055 (sparse upcycling).
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.contents import (
    AVERAGES,
    FACTORED,
    MOMENTS,
    WEIGHTS_ALONE,
    check_contents,
    is_trained,
    model_of,
)
from sporeloom.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from sporeloom.checkpoint.model_folder import Read, check_shapes, copy_beside, load_config, open_weights, write_config
from sporeloom.checkpoint.published_folder import is_published_folder
from sporeloom.checkpoint.reshard import find_checkpoint, new_folder
from sporeloom.checkpoint.sharded import CheckpointReader, damage, file_name
from sporeloom.checkpoint.shards import Rows, write_shards
from sporeloom.checkpoint.tensor_files import (
    CHUNK_NUMBERS,
    TensorDescription,
    model_files,
    numpy_dtype,
    read_rows,
    stored_tensors,
    write_model_files,
)
from sporeloom.checkpoint.tensor_hashes import tensor_damage
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import CONFIG
from sporeloom.models.parameters import decoder_specs, parameter_shapes
from sporeloom.models.parts.experts import STACKED, ExpertConfig
from sporeloom.strategy.tensor_slice import TensorSlice

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class DenseCheckpoint:
    """A model folder or a training checkpoint, with the model in it."""

    folder: Path
    family: str
    model: ModelConfig
    manifest: Manifest | None
    """Manifest of a training checkpoint."""
    published: Read | None = None
    """Function that reads slices of the tensors of a Hugging Face folder."""

    def rows(self, name: str) -> Rows:
        """A tensor, some rows at a time, float32."""
        if self.manifest is None and self.published is None:
            tensor = self.stored[name]
            return read_rows(tensor, 0, tensor.shape[0], "float32")
        shape = self.shapes[name] if self.manifest is None else self.manifest.tensors[name].shape
        step = max(1, CHUNK_NUMBERS // max(1, int(np.prod(shape[1:]))))
        starts = range(0, shape[0], step)
        read = CheckpointReader(self.folder, self.manifest).read if self.manifest else self.published
        assert read
        none, rest = (0,) * len(shape[1:]), tuple(shape[1:])
        return (read(name, TensorSlice((i, *none), (min(step, shape[0] - i), *rest))) for i in starts)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """The tensors of a model folder, not read yet."""
        return stored_tensors(model_files(self.folder))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.model)


def open_dense(folder: Path) -> DenseCheckpoint:
    """Open the dense model in a folder: a model folder, a training checkpoint, or the newest of several.

    Raises:
        ConfigError: there is none, it is damaged, or has experts already.
    """
    if (folder / MANIFEST).exists() or not (folder / CONFIG).exists():
        folder = find_checkpoint(folder)
        manifest = read_manifest(folder)
        check_contents(manifest, folder)
        if problem := damage(folder, manifest):
            raise ConfigError(problem)
        dense = DenseCheckpoint(folder, *model_of(manifest, folder), manifest)
    elif is_published_folder(folder):
        dense = DenseCheckpoint(folder, *load_config(folder), None, open_weights(folder).read)
    else:
        dense = DenseCheckpoint(folder, *load_config(folder), None)
        check_shapes({name: tensor.shape for name, tensor in dense.stored.items()}, dense.shapes, str(folder))
        if problem := tensor_damage(folder):
            raise ConfigError(problem)
    if dense.model.experts:
        raise ConfigError(
            f"{folder}: the model has {dense.model.experts.num_experts} experts already; give a dense one"
        )
    return dense


@dataclass(frozen=True)
class UpcycleJob:
    """Conversion of a dense model to mixture of experts."""

    dense: DenseCheckpoint
    model: ModelConfig
    """The model with experts."""
    noise: float
    """Standard deviation of the noise that is added to each copy."""
    seed: int

    def rows(self, name: str) -> Rows:
        """A tensor of the new model, or of its optimizer's state, some rows at a time."""
        prefix = next((moment for moment in MOMENTS if name.startswith(moment)), "")
        if STACKED in name:
            return self._copies(name, noise=0.0 if prefix else self.noise)
        if name.removeprefix(prefix) in self.dense.shapes:
            return self.dense.rows(name)
        return iter([self._fresh(name.removeprefix(prefix), bool(prefix))])

    def _copies(self, name: str, noise: float) -> Rows:
        """The dense matrix or bias once for each expert."""
        matrix = np.concatenate(list(self.dense.rows(name.replace(STACKED, ".mlp."))))
        matrix = matrix.reshape(1, *((1, -1) if matrix.ndim == 1 else matrix.shape))
        for expert in range(self.model.mixture.num_experts):
            copy = matrix
            if noise:
                copy = matrix + self._random(f"{name} {expert}").normal(0, noise, matrix.shape).astype(np.float32)
            yield copy

    def _fresh(self, name: str, is_moment: bool) -> NDArray[np.float32]:
        """Parameters that the dense model lacks: a router begins as in a new model, its optimizer's state at 0."""
        _, shape, init, *_ = decoder_specs(self.model)[name]
        if is_moment:
            return np.zeros(shape, np.float32)
        if init.kind == "normal":
            return self._random(name).normal(0, init.value, shape).astype(np.float32)
        assert init.kind == "constant", f"{name}: {init}"
        return np.full(shape, init.value, np.float32)

    def _random(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


def upcycled(dense: DenseCheckpoint, experts: ExpertConfig) -> ModelConfig:
    """Configuration of the model with experts.

    Raises:
        ConfigError: experts that a dense model cannot become.
    """
    if experts.shared_ffn_hidden_size:
        raise ConfigError("a shared expert cannot be converted: each expert is a copy of the full MLP")
    return dataclasses.replace(dense.model, experts=experts)


def write_model(job: UpcycleJob, target: Path) -> int:
    """Write the weights as a model folder. Returns their bytes.

    Raises:
        ConfigError: the target exists or cannot be written.
    """
    described = {name: TensorDescription("float32", shape) for name, shape in parameter_shapes(job.model).items()}
    with new_folder(target) as partial_folder:
        num_bytes = write_model_files(partial_folder, described, lambda names: map(job.rows, names), SHARD_BYTES)
        _add_rest(job, partial_folder)
    return num_bytes


def write_checkpoint(job: UpcycleJob, target: Path) -> int:
    """Write weights and optimizer state as a training checkpoint that `train --resume` continues. Returns the
    bytes.

    Raises:
        ConfigError: the source is not a training checkpoint; the target exists or cannot be written.
    """
    old = job.dense.manifest
    if old is None or old.state.get(WEIGHTS_ALONE):
        what = "weights alone have" if old else "a model folder has"
        raise ConfigError(f"{job.dense.folder}: {what} no optimizer state to carry")
    moments = [moment for moment in MOMENTS if any(name.startswith(moment) for name in old.tensors)]
    if set(moments) & set(FACTORED):
        raise ConfigError(
            f"{job.dense.folder}: the state of adafactor-factored is of unsharded matrices; leave out --carry-optimizer"
        )
    if any(name.startswith(AVERAGES) for name in old.tensors):
        raise ConfigError(
            f"{job.dense.folder}: averages of weights (--ema-decay) are not converted; leave out --carry-optimizer"
        )
    if old.state["optimizer"].get("name") == "muon":
        raise ConfigError(f"{job.dense.folder}: Muon's momenta are of dense matrices; leave out --carry-optimizer")
    shapes = {
        prefix + name: shape
        for prefix in ("", *moments)
        for name, shape in parameter_shapes(job.model).items()
        if not prefix or is_trained(name)
    }
    # A moment keeps its type, as bfloat16 of --optimizer-state-dtype; new ones have that of the others.
    dtypes = {
        moment: next(entry.dtype for name, entry in old.tensors.items() if name.startswith(moment))
        for moment in moments
    }
    described = {
        name: TensorDescription(next((dtypes[m] for m in moments if name.startswith(m)), "float32"), shape)
        for name, shape in shapes.items()
    }
    with new_folder(target) as partial_folder:
        tensors, files = write_shards(
            partial_folder,
            described,
            {name: [(file_name(0), TensorSlice.full(shape))] for name, shape in shapes.items()},
            lambda name, _: (rows.astype(numpy_dtype(described[name].dtype), copy=False) for rows in job.rows(name)),
        )
        new = dataclasses.replace(
            old,
            tensors=tensors,
            files=files,
            model={"family": job.dense.family, **job.model.to_dict()},
            strategy={},
        )
        new.write(partial_folder)
        _add_rest(job, partial_folder)
    return new.num_bytes


def _add_rest(job: UpcycleJob, partial_folder: Path) -> None:
    """Copy the other files of the folder."""
    copy_beside(job.dense.folder, partial_folder)
    write_config(partial_folder, job.dense.family, job.model)
