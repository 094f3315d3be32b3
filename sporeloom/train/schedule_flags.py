# SPDX-License-Identifier: Apache-2.0
"""Flags of the learning rate schedule, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, Probability, as_flag
from sporeloom.train.schedules import DecayShape, Schedule, ScheduleOptions, wsd_decay_start

OPTIONS: dict[Schedule, tuple[str, ...]] = {
    "wsd": ("decay_fraction", "decay_shape"),
    "polynomial": ("polynomial_power",),
    "cosine-restarts": ("restart_cycles",),
}
"""Flags that one schedule alone has."""
AFTER_WARMUP: tuple[Schedule, ...] = ("linear", "polynomial", "cosine-restarts", "wsd")
"""Schedules whose decay begins at the end of the warm-up or later."""


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """The learning rate schedule."""

    heading: ClassVar[str] = "learning rate schedule"

    schedule: Schedule = option(
        "cosine",
        "learning rate schedule after the warm-up: cosine, linear, polynomial, cosine-restarts, constant, wsd (constant, "
        "then a decay), or inverse-sqrt, which is PaLM's: constant until --decay-steps, then 1/sqrt(step)",
    )
    min_learning_rate: NotNegative | None = option(
        None, "minimum learning rate: the end of the decay, or a lower bound (default: the family's for this size)"
    )
    warmup_steps: Natural | None = option(
        None, "number of linear warm-up steps (default: a tenth of the run, at most 2000)"
    )
    decay_steps: Count | None = option(
        None, "step at which the decay ends, or the 1/sqrt(step) decay begins (default: the last step of the run)"
    )
    decay_fraction: Probability | None = option(
        None, "fraction of --decay-steps, at their end, in which the rate of wsd decays (default: 0.1)"
    )
    decay_shape: DecayShape | None = option(None, "shape of that decay (default: linear)")
    polynomial_power: Positive | None = option(None, "power of the polynomial schedule (default: 2)")
    restart_cycles: Count | None = option(None, "number of equal cycles of cosine-restarts (default: 2)")

    def schedule_options(self) -> ScheduleOptions:
        """Settings of the schedule besides rates and steps."""
        names = {"polynomial_power": "power", "restart_cycles": "cycles"}
        given: dict[str, Any] = {name: getattr(self, name) for flags in OPTIONS.values() for name in flags}
        return ScheduleOptions(**{names.get(n, n): value for n, value in given.items() if value is not None})

    def schedule_settings(self) -> dict[str, Any]:
        """Settings that a resumed run must have in common with the one before."""
        names = {"polynomial_power": "power", "restart_cycles": "cycles"}
        options = self.schedule_options()
        own = {name: getattr(options, names.get(name, name)) for name in OPTIONS.get(self.schedule, ())}
        return {"schedule": self.schedule, **own}

    def schedule_problems(self) -> Iterator[str]:
        """List flags that the schedule does not have."""
        for schedule, flags in OPTIONS.items():
            for name in flags:
                if schedule != self.schedule and (value := getattr(self, name)) is not None:
                    yield f"{as_flag(name)} {value}: of --schedule {schedule} alone, not {self.schedule}; leave it out"
        for name in ("decay_steps", "min_learning_rate") if self.schedule == "constant" else ():
            if (value := getattr(self, name)) is not None:
                yield f"{as_flag(name)} {value}: --schedule constant never decays; leave it out, or choose wsd"

    def schedule_step_problems(self, high: float, low: float, warmup_steps: int, decay_steps: int) -> Iterator[str]:
        """Check the numbers that the schedule ends up with, defaults included."""
        if self.min_learning_rate is not None and low > high:
            yield f"--min-learning-rate {low:g} is above the maximum, --learning-rate {high:g}"
        if self.schedule not in AFTER_WARMUP:
            return
        if warmup_steps >= decay_steps:
            yield (
                f"--schedule {self.schedule}: the warm-up of {warmup_steps} steps leaves none to decay until step "
                f"{decay_steps}; lower --warmup-steps, or raise --decay-steps"
            )
            return
        options = self.schedule_options()
        if self.schedule == "wsd" and wsd_decay_start(decay_steps, options.decay_fraction) < warmup_steps:
            yield (
                f"--decay-fraction {options.decay_fraction:g}: a decay over that much of {decay_steps} steps begins within "
                f"the warm-up of {warmup_steps}; lower either"
            )
        if self.schedule == "cosine-restarts" and options.cycles > decay_steps - warmup_steps:
            yield (
                f"--restart-cycles {options.cycles}: more than the {decay_steps - warmup_steps} steps after the warm-up; "
                "lower it"
            )
