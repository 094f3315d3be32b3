# SPDX-License-Identifier: Apache-2.0
"""Flags of every verb that runs a model under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.cli import option


@dataclass(frozen=True, kw_only=True)
class StrategyFlags:
    """Over what the work is spread."""

    heading: ClassVar[str] = "parallelism"
    common: ClassVar[tuple[str, ...]] = ("strategy", "launch")

    strategy: Path | None = option(None, "strategy file, or the name of a shipped one; without it, one device")
    oversubscribe: bool = option(False, "with --launch: start more processes than cores and memory are good for")
    launch: bool = option(
        False, "start the strategy's number of processes on this machine, under msrun where it has devices"
    )
