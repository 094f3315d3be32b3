# SPDX-License-Identifier: Apache-2.0
"""Parallelism as configuration: `auto_parallel(net, "strategy.yaml")`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindloom.runtime.auto_parallel import auto_parallel

__all__ = ["__version__", "auto_parallel"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "auto_parallel":  # loads MindSpore, which strategies and plans do without
        return import_module("mindloom.runtime.auto_parallel").auto_parallel
    raise AttributeError(f"module {__name__} has no attribute {name}")
