# SPDX-License-Identifier: Apache-2.0
"""Model folders as they are published on Hugging Face, read and written some rows of a tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.contents import WEIGHTS_ALONE
from sporeloom.checkpoint.generation_config import GENERATION_CONFIG, end_tokens, with_end_tokens
from sporeloom.checkpoint.manifest import MANIFEST, Manifest
from sporeloom.checkpoint.model_folder import CONFIG, check_shapes, load_config, write_config
from sporeloom.checkpoint.reshard import new_folder
from sporeloom.checkpoint.shards import Shard, Slices, write_shards
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
from sporeloom.core.hashes import check_hashes
from sporeloom.core.log import milestone
from sporeloom.core.reader import Document, fields_from, read_json
from sporeloom.data.chat_template import TEMPLATE
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import FAMILIES, family_module
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.published import ParameterPart, PublishedFormat, published_as, read_config

Dtype = Literal["float32", "bfloat16"]
SHARD_BYTES = 5_000_000_000
BESIDE = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION_CONFIG,
    TEMPLATE,
)
"""Files that are copied as they are; published folders have many others."""


Rows = tuple[StoredTensor, int, int]
"""Range of a tensor's rows: the first one and the end."""


@dataclass(frozen=True)
class PublishedFolder:
    """A published folder whose tensors are those of its configuration."""

    folder: Path
    family: str
    way: PublishedFormat
    model: ModelConfig
    tensors: dict[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names of this package's parameters."""
        return parameter_shapes(self.model)

    def rows(self) -> dict[str, list[Rows]]:
        """This package's parameters as rows of published tensors: of one or, for a parameter of experts, of
        consecutive ones."""
        shapes = parameter_shapes(self.model)
        found: dict[str, list[Rows]] = {}
        for name, parts in self.way.tensors(self.model).items():
            tensor, start = self.tensors[name], 0
            for part in parts:
                if part.expert is None:
                    found[part.name] = [(tensor, start, start + shapes[part.name][0])]
                    start += shapes[part.name][0]
                else:  # in order of the experts
                    found.setdefault(part.name, []).append((tensor._replace(shape=(1, *tensor.shape)), 0, 1))
        return found


def open_published(folder: Path, family: str | None = None) -> PublishedFolder:
    """Open a folder with config.json and safetensors, of `family` or of the one that knows its model_type.

    Raises:
        ConfigError: missing or damaged files, another network, tensors that are missing, unknown or of another shape.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    check_hashes(folder)
    document = read_json(folder / CONFIG)
    model_type = str(document.mapping.get("model_type", ""))
    known: dict[str, tuple[str, PublishedFormat]] = {}
    for name in [family] if family else FAMILIES:
        for way in family_module(name, "weights").PUBLISHED:
            known.setdefault(way.model_type, (name, way))
    published_as(tuple(way for _, way in known.values()), model_type, document.source)
    family, way = known[model_type]
    model = _model(way, document, folder)
    tensors = stored_tensors(model_files(folder))
    if model.tied_embedding:
        _drop_tied_head(way, tensors, folder)
    copies = [name for name, original in way.repeated(model).items() if _drop_copy(tensors, name, original, folder)]
    model = way.with_copies(model, copies)
    if problems := way.problems({name: tensor.shape for name, tensor in tensors.items()}, model):
        raise ConfigError(f"{folder}: {problem}" for problem in problems)
    if problem := tensor_damage(folder):
        raise ConfigError(problem)
    return PublishedFolder(folder, family, way, model, tensors)


def _drop_tied_head(way: PublishedFormat, tensors: dict[str, StoredTensor], folder: Path) -> None:
    """Leave out a head that is stored besides the embedding that it is tied to.

    Raises:
        ConfigError: it is another matrix.
    """
    word, head = (tensors.get(str(way.name_of(name))) for name in ("embedding.word.weight", "head.weight"))
    if not word or not head:
        return
    if not _are_equal(word, head):
        raise ConfigError(
            f"{folder / CONFIG}: tie_word_embeddings is true, but {head.name} is not {word.name}: remove it from the file if "
            "the embedding is to be used, or write false"
        )
    del tensors[head.name]


def _drop_copy(tensors: dict[str, StoredTensor], name: str, original: str, folder: Path) -> bool:
    """Leave out a tensor that repeats another one. Returns whether there was one.

    Raises:
        ConfigError: it is another matrix.
    """
    found = tensors.get(name), tensors.get(original)
    if not found[0] or not found[1]:
        return False
    if not _are_equal(found[0], found[1]):
        raise ConfigError(f"{folder}: {name} is not {original}, which multi-token prediction shares with the model")
    del tensors[name]
    return True


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    rows = zip(*(read_rows(each, 0, each.shape[0], "float32") for each in (first, second)), strict=False)
    return first.shape == second.shape and all(np.array_equal(*pair) for pair in rows)


def _model(way: PublishedFormat, document: Document, folder: Path) -> ModelConfig:
    try:
        fields, unknown = read_config(way, document.mapping)
    except ConfigError as error:
        raise ConfigError(f"{document.source}: {problem}" for problem in error.problems) from None
    except KeyError as error:
        raise ConfigError(f"{document.source}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{document.source}: {error}") from None
    if unknown:
        milestone(f"{document.source}: keys that are unknown and ignored: {', '.join(unknown)}")
    given = {name: value for name, value in fields.items() if value is not None}
    model = fields_from(ModelConfig, Document(document.source, given))
    if "eod_id" in fields:
        return with_end_tokens(model, folder)
    if tokens := end_tokens(folder, model.vocab_size):
        return dataclasses.replace(model, eod_id=tokens[0], loss_ignore_id=tokens[0], stop_ids=tokens[1:])
    milestone(
        f"{document.source}: no eos_token_id; documents end with token {model.eod_id} unless eod_id says otherwise"
    )
    return model


def import_shards(
    source: PublishedFolder, target: Path, shards: Mapping[str, Sequence[Shard]], strategy: Mapping[str, Any]
) -> int:
    """Write a published folder as a checkpoint of weights alone, each tensor in the shards of `shards`, float32,
    some rows at a time. Returns the bytes.

    Raises:
        ConfigError: the target exists or cannot be written.
    """
    rows = source.rows()
    described = {name: TensorDescription("float32", shape) for name, shape in source.shapes.items()}
    with new_folder(target) as partial:
        tensors, files = write_shards(partial, described, shards, lambda name, slices: _part(rows[name], slices))
        model = {"family": source.family, **source.model.to_dict()}
        versions = {"sporeloom": version("sporeloom"), "numpy": np.__version__}
        manifest = Manifest(0, tensors, files, {WEIGHTS_ALONE: True}, model, dict(strategy), versions)
        manifest.write(partial)
        write_config(partial, source.family, source.model)
        _copy_beside(source.folder, partial)
    return manifest.num_bytes


def _part(rows: Sequence[Rows], slices: Slices) -> Iterator[NDArray[Any]]:
    """A slice of a parameter, by the tensors whose rows it is."""
    wanted, *rest = slices
    first = 0
    for tensor, start, stop in rows:
        low, high = max(wanted.start, first), min(wanted.stop, first + stop - start)
        if low < high:
            yield from read_rows(tensor, start + low - first, start + high - first, "float32", rest)
        first += stop - start


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
