# SPDX-License-Identifier: Apache-2.0
"""Rewards from custom functions, or from servers."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sporeloom.align.reward_server import ServerLimits, is_url, server_reward
from sporeloom.core.errors import ConfigError

Reward = Callable[..., Sequence[float]]
"""Called by keywords: `prompts` and `completions`, a text each, columns of the prompts' lines, a list each, and with tools
`conversations`, a list of messages each; returns a number for each completion. One that takes `**columns` gets all there
are."""
RESERVED = ("prompts", "completions", "completion_ids", "conversations")
"""Names that no column may have: further arguments of the functions, here or in TRL."""


def load_reward(name: str, limits: ServerLimits | None = None) -> Reward:
    """Load the function that FILE.py:FUNCTION names, or make one that asks the server at an address, within `limits`.

    Raises:
        ConfigError: there is no such file or function, or the file fails.
    """
    if is_url(name):
        return server_reward(name, limits)
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not path.is_file():
        raise ConfigError(f"--reward {name}: give FILE.py:FUNCTION, where FILE.py exists")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--reward {name}: {path} fails: {type(error).__name__}: {error}") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"--reward {name}: {path} has no function {function}")
    reward: Reward = found
    return reward


def reserved_problem(column: str) -> str:
    """Describe why a column may not have a reserved name."""
    return (
        f"column {column!r} has the name of another argument of reward functions ({', '.join(RESERVED)}); give "
        f"it another name, such as reference_{column}"
    )


def rewards_of(
    name: str,
    reward: Reward,
    prompts: Sequence[str],
    completions: Sequence[str],
    lines: Sequence[Mapping[str, Any]],
    conversations: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> list[float]:
    """Call a function and check its rewards of the completions.

    Raises:
        ConfigError: it fails, needs a column that the lines do not have, or gives no number for each; a column has a
            reserved name.
    """
    if clashes := sorted({key for line in lines for key in line if key in RESERVED}):
        raise ConfigError(f"--reward {name}: {reserved_problem(clashes[0])}")
    wanted = inspect.signature(reward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in wanted.values())
    columns = {key for line in lines for key in line} - {"prompt"}
    given: dict[str, Any] = {"prompts": list(prompts), "completions": list(completions)}
    given |= {} if conversations is None else {"conversations": list(conversations)}
    given |= {key: [line.get(key) for line in lines] for key in columns if takes_all or key in wanted}
    given = given if takes_all else {key: value for key, value in given.items() if key in wanted}
    try:
        values = [float(value) for value in reward(**given)]
    except Exception as error:
        raise ConfigError(f"--reward {name}: {type(error).__name__}: {error}") from None
    if len(values) != len(completions) or not all(map(math.isfinite, values)):
        raise ConfigError(
            f"--reward {name}: returned {len(values)} numbers for {len(completions)} texts, or one that is not finite"
        )
    return values
