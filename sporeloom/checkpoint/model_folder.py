# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: model.safetensors (unsharded tensors; or several files and their index), config.json (the
model's), the tokenizer. A training checkpoint is one, too: its weights are assembled from their shards. So is a
folder of adapters: its weights are those of their model, with the adapters merged in. And so is a folder of Hugging Face's
form, which is read as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.adapters import merge, read_adapter
from sporeloom.checkpoint.contents import BESIDE_WEIGHTS, check_contents
from sporeloom.checkpoint.finite import check_finite
from sporeloom.checkpoint.generation_config import with_end_tokens
from sporeloom.checkpoint.manifest import MANIFEST, read_manifest
from sporeloom.checkpoint.published_folder import (
    BESIDE,
    is_published_folder,
    open_published,
    published_config,
    read_slice,
)
from sporeloom.checkpoint.quantized_matrix import Grouped, Int8
from sporeloom.checkpoint.sharded import CheckpointReader, damage
from sporeloom.checkpoint.tensor_files import (
    WEIGHTS,
    TensorDescription,
    model_files,
    read_float32,
    read_rows,
    stored_tensors,
    write_tensor_by_tensor,
)
from sporeloom.checkpoint.tensor_hashes import seal, tensor_damage
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import recover_folder, replaced_folder
from sporeloom.core.hashes import HASHES, check_hashes
from sporeloom.core.reader import fields_from, read_json
from sporeloom.models.adapters import ADAPTER_CONFIG, base_folder, is_adapter_folder, is_reward_adapter
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import CONFIG, is_published_config
from sporeloom.models.family import FAMILIES
from sporeloom.models.parts.experts import STACKED
from sporeloom.models.parts.multi_token_prediction import PREFIX
from sporeloom.models.weight_formats import WEIGHT_FORMATS, WeightFormat, WeightName, format_problems, held_format
from sporeloom.strategy.tensor_slice import TensorSlice

TENSOR_FILES = (".safetensors", ".safetensors.index.json")


