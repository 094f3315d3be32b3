# SPDX-License-Identifier: Apache-2.0
"""Convert model folders from and to the form of Hugging Face, some rows of a tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom import __version__
from sporeloom.checkpoint.contents import WEIGHTS_ALONE
from sporeloom.checkpoint.manifest import MANIFEST, Manifest
from sporeloom.checkpoint.model_folder import check_shapes, load_config, write_config
from sporeloom.checkpoint.published_folder import (
    BESIDE,
    PublishedFolder,
    is_published_folder,
    read_slice,
)
from sporeloom.checkpoint.published_folder import open_published as open_published  # together with what converts it
from sporeloom.checkpoint.reshard import new_folder
from sporeloom.checkpoint.shards import Destinations, write_shards
from sporeloom.checkpoint.tensor_files import (
    StoredTensor,
    TensorDescription,
    model_files,
    read_rows,
    stored_tensors,
    write_model_files,
)
from sporeloom.checkpoint.tensor_hashes import tensor_damage
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import CONFIG
from sporeloom.models.family import family_module
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.published import ParameterPart, PublishedFormat, published_as

Dtype = Literal["float32", "bfloat16"]
SHARD_BYTES = 5_000_000_000


def import_shards(source: PublishedFolder, target: Path, shards: Destinations, strategy: Mapping[str, Any]) -> int:
    """Write a published folder as a checkpoint of weights alone, each tensor in the shards of `shards`, float32,
    some rows at a time. Returns the bytes.

    Raises:
        ConfigError: the target exists or cannot be written.
    """
    rows = source.rows()
    described = {name: TensorDescription("float32", shape) for name, shape in source.shapes.items()}
    with new_folder(target) as partial:
        tensors, files = write_shards(partial, described, shards, lambda name, part: read_slice(rows[name], part))
        model = {"family": source.family, **source.model.to_dict()}
        versions = {"sporeloom": __version__, "numpy": np.__version__}
        manifest = Manifest(0, tensors, files, {WEIGHTS_ALONE: True}, model, dict(strategy), versions)
        manifest.write(partial)
        write_config(partial, source.family, source.model)
        _copy_beside(source.folder, partial)
    return manifest.num_bytes


def import_published(source: PublishedFolder, target: Path, dtype: Dtype = "float32") -> int:
    """Convert a published folder to a model folder, some rows of a tensor at a time. Returns the bytes of its
    weights.

    Raises:
        ConfigError: the target exists or cannot be written.
    """
    rows, shapes = source.rows(), parameter_shapes(source.model)
    described = {name: TensorDescription(dtype, shapes[name]) for name in rows}

    def arrays(names: Sequence[str]) -> Iterator[Iterator[NDArray[Any]]]:
        return (chain.from_iterable(read_rows(*some, dtype) for some in rows[name]) for name in names)

    with new_folder(target) as partial:
        num_bytes = write_model_files(partial, described, arrays, SHARD_BYTES)
        write_config(partial, source.family, source.model)
        _copy_beside(source.folder, partial)
    return num_bytes


def export_published(
    folder: Path,
    target: Path,
    family: str | None = None,
    model_type: str | None = None,
    dtype: Dtype = "float32",
) -> tuple[str, int]:
    """Write a model folder in a published format. Returns the model_type, by default the family's first that fits,
    which transformers opens if it knows such models, and the bytes of the weights.

    Raises:
        ConfigError: a family or network that is not published so; the source is damaged, the target exists.
    """
    if (folder / MANIFEST).exists():
        raise ConfigError(f"{folder}: a training checkpoint; export its model first: sporeloom export-checkpoint")
    if is_published_folder(folder):
        raise ConfigError(
            f"{folder}: a Hugging Face folder already; for another model_type read it with --from huggingface"
        )
    found, model = load_config(folder)
    if model.value_head:
        raise ConfigError(f"{folder}: a reward model; no published format for it can be written")
    if family not in (None, found):
        raise ConfigError(f"--model {family}: {folder} holds a model of {found}")
    ways = family_module(found, "weights").PUBLISHED
    way = published_as(ways, model_type, "--model-type") if model_type else _fitting(ways, model)
    config = way.write(model)
    tensors = stored_tensors(model_files(folder))
    if problem := tensor_damage(folder):
        raise ConfigError(problem)
    check_shapes({name: tensor.shape for name, tensor in tensors.items()}, parameter_shapes(model), str(folder))
    shapes, parts = way.shapes(model), way.tensors(model)
    for name, original in way.copies_of(model).items():
        shapes[name], parts[name] = shapes[original], parts[original]
    described = {name: TensorDescription(dtype, shape) for name, shape in shapes.items()}

    def arrays(names: Sequence[str]) -> Iterator[Iterator[NDArray[Any]]]:
        for name in names:
            yield chain.from_iterable(_read_part(tensors[part.name], part, dtype) for part in parts[name])

    with new_folder(target) as partial:
        num_bytes = write_model_files(partial, described, arrays, SHARD_BYTES, {"format": "pt"})
        config = {**config, "torch_dtype": dtype} if "torch_dtype" in config else config
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _copy_beside(folder, partial)
    return way.model_type, num_bytes


def _fitting(ways: Sequence[PublishedFormat], model: ModelConfig) -> PublishedFormat:
    """The first published format that can express a model.

    Raises:
        ConfigError: none can; why the first one cannot.
    """
    refused = None
    for way in ways:
        try:
            way.write(model)
            return way
        except ConfigError as error:
            refused = refused or error
    assert refused
    raise refused


def read_published(source: PublishedFolder) -> dict[str, NDArray[np.float32]]:
    """All parameters at once, by name."""
    return {
        name: np.concatenate([array for some in rows for array in read_rows(*some, "float32")])
        for name, rows in source.rows().items()
    }


def _read_part(tensor: StoredTensor, part: ParameterPart, dtype: str) -> Iterator[NDArray[Any]]:
    """The rows of a published tensor from one of this package, some rows at a time."""
    if part.expert is None:
        return read_rows(tensor, 0, tensor.shape[0], dtype)
    return (array[0] for array in read_rows(tensor, part.expert, part.expert + 1, dtype))


def _copy_beside(source: Path, target: Path) -> None:
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
