# SPDX-License-Identifier: Apache-2.0
"""Model folders as they are published on Hugging Face, read some rows of a tensor at a time."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.generation_config import GENERATION_CONFIG, end_tokens, with_end_tokens
from sporeloom.checkpoint.quantization_config import KEY, read_quantization
from sporeloom.checkpoint.quantized_folder import unpack
from sporeloom.checkpoint.quantized_matrix import Grouped, Int8, QuantizedMatrix
from sporeloom.checkpoint.tensor_files import StoredTensor, model_files, read_rows, stored_tensors
from sporeloom.checkpoint.tensor_hashes import tensor_damage
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import check_hashes
from sporeloom.core.log import milestone_once
from sporeloom.core.reader import read_json
from sporeloom.data.chat_template import TEMPLATE
from sporeloom.models.adapters import is_adapter_folder
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import CONFIG, PublishedModel, is_published_config, read_published_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.published import PublishedFormat
from sporeloom.models.weight_formats import OTHERWISE, WHOLE_ROW, WeightFormat
from sporeloom.strategy.tensor_slice import TensorSlice

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
    packed: dict[str, QuantizedMatrix] = field(default_factory=dict)
    """Quantized matrices, by the name of what their numbers are as floating point."""
    _last: dict[str, Grouped] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    @cached_property
    def weights(self) -> WeightFormat | None:
        """The format in which the matrices of 4 bits of a quantized folder are held as they are."""
        packed = {name: matrix for name, matrix in self.packed.items() if matrix.bits == 4}
        if not packed:
            return None
        sizes = {matrix.shape[1] // matrix.num_groups for matrix in packed.values()}
        problems = [problem for matrix in packed.values() if (problem := matrix.int4_problem())][:1]
        if len(sizes) > 1 and any(matrix.num_groups > 1 for matrix in packed.values()):
            said = " and ".join(map(str, sorted(sizes)))
            problems.append(f"groups of {said} columns in one folder, where int4 needs groups of one size; {OTHERWISE}")
        size = min(sizes) if len(sizes) == 1 else WHOLE_ROW
        is_packed = {name: [t.name in packed for t, *_ in rows] for name, rows in self.rows().items()}
        exact = frozenset(name.removesuffix(".weight") for name, each in is_packed.items() if not all(each))
        return WeightFormat("int4", 4, size, has_zeros=True, exact=exact, is_packed=True, problems=tuple(problems))

    def read_int4(self, name: str) -> Grouped:
        """Read a matrix of 4 bits as it is.

        Raises:
            ConfigError: a file is damaged, groups of columns that are not neighbours or not of one size.
        """
        rows = self.rows()[name]
        if _is_of_experts(rows):
            whole = [self.packed[tensor.name].int4() for tensor, *_ in rows]
            return Grouped(*(np.stack(arrays) for arrays in zip(*whole, strict=True)))
        parts = [[array[start:stop] for array in self._whole(tensor.name)] for tensor, start, stop in rows]
        return Grouped(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def read_int8(self, name: str) -> Int8 | None:
        """Read a matrix as it is; None: the folder has it in another form than int8 with a scale for each row.

        Raises:
            ConfigError: a file is damaged.
        """
        rows = self.rows()[name]
        found = [self.packed[tensor.name].int8() if tensor.name in self.packed else None for tensor, *_ in rows]
        whole = [matrix for matrix in found if matrix]
        if len(whole) < len(rows):
            return None
        if _is_of_experts(rows):
            return Int8(*(np.stack(arrays) for arrays in zip(*whole, strict=True)))
        cut = [[array[start:stop] for array in each] for each, (_, start, stop) in zip(whole, rows, strict=True)]
        return Int8(*(np.concatenate(arrays) for arrays in zip(*cut, strict=True)))

    def _whole(self, name: str) -> Grouped:
        """The matrix of a tensor; the last one is kept, for the next parameter whose rows are in it."""
        if name not in self._last:
            self._last.clear()
            self._last[name] = self.packed[name].int4()
        return self._last[name]


def open_published(folder: Path, family: str | None = None) -> PublishedFolder:
    """Open a folder with config.json and safetensors, of `family` or of the one that knows its model_type.

    Raises:
        ConfigError: missing or damaged files, another network, tensors that are missing, unknown or of another shape.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    check_hashes(folder)
    family, way, model, *_ = _configuration(folder, family)
    tensors = stored_tensors(model_files(folder))
    packed = unpack(folder, tensors, way.shapes(model))
    if model.tied_embedding:
        _drop_tied_head(way, tensors, folder)
    copies = [name for name, original in way.repeated(model).items() if _drop_copy(tensors, name, original, folder)]
    model = way.with_copies(model, copies)
    if problems := way.problems({name: tensor.shape for name, tensor in tensors.items()}, model):
        raise ConfigError(f"{folder}: {problem}" for problem in problems)
    if problem := tensor_damage(folder):
        raise ConfigError(problem)
    return PublishedFolder(folder, family, way, model, tensors, packed)


