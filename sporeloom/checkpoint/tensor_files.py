# SPDX-License-Identifier: Apache-2.0
"""Safetensors files tensor by tensor: the library's own writer needs all of them in memory.

Source: the format, https://github.com/huggingface/safetensors: the header's length, the header as JSON, the bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.finite import describe, is_finite, narrow, not_finite
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import open_regular
from sporeloom.core.reader import parse_json, read_json
from sporeloom.models.adapters import ADAPTER_CONFIG

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BFLOAT16 = "bfloat16"
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", BFLOAT16: "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
}
FLOATS = ("float64", "float32", "float16", BFLOAT16)
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_OF_A_MODEL = re.compile(r"model(?:-\d+-of-(\d+))?\.safetensors")
"""File names of a model's weights: one of several, or the only one. Other files may be in the folder."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, by the format."""
CHUNK_NUMBERS = 1 << 23
"""Bytes of a tensor that are read at once."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of a name; MindSpore defines another one with the name of ml_dtypes' bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == BFLOAT16 else name)


class TensorDescription(NamedTuple):
    """Description of a tensor that will be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class StoredTensor(NamedTuple):
    """Position of a tensor in a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    dequantized: Callable[[], NDArray[np.float32]] | None = None
    """Reads a matrix whose numbers are packed in other tensors."""


Arrays = Iterable[NDArray[Any] | Iterator[NDArray[Any]]]
"""Tensors, each complete or as its rows, some at a time."""


def write_tensor_by_tensor(
    path: Path,
    described: Mapping[str, TensorDescription],
    arrays: Arrays,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `arrays`, which come in the order of `described`, and flush them to the disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in described.items():
        start, end = end, end + tensor.num_bytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), array in zip(described.items(), arrays, strict=True):
            written = 0
            for part in array if isinstance(array, Iterator) else [np.asarray(array)]:
                assert (part.dtype.name, part.shape[1:]) == (tensor.dtype, tuple(tensor.shape[1:])), name
                written += file.write(np.ascontiguousarray(part).view(np.uint8).data)
            assert written == tensor.num_bytes, name
        file.flush()
        os.fsync(file.fileno())


def write_model_files(
    folder: Path,
    described: Mapping[str, TensorDescription],
    arrays: Callable[[Sequence[str]], Arrays],
    max_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a model's tensors as one file or, where they are more than `max_bytes`, as several and their index. A
    file holds at most that much, or one tensor that is larger. `arrays`: gives the tensors of some names.
    Returns the bytes."""
    shards = _shards(described, max_bytes)
    names = [WEIGHTS] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        try:
            write_tensor_by_tensor(folder / file, {name: described[name] for name in shard}, arrays(shard), metadata)
        except OSError as error:
            raise ConfigError(f"{folder / file}: cannot be written: {error.strerror}") from None
    total = sum(tensor.num_bytes for tensor in described.values())
    if len(shards) > 1:
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    return total


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder with its tensors: those of its index, model.safetensors, or all there are.

    Raises:
        ConfigError: an index that cannot be used, or files of another model's weights in the same folder.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{folder}: contains adapters; merge them into their model first: sporeloom export-checkpoint {folder} OUT"
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX
    names = _indexed(index) if index.exists() else [WEIGHTS] if WEIGHTS in found or not found else found
    others = [name for name in found if name not in names and _OF_A_MODEL.fullmatch(name)]
    if others:
        what = f"{INDEX} names {', '.join(names[:2])}{', ...' * (len(names) > 2)}" if index.exists() else WEIGHTS
        raise ConfigError(
            f"{folder}: two sets of weights: {what}, and besides {'it' if index.exists() else 'that'} there is "
            f"{', '.join(others[:2])}{', ...' * (len(others) > 2)}; remove the one that is not the model's"
        )
    sets = {match[1] for name in names if (match := _OF_A_MODEL.fullmatch(name))}
    if not index.exists() and len(sets) > 1:
        raise ConfigError(f"{folder}: two sets of weights: {', '.join(names)}; remove the one that is not the model's")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    names = read_json(index).mapping.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: no `weight_map` that maps tensors to files")
    if outside := [name for name in names.values() if Path(name).name != name or name.startswith(".")]:
        raise ConfigError(f"{index}: {outside[0]!r} is not a file of this folder")
    return sorted(set(names.values()))


