# SPDX-License-Identifier: Apache-2.0
"""Number types in which inference holds a model's matrices, a row each; and whether a model and its mesh can have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import parameter_specs
from sporeloom.models.parts.spec import ParameterSpec

WeightName = Literal[
    "float32", "int8", "w8a8", "int4", "int4-g64", "int4-g32", "int4-asym", "int4-asym-g64", "int4-asym-g32"
]

BLOCK = 32
"""Columns of a row of int4 that lie together: 16 bytes, each with column i in its low and column 16 + i in its high half."""
BY_ROWS = ("output", "down")
"""Matrices whose columns, not rows, tensor parallel ranks share."""
MAX_COLUMNS_OF_DIGITS = {1: 1032, 2: 16384, 4: 65536}
"""Maximum number of columns by the digits of a number up to 127 (base 256, 16 or 4): the sum of their products with -128 is
at most 2^24, up to which a float32 is exact (`sporeloom.nn.w8a8`)."""
WHOLE_ROW = 0
"""Group size of a row whose columns are one group."""
OTHERWISE = "use --weights int8 or float32"
"""Advice for a quantized folder, which has its own int4 or none."""

WEIGHTS_HELP = (
    "number type of matrices; float32: on devices that of their products; int8: a quarter of the memory, with a scale for "
    "each output channel; w8a8: int8, and int8 activations with a scale for each token; int4: an eighth, with a scale for "
    "each 128 columns of a row, or for 64 (-g64) or 32 (-g32), and with zero points as well (-asym)"
)
"""Help of the flag --weights."""


@dataclass(frozen=True)
class WeightFormat:
    """Format of matrices. Embeddings, the head and the matrix that latent attention absorbs have at least 8 bits."""

    name: str
    bits: Literal[32, 8, 4]
    group_size: int = WHOLE_ROW
    """Columns of a row that share a scale."""
    has_int8_activations: bool = False
    """Whether products are of int8 with int8: each token's row is rounded, too, with a scale of its own."""
    has_zeros: bool = False
    """Whether a group has a zero point of its own (asymmetric); otherwise 0 is 0."""
    exact: frozenset[str] = frozenset()
    """Paths of matrices that a quantized folder holds as floating point: they have 8 bits."""
    is_packed: bool = False
    """Whether it is that of a quantized folder, whose numbers are taken as they are."""
    problems: tuple[str, ...] = ()
    """Why a folder's matrices cannot be taken as they are."""

    def groups(self, columns: int) -> int:
        """Number of groups in a row."""
        return columns // self.group_size if self.group_size else 1

    def is_int4(self, path: str) -> bool:
        """Whether the matrix of a linear part has 4 bits."""
        return self.bits == 4 and path not in self.exact and not _is_absorbed(path)

    def is_w8a8(self, path: str) -> bool:
        """Whether a linear part computes with int8 activations."""
        return self.has_int8_activations and not _is_absorbed(path)


def _is_absorbed(path: str) -> bool:
    """Whether latent attention computes with a matrix itself, not with its product."""
    return path.rpartition(".")[2] == "kv_up"


FLOAT32 = WeightFormat("float32", 32)
WEIGHT_FORMATS = {
    each.name: each
    for each in (
        FLOAT32,
        WeightFormat("int8", 8),
        WeightFormat("w8a8", 8, has_int8_activations=True),
        WeightFormat("int4", 4, 128),
        WeightFormat("int4-g64", 4, 64),
        WeightFormat("int4-g32", 4, 32),
        WeightFormat("int4-asym", 4, 128, has_zeros=True),
        WeightFormat("int4-asym-g64", 4, 64, has_zeros=True),
        WeightFormat("int4-asym-g32", 4, 32, has_zeros=True),
    )
}


def format_problems(weights: WeightFormat, config: ModelConfig, tp: int = 1) -> list[str]:
    """List the reasons why a model, or its shards on so many tensor parallel ranks, cannot have a format."""
    if weights.problems:
        return list(weights.problems)
    if weights.bits == 4 and weights.group_size % BLOCK:
        return [f"groups of {weights.group_size} columns are not a multiple of {BLOCK}; {OTHERWISE}"]
    if weights.has_int8_activations:
        return _too_wide(weights, config)
    problems = []
    for spec in parameter_specs(config):
        path = spec.name.removesuffix(".weight")
        if spec.use != "matrix" or not weights.is_int4(path):
            continue
        columns = spec.shape[-1]
        if columns % (weights.group_size or BLOCK):
            size = weights.group_size or BLOCK
            fitting = OTHERWISE if weights.is_packed else _fitting(config, tp)
            problems.append(f"groups of {size} do not divide the {columns} columns of {path}; {fitting}")
            break
        if _shards(spec, tp) > 1 and weights.groups(columns) % tp:
            fewer = f"{OTHERWISE}, or a smaller tensor parallel degree"
            problems.append(
                f"a shard of {path}, {columns} columns on {tp} tensor parallel ranks, is not a multiple of groups of "
                f"{weights.group_size or columns}; {fewer if weights.is_packed else _fitting(config, tp)}"
            )
            break
    return problems


def _too_wide(weights: WeightFormat, config: ModelConfig) -> list[str]:
    """Matrices over whose columns sums are not exact."""
    most = max(MAX_COLUMNS_OF_DIGITS.values())
    for spec in parameter_specs(config):
        path = spec.name.removesuffix(".weight")
        if spec.use == "matrix" and weights.is_w8a8(path) and spec.shape[-1] > most:
            return [f"sums over the {spec.shape[-1]} columns of {path} are exact for up to {most}; use --weights int8"]
    return []


def _shards(spec: ParameterSpec, tp: int) -> int:
    """Number of shards of its columns."""
    return tp if spec.sharding == "tp" and spec.name.split(".")[-2] in BY_ROWS else 1


def _fitting(config: ModelConfig, tp: int) -> str:
    """The formats that a model can have."""
    sizes = {
        spec.shape[-1] // _shards(spec, tp)
        for spec in parameter_specs(config)
        if spec.use == "matrix" and WEIGHT_FORMATS["int4"].is_int4(spec.name.removesuffix(".weight"))
    }
    names = [n for n, each in WEIGHT_FORMATS.items() if each.bits == 4 and not any(s % each.group_size for s in sizes)]
    return f"use --weights {' or '.join(names[:2] or ['int8'])}"


def held_format(name: WeightName, packed: WeightFormat | None, source: object) -> WeightFormat:
    """The format in which `source` is held: that of the name or, for int4, that in which its matrices are packed already.

    Raises:
        ConfigError: another int4 than that.
    """
    wanted = WEIGHT_FORMATS[name]
    if packed is None or wanted.bits != 4:
        return wanted
    if name != "int4":
        raise ConfigError(
            f"{source}: its matrices have 4 bits in groups of their own already; --weights int4 computes with them, "
            f"got {name}"
        )
    return packed
