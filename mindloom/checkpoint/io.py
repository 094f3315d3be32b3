# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: model.safetensors (whole tensors; or several files and their index), config.json (the model's),
the tokenizer."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mindloom.data.tokenizer import Tokenizer
from mindloom.errors import ConfigError
from mindloom.model_config import DecoderConfig, override, read_json_object

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def save_checkpoint(
    folder: Path,
    weights: Mapping[str, NDArray[Any]],
    family: str,
    config: DecoderConfig,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a checkpoint folder; an older one of this name is replaced only when the new one is complete."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, partial / WEIGHTS)
        (partial / CONFIG).write_text(
            json.dumps({"family": family, "model_type": family, **config.to_dict()}, indent=2) + "\n", encoding="utf-8"
        )
        if tokenizer:
            tokenizer.save(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_config(folder: Path) -> tuple[str, DecoderConfig]:
    """Model family and configuration of a checkpoint folder.

    Raises:
        ConfigError: no such folder, or a configuration that cannot be used.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such checkpoint folder")
    values = read_json_object(folder / CONFIG)
    family = str(values.pop("family", ""))
    values.pop("model_type", None)  # the family once more, for the Auto classes of MindFormers
    return family, config_from(values, str(folder / CONFIG))


def config_from(values: dict[str, Any], source: str) -> DecoderConfig:
    """A configuration from its fields alone.

    Raises:
        ConfigError: a field without default is missing, unknown or wrong.
    """
    required = [f.name for f in dataclasses.fields(DecoderConfig) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"{source}: {', '.join(missing)} missing")
    smallest = DecoderConfig(vocab_size=2**40, hidden_size=1, num_layers=1, num_heads=1)
    return override(smallest, values, source)


def load_weights(folder: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a checkpoint folder.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    weights: dict[str, NDArray[Any]] = {}
    for path in _weight_files(folder):
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        try:
            weights |= load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: damaged or not safetensors: {error}") from None
    return weights


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).exists():
        return [folder / WEIGHTS]
    index = read_json_object(folder / INDEX)
    try:
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError):
        raise ConfigError(f"{folder / INDEX}: no `weight_map` that says which file holds which tensor") from None


def check_weights(weights: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Hold tensors against the model's parameters.

    Raises:
        ConfigError: missing or unexpected names, or other shapes.
    """
    problems = [f"{source}: {name} {shape} is missing" for name, shape in shapes.items() if name not in weights]
    problems += [f"{source}: {name} is not a parameter of the model" for name in weights if name not in shapes]
    problems += [
        f"{source}: {name} is {tuple(weights[name].shape)}, the model's is {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        more = [f"{source}: and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ConfigError(problems[:8] + more)
