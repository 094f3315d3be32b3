# SPDX-License-Identifier: Apache-2.0
"""The quantized matrices of a published folder, whatever method packed them: each becomes one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sporeloom.checkpoint.compressed_matrix import BESIDE, PACKED, PLAIN, compressed_matrices
from sporeloom.checkpoint.packed_matrix import PARTS, packed_matrices
from sporeloom.checkpoint.quantization_config import COMPRESSED, KEY, Quantization, read_quantization
from sporeloom.checkpoint.quantized_matrix import QuantizedMatrix
from sporeloom.checkpoint.tensor_files import StoredTensor, read_float32
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone_once
from sporeloom.core.reader import read_json
from sporeloom.models.config_file import CONFIG
from sporeloom.models.parameters import Shapes

NUMBERS = {"gptq": ("qweight",), "awq": ("qweight",), COMPRESSED: (PACKED, PLAIN)}
"""Method -> last words of the names of tensors that have a matrix's numbers."""
OTHERS = {"gptq": PARTS, "awq": PARTS, COMPRESSED: (PACKED, *BESIDE)}
"""Method -> last words of the names of all tensors that a matrix replaces."""


def unpack(folder: Path, tensors: dict[str, StoredTensor], shapes: Shapes) -> dict[str, QuantizedMatrix]:
    """Replace the parts of quantized matrices by one tensor of each. Returns the matrices by its name.

    Raises:
        ConfigError: parts that do not go together, or that no configuration explains.
    """
    quantization = read_quantization(folder, read_json(folder / CONFIG).mapping)
    if quantization is None:
        if packed := next((name for name in tensors if name.endswith((".qweight", f".{PACKED}"))), None):
            raise ConfigError(f"{folder}: {packed} is quantized, but {CONFIG} has no {KEY}")
        return {}
    endings, found = NUMBERS[quantization.method], {}
    for base, matrix in _matrices(tensors, quantization).items():
        numbers = next(part for part in endings if f"{base}.{part}" in tensors)
        stored, name = tensors[f"{base}.{numbers}"], f"{base}.weight"
        if name in tensors and numbers != PLAIN:
            raise ConfigError(
                f"{folder}: both {name} and {base}.{numbers} are there; remove the one that is not the model's"
            )
        for part in OTHERS[quantization.method]:
            tensors.pop(f"{base}.{part}", None)
        bias = tensors.get(f"{base}.bias")
        if bias and f"{base}.bias" not in shapes and not read_float32(bias).any():
            del tensors[f"{base}.bias"]  # zeros, which some versions of AutoGPTQ write for every matrix
        tensors[name] = StoredTensor(stored.path, name, "float32", matrix.shape, 0, matrix.dequantized)
        found[name] = matrix
    if not found:
        said = " or ".join(f"*.{ending}" for ending in endings)
        raise ConfigError(f"{folder}: {CONFIG} has a {KEY}, but no quantized tensor is named {said}")
    milestone_once(f"{folder}: {_described(found, quantization)}")
    return found


def _matrices(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> Mapping[str, QuantizedMatrix]:
    if quantization.method == COMPRESSED:
        return compressed_matrices(tensors, quantization.schemes)
    return packed_matrices(tensors, quantization)


def _described(found: Mapping[str, QuantizedMatrix], quantization: Quantization) -> str:
    """Describe the matrices, and the flags that compute with them."""
    counts = Counter(matrix.bits for matrix in found.values())
    if quantization.method == COMPRESSED:
        sizes = "; ".join(map(str, quantization.schemes))
    else:
        size = quantization.group_size
        sizes = f"groups of {'all columns' if size < 0 else f'{size} columns'}"
    said = " and ".join(f"{counts[bits]} matrices of {bits} bits" for bits in sorted(counts))
    computes = {
        4: "--weights int4 computes with them as they are",
        8: "--weights int8 or w8a8 computes with those as they are whose rows have one scale",
    }
    return f"{said} ({quantization.method}, {sizes}); {', '.join(computes[bits] for bits in sorted(counts))}"
