# SPDX-License-Identifier: Apache-2.0
"""Settings of `sporeloom calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sporeloom.core.command_line import Overwrite, option, output
from sporeloom.core.errors import Problems
from sporeloom.core.files import unwritable
from sporeloom.core.numbers import Count, number_problems
from sporeloom.runtime.environment import devices, launched_processes
from sporeloom.runtime.launch import free_memory_gb, too_many


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Overwrite):
    out: Path = output(..., "cluster file to write")
    launch: Count = option(1, "most processes that run at once; half as many, a quarter, ... are measured as well")
    quick: bool = option(False, "fewer operators, sizes and repeats: seconds instead of minutes, and larger errors")
    oversubscribe: bool = option(False, "more processes than this machine's cores and memory are good for")

    @property
    def levels(self) -> list[int]:
        """Numbers of processes that are measured, the smallest first."""
        found = [self.launch]
        while found[-1] > 1:
            found.append(found[-1] // 2)
        return found[::-1]


def check(config: CalibrateConfig) -> CalibrateConfig:
    """Raises:
    ConfigError: all that prevents a calibration.
    """
    problems = Problems(number_problems(config))
    if config.out.suffix not in (".yaml", ".yml"):
        problems.append(f"--out {config.out}: cluster files are YAML: name it {config.out.with_suffix('.yaml')}")
    if problem := unwritable(config.out.resolve().parent):
        problems.append(f"--out {problem}")
    elif config.out.is_dir():
        problems.append(f"--out {config.out}: a folder, which no file replaces; choose another name")
    for kind, file in devices().items():
        problems.append(
            f"{file}: calibrate measures CPU processes, and {kind} is what training uses on this machine; take a built-in "
            "cluster, or write what you measure into the `efficiency` of a cluster file"
        )
    if free_memory_gb() is None:
        problems.append(
            "/proc/meminfo: does not say how much memory is free, which a cluster file must; calibrate on Linux"
        )
    if launched_processes() > 1:
        problems.append("calibrate starts its processes itself: give it --launch N in place of msrun")
    if config.launch > 1 and not config.oversubscribe and (problem := too_many(config.launch)):
        problems.append(problem)
    problems.raise_if_any()
    return config
