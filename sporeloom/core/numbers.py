# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers, declared in the type of a setting: `steps: Count`. Checked here for flags and files alike."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sporeloom.core.errors import ConfigError

MAX_COUNT = 2**31 - 1
"""Maximum of any count: MindSpore's and NumPy's shapes end there."""


def is_finite(value: float) -> bool:
    """Whether a number is none of NaN, infinity and integers that no float holds."""
    return -sys.float_info.max <= value <= sys.float_info.max


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number. NaN and infinity are always outside."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    without_high: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            is_finite(value)
            and (value > self.low if self.without_low else value >= self.low)
            and (value < self.high if self.without_high else value <= self.high)
        )

    def wanted(self, value: float) -> str:
        """Describe why a value is outside the bounds."""
        if not is_finite(value):
            return "must be a finite number"
        if self.high <= 1 and math.isfinite(self.low):
            left, right = "(" if self.without_low else "[", ")" if self.without_high else "]"
            return f"must be in {left}{self.low:g}, {self.high:g}{right}"
        if value >= self.high:
            return (
                f"must be at most {self.high:,}" if isinstance(self.high, int) else f"must be at most {self.high:,.0f}"
            )
        return f"must be {'above' if self.without_low else 'at least'} {self.low:g}"


Count = Annotated[int, Bounds(1, MAX_COUNT)]
Depth = Annotated[int, Bounds(1, 10_000)]
"""Counts of things that are visited one by one before anything is computed: layers, microbatches."""
Natural = Annotated[int, Bounds(0, MAX_COUNT)]
Amount = Annotated[int, Bounds(0, 2**53)]
"""Counts of tokens, documents or bytes, of which there may be more than 2^31."""
Seed = Annotated[int, Bounds(0, 2**64 - 1)]
Number = Annotated[float, Bounds()]
Positive = Annotated[float, Bounds(0, without_low=True)]
NotNegative = Annotated[float, Bounds(0)]
MIN_TEMPERATURE = 1e-5
"""Sampling at a lower temperature is greedy: quotients would overflow, and no other token has a relevant
probability."""
SamplingTemperature = Annotated[float, Bounds(MIN_TEMPERATURE)]
"""Temperatures of sampling, without greedy decoding."""
Share = Annotated[float, Bounds(0, 1)]
Probability = Annotated[float, Bounds(0, 1, without_low=True)]
Rate = Annotated[float, Bounds(0, 1, without_high=True)]

_DEFAULT = {int: Bounds(-MAX_COUNT, MAX_COUNT), float: Bounds()}


def number_problem(value: Any, hint: Any) -> str | None:
    """Describe why a number of type `hint`, which may be optional or each item of a tuple or list, is not valid;
    else None."""
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)[:2]
        if isinstance(bounds, Bounds) and isinstance(value, int | float) and not isinstance(value, bool):
            return None if value in bounds else bounds.wanted(value)
        return number_problem(value, kind)
    if get_origin(hint) in (types.UnionType, Union):
        found = [number_problem(value, option) for option in get_args(hint) if option is not type(None)]
        return next((problem for problem in found if problem), None)
    if get_origin(hint) in (tuple, list) and isinstance(value, tuple | list):
        return next((p for v in value if (p := number_problem(v, get_args(hint)[0]))), None)
    if hint in _DEFAULT and isinstance(value, int | float) and not isinstance(value, bool):
        return None if value in _DEFAULT[hint] else _DEFAULT[hint].wanted(value)
    return None


def as_flag(name: str) -> str:
    """Name of a field's flag."""
    return "--" + name.rstrip("_").replace("_", "-")


_annotated: dict[type, Mapping[str, Any]] = {}


def annotated_types(kind: type) -> Mapping[str, Any]:
    """Types of a dataclass's fields with their bounds. They are kept: to evaluate them takes milliseconds."""
    if kind not in _annotated:
        _annotated[kind] = get_type_hints(kind, include_extras=True)
    return _annotated[kind]


def number_problems(config: Any, shown: Callable[[str], str] = as_flag) -> Iterator[str]:
    """List every number of a dataclass that is outside its bounds. `shown`: converts the name of a field for
    users."""
    hints = annotated_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if problem := number_problem(value, hints[field.name]):
            got = " ".join(map(str, value)) if isinstance(value, tuple) else value
            yield f"{shown(field.name)} {problem}, got {got}"


def parse_ranges(flag: str, texts: Iterable[str], counted: str, least: int = 1) -> tuple[range, ...]:
    """Parse `61-80` or `61`, with both ends included.

    Args:
        counted: what the numbers are of, for messages.
        least: the first number there is.

    Raises:
        ConfigError: something else.
    """
    found, problems = [], []
    for text in texts:
        first, dash, last = text.partition("-")
        if not first.isdecimal() or not (last if dash else "1").isdecimal():
            problems.append(f"{flag} {text}: give {counted} as 61-80, or one as 61")
            continue
        begin, end = int(first), int(last if dash else first)
        if not least <= begin <= end <= MAX_COUNT:
            problems.append(f"{flag} {text}: {counted} are counted from {least}, the first one first")
        found.append(range(begin, end + 1))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def without_infinity(values: Any) -> Any:
    """JSON knows no inf and nan: they become texts."""
    if isinstance(values, Mapping):
        return {key: without_infinity(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_infinity(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values


def choice_problems(config: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in annotated_types(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            yield f"{prefix}{name} must be one of {', '.join(get_args(hint))}, got {getattr(config, name)!r}"
