# SPDX-License-Identifier: Apache-2.0
"""The strategy that `auto_parallel` is given: a file, settings, or "auto"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
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
OF_AUTO = ("devices", "memory_gb", "out", "cluster", "inputs")
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
        if unknown := settings.keys() - OF_AUTO:
            raise ConfigError(
                f'auto_parallel(net, "auto") takes {", ".join(OF_AUTO)}, not {", ".join(sorted(unknown))}'
            )
        loaded = (_simulated if "cluster" in settings else _chosen)(net, **settings)
    elif strategy is not None and settings:
        raise ConfigError(
            f"auto_parallel: {', '.join(settings)} belong into {strategy}, or give mesh=... instead of it"
        )
    else:
        loaded = load_strategy(strategy) if strategy is not None else strategy_of({"mesh": mesh, **settings})
    check_own_network(loaded)
    return loaded


def _simulated(
    net: nn.Cell,
    cluster: str | Path,
    inputs: Sequence[Any] = (),
    devices: int | None = None,
    memory_gb: float | None = None,
    out: str | Path = CHOSEN,
) -> Strategy:
    """Choose the strategy whose step is the fastest on a cluster by simulation; the first process writes it to `out`. A
    choice that is there for the same network, inputs, devices and cluster is taken as it is.

    Raises:
        ConfigError: `out` exists with another choice; nothing fits; or there are no inputs.
    """
    networks = import_module("sporeloom.strategy_search.networks")  # what simulates steps lies above what runs them
    return _written(
        networks.choice(net, inputs, devices or launched_processes(), cluster, memory_gb, Path(out)), Path(out)
    )


def _chosen(
    net: nn.Cell, devices: int | None = None, memory_gb: float = DEVICE_GB, out: str | Path = CHOSEN, inputs: Any = None
) -> Strategy:
    """Choose a strategy for `net`; the first process writes it to `out`.

    Raises:
        ConfigError: `out` exists with other content, or there are inputs without a cluster.
    """
    if inputs is not None:
        raise ConfigError(
            'auto_parallel(net, "auto"): inputs are for a simulation; give cluster=..., too, or leave them out'
        )
    return _written(choose(net, devices or launched_processes(), memory_gb), Path(out))


def _written(text: str, path: Path) -> Strategy:
    """Load the text of a strategy, which the first process writes to `path`.

    Raises:
        ConfigError: `path` has other content.
    """
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{path}: is there already and says something else; load it with auto_parallel(net, {str(path)!r}), remove it, "
            "or give another out="
        )
    if is_first_process():
        write_text_atomically(path, text)
    return strategy_of(yaml.safe_load(text), str(path))
