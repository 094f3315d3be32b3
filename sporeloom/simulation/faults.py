# SPDX-License-Identifier: Apache-2.0
"""Components of a cluster that fail, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Bounds, Count, Positive
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.core.shipped import FAULTS, shipped_or_file

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Component:
    """A kind of component, whose failures are independent and equally likely at any time."""

    name: str
    per: Literal["device", "server", "group", "job"]
    """Unit that has one of these. A failure of a device or server takes its server out of the job, one of a group all of its
    servers at once."""
    mtbf_hours: Positive
    """Mean time between the failures of one of them."""
    servers: Count | None = None
    """Servers of a group, such as those behind a switch or in a rack."""
    slowdown: Annotated[float, Bounds(1)] = 1.0
    """Above 1: it does not fail but becomes slow. Steps, which wait for the slowest rank, take so many times as long until
    its server is replaced."""

    def __post_init__(self) -> None:
        if (self.per == "group") != (self.servers is not None):
            raise ConfigError(
                f"components: {self.name}: give `servers`, their number, with `per: group` and only there"
            )
        if self.slowdown > 1 and self.per == "job":
            raise ConfigError(f"components: {self.name}: nothing replaces what is slow of a job; leave `slowdown` out")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The components of a cluster."""

    components: list[Component]

    def __post_init__(self) -> None:
        names = [each.name for each in self.components]
        if not names or len(set(names)) < len(names):
            raise ConfigError("components: name at least one, and each once")


@dataclass(frozen=True)
class FaultRates:
    """Failures a second of all components of a job."""

    names: Sequence[str]
    of_servers: Sequence[float]
    """Rate of each component that one server adds."""
    of_job: Sequence[float]
    """Rate of each component that does not depend on the number of servers."""
    num_taken: Sequence[int]
    """Servers that a failure of each component takes out of the job."""
    slowdowns: Sequence[float]
    """Factor of the time of a step after it; 1: the job is interrupted instead."""

    @classmethod
    def of(cls, faults: Faults, devices_per_server: int) -> FaultRates:
        counts = {"device": devices_per_server, "server": 1, "group": 1, "job": 0}
        rates = [1 / (each.mtbf_hours * HOUR_S) for each in faults.components]
        return cls(
            [each.name for each in faults.components],
            [
                rate * counts[each.per] / (each.servers or 1)
                for rate, each in zip(rates, faults.components, strict=True)
            ],
            [rate if each.per == "job" else 0.0 for rate, each in zip(rates, faults.components, strict=True)],
            [0 if each.per == "job" else each.servers or 1 for each in faults.components],
            [each.slowdown for each in faults.components],
        )

    @property
    def has_slow(self) -> bool:
        return any(slowdown > 1 for slowdown in self.slowdowns)

    def per_second(self, num_servers: int, slow: bool = False) -> list[float]:
        """Rate of each component in a job on so many servers; 0 for those that become slow, or with `slow` for the others."""
        rates = zip(self.of_servers, self.of_job, self.slowdowns, strict=True)
        return [(server * num_servers + job) * ((slowdown > 1) == slow) for server, job, slowdown in rates]


def read_faults(path: Path) -> Faults:
    """Load a file of components, or the built-in one of that name.

    Raises:
        ConfigError: unreadable, or a key that is unknown, missing or wrong.
    """
    return fields_from(Faults, read_yaml(shipped_or_file(path, FAULTS)))
