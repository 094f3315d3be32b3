# SPDX-License-Identifier: Apache-2.0
"""Flags about the figures of a run: the chip that they are relative to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.errors import did_you_mean
from sporeloom.planner.cluster import chips


@dataclass(frozen=True, kw_only=True)
class TrackingFlags:
    """The chip that figures are relative to."""

    heading: ClassVar[str] = "tracking"

    chip: str | None = option(
        None,
        "chip of the devices, such as ascend910b, whose peak FLOP/s of 16-bit products MFU and HFU are relative to "
        "(default: unknown, no MFU)",
    )

    def tracking_problems(self) -> Iterator[str]:
        """List the problems of these flags."""
        if self.chip is not None and self.chip not in chips():
            yield (
                f"--chip {self.chip}: not known{did_you_mean(self.chip, chips())}; known: {', '.join(chips())}; "
                "without the flag there is no MFU"
            )
