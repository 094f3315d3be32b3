# SPDX-License-Identifier: Apache-2.0
"""Flags about the figures of a run: what they are relative to, where they go, and which steps are profiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.errors import Problems, did_you_mean
from sporeloom.core.numbers import parse_ranges
from sporeloom.planner.cluster import chips
from sporeloom.train.flags import RunFlags
from sporeloom.train.trackers import TrackerName, missing_packages

NAME = re.compile(r"[\w+=,@-][\w.+=,@-]{0,127}")
PROJECT = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class TrackingFlags:
    """The chip that figures are relative to, and the trackers that get them."""

    heading: ClassVar[str] = "tracking"

    chip: str | None = option(
        None,
        "chip of the devices, such as ascend910b, whose peak FLOP/s of 16-bit products MFU and HFU are relative to "
        "(default: unknown, no MFU)",
    )

    tracker: tuple[TrackerName, ...] = option(
        (),
        "experiment trackers that get the metrics besides TensorBoard: wandb, mlflow, swanlab or trackio; the logging "
        "rank reports to them (default: none)",
    )
    run_name: str | None = option(
        None, "name of the run in TensorBoard and trackers (default: the name of the output folder)"
    )
    project: str | None = option(None, "project of the run in trackers (default: sporeloom)")
    predicted: Path | None = option(
        None,
        "report of `sporeloom dry-run --time --json` of this job, whose predicted step time is written next to the measured "
        "one (default: none)",
    )
    profile: str | None = option(
        None,
        "steps to profile, as 11-13 or 11: CPU processes write one Chrome trace of all ranks to profile.json of the output "
        "folder, devices what MindSpore's profiler writes (default: none)",
    )

    def profiled_steps(self) -> range | None:
        """The steps of `--profile`.

        Raises:
            ConfigError: it names none.
        """
        return parse_ranges("--profile", [self.profile], "steps")[0] if self.profile else None

    def tracking_problems(self) -> Iterator[str]:
        """List the problems of these flags."""
        if self.chip is not None and self.chip not in chips():
            yield (
                f"--chip {self.chip}: not known{did_you_mean(self.chip, chips())}; known: {', '.join(chips())}; "
                "without the flag there is no MFU"
            )
        problems = Problems()
        steps, last = problems.of(self.profiled_steps), self.steps if isinstance(self, RunFlags) else 0
        yield from problems
        if steps and steps[-1] > last:
            yield f"--profile {self.profile}: the run has {last} steps; give some of those"
        yield from missing_packages(self.tracker)
        if len(set(self.tracker)) < len(self.tracker):
            yield f"--tracker {' '.join(self.tracker)}: a tracker twice"
        if self.project is not None and not self.tracker:
            yield f"--project {self.project}: only trackers have projects; give --tracker, too"
        if self.run_name is not None and not NAME.fullmatch(self.run_name):
            yield f"--run-name {self.run_name!r}: give letters, digits and _.+=,@- only; it names a folder"
        if self.project is not None and not PROJECT.fullmatch(self.project):
            yield f"--project {self.project!r}: give letters, digits and _.- only"
