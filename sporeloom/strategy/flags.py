# SPDX-License-Identifier: Apache-2.0
"""Flags of every command that runs a model under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.core.command_line import option

StateDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class StateFlags:
    """Number type of the optimizer's states."""

    heading: ClassVar[str] = "optimizer"

    optimizer_state_dtype: StateDtype = option(
        "float32",
        "number type of AdamW's moments and Muon's momentum; bfloat16 takes half the memory: updates are computed in "
        "float32, and the new states rounded stochastically",
    )


@dataclass(frozen=True, kw_only=True)
class StrategyFlags:
    """The strategy, and how its processes start."""

    heading: ClassVar[str] = "parallelism"
    common: ClassVar[tuple[str, ...]] = ("strategy", "launch")

    strategy: Path | None = option(None, "strategy file, or name of a built-in strategy (default: one device)")
    oversubscribe: bool = option(
        False, "with --launch: start more processes than the cores and the memory of this machine allow"
    )
    launch: bool = option(False, "start the processes of the strategy on this machine, with msrun where it has devices")
