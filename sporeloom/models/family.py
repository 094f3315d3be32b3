# SPDX-License-Identifier: Apache-2.0
"""Find a model family by name: a top-level package with config.py, model.py, weights.py and tokenizer.py."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.models.config import AttentionKernel, ComputeDtype, ModelConfig

FAMILIES = ("pangu", "codegeex", "palm")


def family_module(family: str, part: str) -> Any:
    """Import `part` (config, model, weights, tokenizer) of a family.

    Raises:
        ConfigError: there is no such family.
    """
    if family not in FAMILIES or find_spec(family) is None:
        raise ConfigError(f"--model {family} is unknown{did_you_mean(family, FAMILIES)}; known: {', '.join(FAMILIES)}")
    module: ModuleType = import_module(f"{family}.{part}")
    return module


def size_config(family: str, size: str) -> ModelConfig:
    """The configuration of a built-in size.

    Raises:
        ConfigError: there is no such family or size.
    """
    sizes = family_module(family, "config").SIZES
    if size not in sizes:
        raise ConfigError(f"--size {size} is unknown{did_you_mean(size, sizes)}; {family} has: {', '.join(sizes)}")
    return sizes[size]


def with_precision(
    model: ModelConfig, compute_dtype: ComputeDtype | None, attention: AttentionKernel | None
) -> ModelConfig:
    """`model` with another number type or attention kernel, where one is given.

    Raises:
        ConfigError: the kernel is not for this model.
    """
    given: dict[str, Any] = {"compute_dtype": compute_dtype, "attention": attention}
    return dataclasses.replace(model, **{name: value for name, value in given.items() if value is not None})


@functools.cache
def sources_hash() -> str:
    """Hash of every source file that affects the computation: this package's and the families'."""
    digest = hashlib.sha256()
    for package in ("sporeloom", *FAMILIES):
        spec = find_spec(package)
        root = Path(spec.origin).parent if spec and spec.origin else None
        if spec and root is None and spec.submodule_search_locations:
            root = Path(next(iter(spec.submodule_search_locations)))
        if root is None:
            continue
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
