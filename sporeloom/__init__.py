# SPDX-License-Identifier: Apache-2.0
"""Parallelism as configuration: `auto_parallel(net, "strategy.yaml")`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# MindSpore reads these when it is loaded: its warnings are about its own insides, and what its analysis of a network prints
# as errors, with a C++ call stack, is the text of the exception that follows.
if os.environ.setdefault("GLOG_v", "3") == "3":  # another level shows all
    os.environ.setdefault("MS_SUBMODULE_LOG_v", "{ANALYZER:4}")

if TYPE_CHECKING:
    from sporeloom.certification.custom import certify
    from sporeloom.runtime.auto_parallel import auto_parallel, is_log_rank, own_rows
    from sporeloom.runtime.own_checkpoint import save_checkpoint

__all__ = ["__version__", "auto_parallel", "certify", "is_log_rank", "own_rows", "save_checkpoint"]
__version__ = "1.0.0"


def __getattr__(name: str) -> Any:
    if name in ("auto_parallel", "is_log_rank", "own_rows"):  # loads MindSpore, which strategies and plans do without
        return getattr(import_module("sporeloom.runtime.auto_parallel"), name)
    if name == "save_checkpoint":
        return getattr(import_module("sporeloom.runtime.own_checkpoint"), name)
    if name == "certify":
        return getattr(import_module("sporeloom.certification.custom"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