def is_published_folder(folder: Path) -> bool:
    """Whether a folder holds a model as Hugging Face has them, by its config.json."""
    path = folder / CONFIG
    if not path.is_file() or is_adapter_folder(folder):
        return False
    value = read_json(path).value
    return isinstance(value, dict) and is_published_config(value)


def refuse_published(folder: Path, target: Path, *flags: str) -> None:
    """Refuse a Hugging Face folder where a training checkpoint is expected, with the command that writes the output.

    Raises:
        ConfigError: it is one.
    """
    if is_published_folder(folder):
        words = ["sporeloom", "convert-checkpoint", "--from", "huggingface", str(folder), str(target), *flags]
        raise ConfigError(f"{folder}: a Hugging Face folder, not a training checkpoint; use {shlex.join(words)}")


def published_config(folder: Path) -> tuple[str, ModelConfig]:
    """Read family and configuration of a published folder, without its weights.

    Raises:
        ConfigError: a configuration that cannot be used.
    """
    family, way, model, *_ = _configuration(folder)
    milestone_once(f"{folder}: Hugging Face folder ({way.model_type}), read as a model of {family}")
    copies = way.repeated(model)
    tensors = stored_tensors(model_files(folder)) if copies else {}
    return family, way.with_copies(
        model, [name for name, original in copies.items() if {name, original} <= set(tensors)]
    )


def _configuration(folder: Path, family: str | None = None) -> PublishedModel:
    """Read config.json and generation_config.json, and log what of them is ignored or missing.

    Raises:
        ConfigError: a configuration that cannot be used.
    """
    document = read_json(folder / CONFIG)
    read_quantization(folder, document.mapping)
    document.value = {key: value for key, value in document.mapping.items() if key != KEY}
    found = read_published_config(document, family)
    if found.unknown:
        milestone_once(f"{document.source}: keys that are unknown and ignored: {', '.join(found.unknown)}")
    model = found.model
    if found.has_end_token:
        return found._replace(model=with_end_tokens(model, folder))
    if tokens := end_tokens(folder, model.vocab_size):
        model = dataclasses.replace(model, eod_id=tokens[0], loss_ignore_id=tokens[0], stop_ids=tokens[1:])
        return found._replace(model=model)
    milestone_once(
        f"{document.source}: no eos_token_id; documents end with token {model.eod_id} unless eod_id says otherwise"
    )
    return found


def _is_of_experts(rows: Sequence[Rows]) -> bool:
    """Whether rows are those of experts, a matrix of each."""
    return len(rows[0][0].shape) > 2


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


def read_slice(rows: Sequence[Rows], part: TensorSlice) -> Iterator[NDArray[Any]]:
    """Read a slice of a parameter from the rows of tensors that it consists of, float32, some rows at a time."""
    wanted, *rest = part.slices
    first = 0
    for tensor, start, stop in rows:
        low, high = max(wanted.start, first), min(wanted.stop, first + stop - start)
        if low < high:
            yield from read_rows(tensor, start + low - first, start + high - first, "float32", rest)
        first += stop - start
