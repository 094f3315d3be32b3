# SPDX-License-Identifier: Apache-2.0
"""The strategy that `auto_parallel` is given: a file, settings, or "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.parallel.choose import choose
from sporeloom.runtime.environment import is_first_process, launched_processes
from sporeloom.strategy.checks import check_own_network
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_strategy, strategy_of

AUTO = "auto"
CHOSEN = Path("auto_parallel.yaml")
DEVICE_GB = 16.0
"""Default of `memory_gb`: memory in GB of a device for parameters and training state, a limit that `auto` tries to meet."""


def strategy_for(
    net: nn.Cell, strategy: str | Path | None, mesh: Mapping[str, int] | None, settings: Mapping[str, Any]
) -> Strategy:
    """Read, build or choose the strategy that `auto_parallel` is given.

    Raises:
        ConfigError: the arguments contradict each other, or it does not work for custom networks.
    """
    if (strategy is None) == (mesh is None):
        raise ConfigError("auto_parallel takes a strategy file or mesh=..., one of them")
    if strategy == AUTO:
        if unknown := settings.keys() - {"devices", "memory_gb", "out"}:
            raise ConfigError(
                f'auto_parallel(net, "auto") takes devices, memory_gb and out, not {", ".join(sorted(unknown))}'
            )
        loaded = _chosen(net, **settings)
    elif strategy is not None and settings:
        raise ConfigError(
            f"auto_parallel: {', '.join(settings)} belong into {strategy}, or give mesh=... instead of it"
        )
    else:
        loaded = load_strategy(strategy) if strategy is not None else strategy_of({"mesh": mesh, **settings})
    check_own_network(loaded)
    return loaded


def _chosen(
    net: nn.Cell, devices: int | None = None, memory_gb: float = DEVICE_GB, out: str | Path = CHOSEN
) -> Strategy:
    """Choose a strategy for `net`; the first process writes it to `out`.

    Raises:
        ConfigError: `out` exists with other content.
    """
    text, path = choose(net, devices or launched_processes(), memory_gb), Path(out)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{path}: is there already and says something else; load it with auto_parallel(net, {str(path)!r}), remove it, "
            "or give another out="
        )
    if is_first_process():
        write_text_atomically(path, text)
    return strategy_of(yaml.safe_load(text), str(path))
