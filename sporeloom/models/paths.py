# SPDX-License-Identifier: Apache-2.0
"""Names within a network."""

import fnmatch
import functools
import glob
import itertools
import math
import re

from sporeloom.core.errors import ConfigError

MAX_ALTERNATIVES = 1000
"""Maximum number of alternatives of one pattern."""


@functools.cache
def path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern` is the end of `path`: `*` is one component of it or some of its characters, `up|gate` is either of
    two."""
    wanted, found = _from_the_end(pattern), _from_the_end(path)
    return len(wanted) <= len(found) and all(map(_component_matches, wanted, found))


def alternatives(pattern: str) -> list[str]:
    """The patterns without `|` that `pattern` stands for: `up|gate.matmul` for `up.matmul` and `gate.matmul`.

    Raises:
        ConfigError: there are too many.
    """
    parts = [part.split("|") for part in pattern.split(".")]
    if (number := math.prod(map(len, parts))) > MAX_ALTERNATIVES:
        raise ConfigError(
            f"{pattern}: stands for {number:,} patterns; at most {MAX_ALTERNATIVES:,} can be written as one"
        )
    return [".".join(chosen) for chosen in itertools.product(*parts)]


@functools.cache
def _from_the_end(path: str) -> list[str]:
    return path.split(".")[::-1]


@functools.cache
def _component_matches(wanted: str, name: str) -> bool:
    return _expression(wanted).match(name) is not None


@functools.cache
def _expression(wanted: str) -> re.Pattern[str]:
    # fnmatch goes through a name once, however many * there are; here each stands for at least one character.
    return re.compile("|".join(fnmatch.translate(glob.escape(one).replace("[*]", "?*")) for one in wanted.split("|")))
