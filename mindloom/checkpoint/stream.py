# SPDX-License-Identifier: Apache-2.0
"""Write a safetensors file tensor by tensor: the library's own writer wants all of them in memory.

Source: the format, https://github.com/huggingface/safetensors: the header's length, the header as JSON, the bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DTYPES = {
    **{
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
    },
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
}


class Described(NamedTuple):
    """A tensor that is still to come."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def write_tensor_by_tensor(
    path: Path,
    described: Mapping[str, Described],
    arrays: Iterable[NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `arrays`, which come in the order of `described`, and make sure that they are on the disk."""
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
            assert (array.dtype.name, array.shape) == (tensor.dtype, tuple(tensor.shape)), name
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())
