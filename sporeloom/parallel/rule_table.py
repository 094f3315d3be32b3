# SPDX-License-Identifier: Apache-2.0
"""The rules of a strategy, matched with the operators of a network: once, for layouts, checks, the report and `explain`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sporeloom.models.paths import alternatives, path_matches
from sporeloom.strategy.config import Rule
from sporeloom.strategy.layout import Layout

if TYPE_CHECKING:  # it loads MindSpore
    from sporeloom.parallel.operators import Operator, ParameterUse


@dataclass(frozen=True)
class RuleTable:
    """The rules of each operator of a network, and the parameters that operators use."""

    operators: tuple[Operator, ...] = ()
    uses: tuple[ParameterUse, ...] = ()
    rules: tuple[Rule, ...] = ()
    """In the mesh's own axes."""
    written: tuple[Rule, ...] = ()
    """The same rules as the strategy has them."""
    matches: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Path of an operator -> its rules, by position; the last one applies. Operators without rules are left out."""

    def rule(self, path: str) -> Rule | None:
        """The rule that applies to an operator."""
        return self.rules[self.matches[path][-1]] if path in self.matches else None

    @functools.cached_property
    def owners(self) -> dict[str, Rule]:
        """Path of an operator -> the rule that applies."""
        return {path: self.rules[positions[-1]] for path, positions in self.matches.items()}

    def written_rules(self, path: str) -> list[Rule]:
        """All rules that match an operator, as written; the last one applies."""
        return [self.written[position] for position in self.matches.get(path, ())]

    @functools.cached_property
    def used_layouts(self) -> dict[str, tuple[ParameterUse, Layout, Rule]]:
        """Parameter -> its first use that a rule has a layout for, with layout and rule."""
        found: dict[str, tuple[ParameterUse, Layout, Rule]] = {}
        for use in self.uses:
            rule = self.rule(use.operator.path)
            if rule and (layout := use.layout(rule)) is not None:
                found.setdefault(use.parameter.name, (use, layout, rule))
        return found

    @functools.cached_property
    def paths(self) -> list[list[str]]:
        """Paths of the operators that each rule matches."""
        found: list[list[str]] = [[] for _ in self.rules]
        for path, positions in self.matches.items():
            for position in positions:
                found[position].append(path)
        return found

    def incomplete(self) -> list[tuple[Rule, str]]:
        """Rules that are not optional, each with the first of its alternatives that matches no operator."""
        return [
            (rule, missing[0])
            for rule, paths in zip(self.rules, self.paths, strict=True)
            if not rule.optional and (missing := _without_match(rule.pattern, paths))
        ]

    def unused(self) -> list[Rule]:
        """Optional rules that match no operator."""
        return [rule for rule, paths in zip(self.rules, self.paths, strict=True) if rule.optional and not paths]


def _without_match(pattern: str, paths: Sequence[str]) -> list[str]:
    """The alternatives of a pattern that match none of the paths that the pattern matches."""
    some = alternatives(pattern)
    if len(some) == 1:
        return [] if paths else some
    return [one for one in some if not any(path_matches(one, path) for path in paths)]


def match_rules(
    operators: Sequence[Operator], uses: Iterable[ParameterUse], written: Sequence[Rule], resolved: Sequence[Rule]
) -> RuleTable:
    """Match the rules of a strategy with the operators of a network.

    Args:
        resolved: the same rules in the mesh's own axes (see `sharding.with_parts_of_axes`).
    """
    ends = [rule.pattern.rpartition(".")[2] for rule in written]

    @functools.cache
    def with_end(attribute: str) -> list[tuple[int, Rule]]:
        return [(i, rule) for i, rule in enumerate(written) if path_matches(ends[i], attribute)]

    matches = {
        operator.path: positions
        for operator in operators
        if (
            positions := tuple(
                i for i, rule in with_end(operator.attribute) if path_matches(rule.pattern, operator.path)
            )
        )
    }
    return RuleTable(tuple(operators), tuple(uses), tuple(resolved), tuple(written), matches)
