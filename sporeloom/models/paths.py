# SPDX-License-Identifier: Apache-2.0
"""Names within a network."""

import functools
import itertools
import re


def path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern` is the end of `path`: `*` is one component of it, `up|gate` is either of two."""
    return _expression(pattern).search(path) is not None


def alternatives(pattern: str) -> list[str]:
    """The patterns without `|` that `pattern` stands for: `up|gate.matmul` for `up.matmul` and `gate.matmul`."""
    return [".".join(chosen) for chosen in itertools.product(*(part.split("|") for part in pattern.split(".")))]


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    either = "|".join(re.escape(one).replace(r"\*", "[^.]+") for one in alternatives(pattern))
    return re.compile(rf"(^|\.)({either})$")
