# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` of compressed-tensors, as llm-compressor writes it and vLLM reads it: groups of modules with the
settings of their numbers. The tensors themselves show which matrices are quantized (`compressed_matrix`).

Source: QuantizationConfig, QuantizationScheme, QuantizationArgs and CompressionFormat of compressed-tensors
(github.com/vllm-project/compressed-tensors, src/compressed_tensors/quantization and config/format.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone_once

INSTEAD = "use the folder of the unquantized model, or one with weights of int8 or int4"
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
SEVERAL = "mixed-precision"
"""Format of a folder with a format for each group."""
STATUSES = ("compressed", "frozen")
"""Statuses of folders with quantized tensors: older versions wrote that of the model that they compressed."""
READ = ("quant_method", "format", "config_groups", "quantization_status")
OFF = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""Keys that change the computation unless they are empty."""
IRRELEVANT = ("ignore", "global_compression_ratio", "version")
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Activations that `--weights w8a8` computes with."""


@dataclass(frozen=True)
class Scheme:
    """Settings of some matrices."""

    bits: int
    group_size: int
    """Columns of a row that share a scale; -1: all; 0: all rows share it, too."""
    has_zeros: bool
    """Whether a group has a zero point of its own."""

    def num_groups(self, columns: int) -> int:
        return -(-columns // self.group_size) if self.group_size > 0 else 1

    def __str__(self) -> str:
        size = {-1: "a scale for each row", 0: "one scale"}.get(self.group_size, f"groups of {self.group_size} columns")
        return f"{self.bits} bits, {size}{', zero points' * self.has_zeros}"


def schemes_of(values: Mapping[str, Any], source: str) -> tuple[Scheme, ...]:
    """The settings of all groups.

    Raises:
        ConfigError: some that are not read here, by all keys that say so.
    """
    if problems := [f"{source}.{problem}" for problem in _problems(values)]:
        raise ConfigError(problems)
    if unknown := [key for key in values if key not in (*READ, *OFF, *IRRELEVANT)]:
        milestone_once(f"{source}: keys that are unknown and ignored: {', '.join(unknown)}")
    return tuple(dict.fromkeys(_scheme(group["weights"]) for group in values["config_groups"].values()))


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    kind = values.get("format")
    if kind not in (*FORMATS, SEVERAL):
        yield f"format is {kind!r}; only {', '.join(FORMATS)} are read: {INSTEAD}"
    if (status := values.get("quantization_status", "compressed")) not in STATUSES:
        yield f"quantization_status is {status!r}; only {', '.join(STATUSES)} are read: {INSTEAD}"
    for key in OFF:
        if not _is_off(values.get(key)):
            yield f"{key} is {str(values[key])[:100]}, which is not read: {INSTEAD}"
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        yield f"config_groups is {str(groups)[:100]}; it must map names to settings of matrices"
        return
    for name, group in groups.items():
        at = f"config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            yield f"{at} is {str(group)[:100]}; it must have settings of `weights`"
            continue
        yield from (f"{at}.{problem}" for problem in _problems_of(group, needs_format=kind == SEVERAL))


def _is_off(value: Any) -> bool:
    """Whether a value is none, empty, or says that matrices are dense."""
    if isinstance(value, Mapping):
        return all(_is_off(each) for key, each in value.items() if key not in ("ignore", "targets"))
    return value in (None, False, "dense") or value == []


def _problems_of(group: Mapping[str, Any], needs_format: bool) -> Iterator[str]:
    kind, weights = group.get("format"), group["weights"]
    if (kind is not None or needs_format) and kind not in FORMATS:
        yield f"format is {kind!r}; only {', '.join(FORMATS)} are read: {INSTEAD}"
    if group.get("output_activations") is not None:
        yield f"output_activations are rounded, which is not computed: {INSTEAD}"
    if (given := group.get("input_activations")) is not None:
        given = given if isinstance(given, Mapping) else {}
        others = {**PER_TOKEN, **{key: given[key] for key in PER_TOKEN if key in given}}
        others |= {key: given.get(key) for key in ("strategy", "dynamic")}
        for key in PER_TOKEN:
            if others[key] != PER_TOKEN[key]:
                yield (
                    f"input_activations.{key} is {others[key]!r}; activations are rounded to int8, each token by itself "
                    f"({key} {PER_TOKEN[key]!r}), or not at all: {INSTEAD}"
                )
    if str(weights.get("type", "int")).lower() != "int":
        yield f"weights.type is {weights['type']!r}; only int is read: {INSTEAD}"
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    if bits not in (4, 8) or isinstance(bits, bool):
        yield f"weights.num_bits is {bits!r}; only 4 and 8 are read: {INSTEAD}"
    if weights.get("dynamic"):
        yield f"weights.dynamic is {weights['dynamic']!r}; scales must be stored: {INSTEAD}"
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1)):
        yield f"weights.group_size is {size!r}; it must be the number of columns of a group, or -1"
    elif (strategy := _strategy(weights)) not in ("tensor", "channel", "group") or (
        strategy == "group" and (size or 0) < 1
    ):
        yield f"weights.strategy is {strategy!r} with group_size {size!r}; only tensor, channel and group are read: {INSTEAD}"


def _strategy(weights: Mapping[str, Any]) -> str:
    """Find what shares a scale; without the key, as the size of groups says."""
    if given := weights.get("strategy"):
        return str(given).lower()
    size = weights.get("group_size")
    return "tensor" if size is None else "group" if size > 0 else "channel"


def _scheme(weights: Mapping[str, Any]) -> Scheme:
    strategy = _strategy(weights)
    size = weights["group_size"] if strategy == "group" else {"tensor": 0, "channel": -1}[strategy]
    return Scheme(weights.get("num_bits", 8), size, not weights.get("symmetric", True))
