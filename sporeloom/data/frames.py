# SPDX-License-Identifier: Apache-2.0
"""Results of a shard as a file: one dataclass after the other, in MessagePack. Reading one executes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
ARRAY = 1
"""MessagePack type number of an array, (dtype, shape, bytes)."""


def write_frames(file: IO[bytes], results: Iterable[Any]) -> None:
    """Encode `results`: dataclasses of bytes, numbers, texts, arrays, and lists, dicts and counters of them."""
    packer = import_module("msgpack").Packer(default=_array)
    for result in results:
        file.write(packer.pack([getattr(result, field.name) for field in dataclasses.fields(result)]))


def read_frames(path: Path, kind: type[T]) -> Iterator[T]:
    """Decode them as `kind`."""
    hints = list(get_type_hints(kind).values())
    with path.open("rb") as file:
        for values in import_module("msgpack").Unpacker(file, ext_hook=_of_array, max_buffer_size=0):
            pairs = zip(hints, values, strict=True)
            yield kind(*(Counter(value) if get_origin(hint) is Counter else value for hint, value in pairs))


def _array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent across a cluster")
    msgpack = import_module("msgpack")
    return msgpack.ExtType(ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))


def _of_array(code: int, data: bytes) -> Any:
    dtype, shape, content = import_module("msgpack").unpackb(data)
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