def save_checkpoint(
    folder: Path,
    weights: Mapping[str, NDArray[Any]],
    family: str,
    config: ModelConfig,
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint folder; an older one of this name is replaced only when the new one is complete.
    `add_files` adds the other files, such as the tokenizer.

    Raises:
        ConfigError: weights that are not finite.
    """
    check_finite(weights, f"{folder}: the weights to write")
    with replaced_folder(folder) as partial:
        described = {name: TensorDescription(value.dtype.name, tuple(value.shape)) for name, value in weights.items()}
        write_tensor_by_tensor(partial / WEIGHTS, described, weights.values())
        write_config(partial, family, config)
        if add_files:
            add_files(partial)
        seal(partial)


def write_config(folder: Path, family: str, config: ModelConfig) -> None:
    """Write a model folder's config.json; `model_type` is the family once more, for the Auto classes of MindFormers."""
    values = {"family": family, "model_type": family, **config.to_dict()}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_config(folder: Path) -> tuple[str, ModelConfig]:
    """Read model family and configuration of a checkpoint folder, with the end tokens of its
    generation_config.json.

    Raises:
        ConfigError: no such folder, or a configuration that cannot be used.
    """
    recover_folder(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such checkpoint folder")
    check_hashes(folder, is_required=(folder / MANIFEST).exists())
    if is_adapter_folder(folder):
        family, model = load_config(base_folder(folder))
        model = with_end_tokens(model, folder)
        return family, model.with_value_head() if is_reward_adapter(folder) else model
    document = read_json(folder / CONFIG)
    if is_published_config(document.mapping):
        return published_config(folder)
    document.value = {name: value for name, value in document.mapping.items() if name != "model_type"}
    family = document.value.pop("family", "")
    if family not in FAMILIES:
        raise ConfigError(f"{document.at(('family',))}: family is {family!r}; known: {', '.join(FAMILIES)}")
    return family, with_end_tokens(fields_from(ModelConfig, document), folder)


def load_text_config(folder: Path) -> tuple[str, ModelConfig]:
    """Like `load_config`, for a model with logits.

    Raises:
        ConfigError: likewise, or a reward model.
    """
    family, model = load_config(folder)
    if model.value_head:
        raise ConfigError(f"{folder}: a reward model, which generates no text; it is for --reward-model")
    return family, model


def copy_beside(source: Path, target: Path, but: Collection[str] = (CONFIG,)) -> None:
    """Copy the other files of a model folder: tokenizer, chat template, files of other readers.

    `but`: names that stay; weights and manifests always do.
    """
    if is_adapter_folder(source):  # its own tokenizer and template take precedence over those of its model
        copy_beside(base_folder(source), target, but)
        but = (*but, ADAPTER_CONFIG)
    is_published = is_published_folder(source)
    for path in source.iterdir():
        if is_published and path.name not in BESIDE:
            continue  # weights in other forms, documentation
        if path.is_file() and path.name not in (*but, MANIFEST, HASHES) and not path.name.endswith(TENSOR_FILES):
            shutil.copy(path, target)


Read = Callable[[str, TensorSlice], NDArray[Any]]
"""Function that reads a slice of a tensor."""


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a folder, read on demand."""

    shapes: dict[str, tuple[int, ...]]
    read: Read
    """Read a slice of a tensor.

    Raises:
        ConfigError: the file is damaged, or numbers of it are not finite.
    """
    damage: Callable[[slice], str | None] = lambda share: None
    """The first tensor that differs from what was written, or None. Takes the slices to check."""
    packed: WeightFormat | None = None
    """The format of matrices that have 4 bits already."""
    read_int4: Callable[[str], Grouped] | None = None
    """Read one of those as it is."""
    read_int8: Callable[[str], Int8 | None] | None = None
    """Read a matrix that is int8 already as it is; None: it is not."""


def open_weights(folder: Path) -> FolderWeights:
    """The tensors of a checkpoint folder, float32.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    if is_adapter_folder(folder):
        base = base_folder(folder)
        merged = merge(load_weights(base), read_adapter(folder, *load_config(base)))
        if is_reward_adapter(folder):  # whose base may be a model with layers that a reward model does not have
            merged = {name: value for name, value in merged.items() if not name.startswith(PREFIX)}
        return FolderWeights(
            {name: value.shape for name, value in merged.items()}, lambda name, part: merged[name][part.slices]
        )
    if (folder / MANIFEST).exists():
        return _weights_of_state(folder)
    if is_published_folder(folder):
        return _published_weights(folder)
    stored = stored_tensors(model_files(folder))

    def read(name: str, part: TensorSlice) -> NDArray[Any]:
        if part == TensorSlice.full(stored[name].shape):
            return read_float32(stored[name])  # without a copy
        rows = read_rows(stored[name], part.start[0], part.stop[0], "float32", part.slices[1:])
        return np.concatenate(list(rows))

    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return FolderWeights(shapes, read, lambda share: tensor_damage(folder, share))


def _published_weights(folder: Path) -> FolderWeights:
    """The weights of a Hugging Face folder, by the names of this package."""
    source = open_published(folder)
    rows = source.rows()

    def read(name: str, part: TensorSlice) -> NDArray[Any]:
        return np.concatenate(list(read_slice(rows[name], part)))

    # `open_published` has compared the contents with their hashes.
    if not source.packed:
        return FolderWeights(source.shapes, read)
    return FolderWeights(
        source.shapes, read, packed=source.weights, read_int4=source.read_int4, read_int8=source.read_int8
    )


def _weights_of_state(folder: Path) -> FolderWeights:
    """The weights of a training checkpoint, without their moments."""
    manifest = read_manifest(folder)
    check_contents(manifest, folder)
    if manifest.state.get("lora"):
        raise ConfigError(
            f"{folder}: contains adapters only; the run writes them with their configuration when it ends"
        )
    beside = manifest.state.get("beside") or {}
    shapes = {
        name: entry.shape
        for name, entry in manifest.tensors.items()
        if not name.startswith(BESIDE_WEIGHTS) and name not in beside
    }
    return FolderWeights(shapes, CheckpointReader(folder, manifest).read, lambda share: damage(folder, manifest, share))


def weight_problems(name: WeightName, folder: Path, config: ModelConfig, tp: int = 1) -> list[str]:
    """List the reasons why a checkpoint folder, or its shards on `tp` ranks, cannot be held in a format."""
    weights = WEIGHT_FORMATS[name]
    if weights.has_int8_activations:
        return [f"--weights {name}: {each}" for each in format_problems(weights, config, tp)]
    if weights.bits != 4:
        return []
    try:
        packed = open_published(folder).weights if is_published_folder(folder) else None
        return [f"--weights {name}: {each}" for each in format_problems(held_format(name, packed, folder), config, tp)]
    except ConfigError as error:
        return error.problems


def load_weights(folder: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a checkpoint folder, unsharded.

    Raises:
        ConfigError: a file is missing or damaged, or numbers are not finite.
    """
    weights = open_weights(folder)
    if problem := weights.damage(slice(None)):
        raise ConfigError(problem)
    return {name: weights.read(name, TensorSlice.full(shape)) for name, shape in weights.shapes.items()}


def check_weights(weights: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Check tensors against the model's parameters.

    Raises:
        ConfigError: missing or unexpected names, other shapes, numbers that are not finite.
    """
    check_shapes({name: tuple(value.shape) for name, value in weights.items()}, shapes, source)
    check_finite(weights, source)


def check_shapes(found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Like `check_weights`, for tensors that were not read yet."""
    if any(STACKED in name for name in shapes) and not any(STACKED in name for name in found):
        raise ConfigError(
            f"{source}: the model has experts, but this checkpoint has none: convert it with sporeloom upcycle "
            f"--checkpoint {source}"
        )
    problems = [f"{source}: {name} {shape} is missing" for name, shape in shapes.items() if name not in found]
    problems += [f"{source}: {name} is not a parameter of the model" for name in found if name not in shapes]
    problems += [
        f"{source}: {name} is {found[name]}, the model's is {shape}"
        for name, shape in shapes.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = [f"{source}: and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ConfigError(problems[:8] + more)