def stored_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of some files, by name; only the headers are read.

    Raises:
        ConfigError: a file is missing or damaged, or a tensor is there twice.
    """
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in _read_header(path).items():
            if name in found:
                raise ConfigError(f"{path}: {name} is in {found[name].path.name}, too")
            found[name] = tensor
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path}: damaged or not safetensors: its header does not fit into it")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    header = Document(str(path), parse_json(text, str(path))).mapping
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        try:
            dtype, shape = _NAMES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, end = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{path}: {name}: its entry in the header cannot be read: {str(entry)[:100]}") from None
        if min(shape, default=0) < 0 or end - start != TensorDescription(dtype, shape).num_bytes or start < 0:
            raise ConfigError(f"{path}: {name}: {end - start} bytes are not {dtype} {shape}")
        if 8 + length + end > size:
            raise ConfigError(f"{path}: damaged: it ends before the bytes of {name} do")
        found[name] = StoredTensor(path, name, dtype, shape, 8 + length + start)
    return found


def read_float32(tensor: StoredTensor) -> NDArray[np.float32]:
    """Read a tensor of floating-point numbers, widened or narrowed.

    Raises:
        ConfigError: it holds no such numbers, or some that are not finite or too large; it cannot be read.
    """
    found: NDArray[np.float32] = _read(tensor, 0, math.prod(tensor.shape), "float32").reshape(tensor.shape)
    return found


def read_rows(
    tensor: StoredTensor, start: int, stop: int, dtype: str, rest: Sequence[slice] = ()
) -> Iterator[NDArray[Any]]:
    """Read rows of a tensor of floating-point numbers in another type, some at a time; `rest` slices its other
    dims.

    Raises:
        ConfigError: it holds no such numbers, or some that are not finite or too large; it cannot be read.
    """
    if tensor.dequantized:
        found = tensor.dequantized().reshape(tensor.shape)[(slice(start, stop), *rest)]
        yield narrow(found, numpy_dtype(dtype), f"{tensor.path}: {tensor.name}")
        return
    width = math.prod(tensor.shape[1:])
    step = max(1, CHUNK_NUMBERS // width)
    is_whole = all(s.stop - s.start == length for s, length in zip(rest, tensor.shape[1:], strict=False))
    for first in range(start, stop, step):
        last = min(stop, first + step)
        if is_whole:
            yield _read(tensor, first * width, (last - first) * width, dtype).reshape(last - first, *tensor.shape[1:])
        else:
            yield _read_slices(tensor, (slice(first, last), *rest), dtype)


def _read(tensor: StoredTensor, start: int, count: int, dtype: str) -> NDArray[Any]:
    """Read the numbers of a tensor."""
    return _checked(tensor, _read_raw(tensor, start, count), dtype)


def _read_raw(tensor: StoredTensor, start: int, count: int) -> NDArray[Any]:
    kind = _number_kind(tensor)
    try:
        return np.fromfile(tensor.path, kind, count, offset=tensor.offset + start * kind.itemsize)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tensor.path}: cannot be read: {error}") from None


def _read_slices(tensor: StoredTensor, slices: tuple[slice, ...], dtype: str) -> NDArray[Any]:
    """Read a slice of a tensor; only the pages of the file that it needs."""
    try:
        mapped = np.memmap(tensor.path, _number_kind(tensor), "r", tensor.offset, tensor.shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tensor.path}: cannot be read: {error}") from None
    return _checked(tensor, np.array(mapped[slices]), dtype)


def _checked(tensor: StoredTensor, raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Numbers of a tensor in another type.

    Raises:
        ConfigError: not all are finite, or fit into that type. Names every such tensor that belongs together.
    """
    if is_finite(raw):
        return narrow(raw, numpy_dtype(dtype), f"{tensor.path}: {tensor.name}")
    raise ConfigError(list(not_finite_tensors(_files_with(tensor.path))))


def not_finite_tensors(paths: Iterable[Path]) -> Iterator[str]:
    """Names of the tensors with NaN or infinity, by file. Reads all of them."""
    for path in paths:
        found = {}
        for name, tensor in _read_header(path).items():
            if tensor.dtype in FLOATS:
                numbers = math.prod(tensor.shape)
                starts = range(0, numbers, CHUNK_NUMBERS)
                pieces = (_read_raw(tensor, start, min(CHUNK_NUMBERS, numbers - start)) for start in starts)
                if text := describe(pieces, tensor.shape):
                    found[name] = text
        if found:
            yield not_finite(path, found)


def _files_with(path: Path) -> list[Path]:
    """The files of the model that a file belongs to."""
    files = model_files(path.parent) if not (path.parent / ADAPTER_CONFIG).exists() else []
    return files if path in files else [path]


def _number_kind(tensor: StoredTensor) -> np.dtype[Any]:
    if tensor.dtype not in FLOATS:
        raise ConfigError(f"{tensor.path}: {tensor.dtype} numbers are not weights")
    return numpy_dtype(tensor.dtype)


def _shards(described: Mapping[str, TensorDescription], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    size = 0
    for name, tensor in described.items():
        if not shards or size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
