# SPDX-License-Identifier: Apache-2.0
"""Find a model family by name: a top-level package with config.py, model.py, weights.py and tokenizer.py."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mindloom.errors import ConfigError, did_you_mean
from mindloom.model_config import DecoderConfig

FAMILIES = ("pangu", "codegeex")


def family_module(family: str, part: str) -> Any:
    """`part` (config, model, weights, tokenizer) of a family.

    Raises:
        ConfigError: there is no such family.
    """
    if family not in FAMILIES or find_spec(family) is None:
        raise ConfigError(f"--model {family} is unknown{did_you_mean(family, FAMILIES)}; known: {', '.join(FAMILIES)}")
    module: ModuleType = import_module(f"{family}.{part}")
    return module


def size_config(family: str, size: str) -> DecoderConfig:
    """The configuration of a published size.

    Raises:
        ConfigError: there is no such family or size.
    """
    sizes = family_module(family, "config").SIZES
    if size not in sizes:
        raise ConfigError(f"--size {size} is unknown{did_you_mean(size, sizes)}; {family} has: {', '.join(sizes)}")
    return sizes[size]
