# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters with a learning rate factor or a weight decay of their own, and frozen ones, chosen by patterns.

parameter_groups:
  - {match: "*.bias", weight_decay: 0}
  - {match: "embedding.*", learning_rate_factor: 0.1}
  - {match: "layers.0.*", freeze: true}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.numbers import NotNegative, Positive
from sporeloom.core.reader import fields_from, read_yaml


@dataclass(frozen=True)
class ParameterGroup:
    """One entry of the file. Of a setting that it leaves out, an earlier group or the command line decides."""

    match: str
    """Pattern of parameter names as a checkpoint has them; `*` stands for any characters."""
    learning_rate_factor: Positive | None = None
    weight_decay: NotNegative | None = None
    freeze: bool | None = None


@dataclass(frozen=True)
class GroupsFile:
    """Contents of the file."""

    parameter_groups: list[ParameterGroup]


class Scales(NamedTuple):
    """Settings of trained parameters, in their order."""

    factors: tuple[float, ...]
    """Factors of the learning rate."""
    decays: tuple[float | None, ...]
    """Weight decays; None: the optimizer's own for this parameter."""

    def decays_or(self, own: Sequence[float]) -> tuple[float, ...]:
        """Weight decays; `own` where a group gives none."""
        return tuple(float(o if d is None else d) for d, o in zip(self.decays, own, strict=True))

    def of(self, places: Sequence[int]) -> Scales:
        """Settings of the parameters at these places."""
        return Scales(tuple(self.factors[i] for i in places), tuple(self.decays[i] for i in places))


@dataclass(frozen=True)
class ParameterGroups:
    """The groups of a run and the names of its trained parameters. A later group takes precedence."""

    groups: tuple[ParameterGroup, ...]
    names: tuple[str, ...]

    def of(self, name: str, setting: str) -> Any:
        """Value of a setting for a parameter; None where no group gives one."""
        found = (getattr(group, setting) for group in reversed(self.groups) if fnmatchcase(name, group.match))
        return next((value for value in found if value is not None), None)

    @property
    def frozen_names(self) -> list[str]:
        """Names of the parameters that are not trained."""
        return [name for name in self.names if self.of(name, "freeze")]

    def scales(self, names: Sequence[str]) -> Scales:
        """Settings of these parameters, for an optimizer."""
        factors = (self.of(name, "learning_rate_factor") for name in names)
        decays = tuple(self.of(name, "weight_decay") for name in names)
        return Scales(tuple(1.0 if factor is None else float(factor) for factor in factors), decays)

    def settings(self) -> list[dict[str, Any]]:
        """The groups as JSON, which a resumed run must have in common."""
        return [
            {name: value for name, value in dataclasses.asdict(group).items() if value is not None}
            for group in self.groups
        ]


def read_groups(path: Path, names: Sequence[str], first: Sequence[ParameterGroup] = ()) -> ParameterGroups:
    """Read groups of the parameters `names`, which come after those in `first`.

    Raises:
        ConfigError: the file is wrong, a pattern matches nothing, a group changes nothing, or nothing is left to train.
    """
    document = read_yaml(path)
    given = fields_from(GroupsFile, document).parameter_groups
    groups, problems = ParameterGroups((*first, *given), tuple(names)), []
    for number, group in enumerate(given):
        where = document.at(("parameter_groups", number))
        if not any(fnmatchcase(name, group.match) for name in names):
            problems.append(f"{where}: {group.match} matches no trained parameter{did_you_mean(group.match, names)}")
        scaled = [n for n in ("learning_rate_factor", "weight_decay") if getattr(group, n) is not None]
        if group.freeze and scaled:
            problems.append(f"{where}: {group.match} is frozen, so {scaled[0]} has no effect; leave one out")
        elif group.freeze is None and not scaled:
            problems.append(
                f"{where}: {group.match} changes nothing; give learning_rate_factor, weight_decay or freeze"
            )
    if not problems and len(groups.frozen_names) == len(names):
        problems.append(f"{path}: all parameters are frozen, so there is nothing to train")
    if problems:
        raise ConfigError(problems)
    return groups
