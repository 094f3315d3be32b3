# SPDX-License-Identifier: Apache-2.0
"""A strategy for fewer devices: the same file with smaller degrees, and without the settings that these leave no use for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.reader import read_yaml
from sporeloom.core.shipped import RULES, shipped_names, shipped_or_file
from sporeloom.strategy.axes import AXES
from sporeloom.strategy.checks import divisors
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy.mesh import Mesh

KEPT_FIRST = ("tp", "cp", "pp", "ep", "dp")
"""Axes in the order in which their degrees are kept. dp, whose ranks do the same for other sequences, is reduced first: the
others determine how much of the model a device holds."""


def smaller_meshes(mesh: Mesh, devices: int) -> list[Mesh]:
    """Meshes of at most so many devices, the nearest first: that with the largest degree of the first axis of KEPT_FIRST,
    then of the second, and so on. Degrees of dp are any smaller ones, those of other axes divide the degree of `mesh`."""
    names = [axis for axis in (*mesh.order, "ep") if mesh.degree(axis) > 1]
    choices = [range(1, mesh.dp + 1) if axis == "dp" else divisors(mesh.degree(axis)) for axis in names]
    order = mesh.order if mesh.order != AXES else None
    found = [Mesh(order=order, **dict(zip(names, degrees, strict=True))) for degrees in itertools.product(*choices)]
    legal = [each for each in found if each.size <= devices]
    return sorted(legal, key=lambda each: [*map(each.degree, KEPT_FIRST)], reverse=True)


def nearest_strategy(
    path: Path, mesh: Mesh, sizes: range, problems: Callable[[Strategy], list[str]]
) -> tuple[dict[str, Any], Strategy] | None:
    """The strategy of a file on the nearest smaller mesh without problems, as the keys of a file; None: there is none.

    Args:
        path: file, or name of a built-in strategy.
        mesh: of the file.
        sizes: numbers of devices that the smaller mesh may have.
        problems: why the run cannot use a strategy.
    """
    for smaller in smaller_meshes(mesh, sizes.stop - 1):
        if smaller.size not in sizes:
            continue
        settings = settings_on(path, smaller)
        try:
            strategy = strategy_of(settings, f"{path} on {smaller}")
        except ConfigError:
            continue
        if not problems(strategy):
            return settings, strategy
    return None


def settings_on(path: Path, mesh: Mesh) -> dict[str, Any]:
    """The keys of a strategy file with the degrees of another mesh. Files that it names get absolute paths."""
    file = shipped_or_file(path)
    settings: dict[str, Any] = {**read_yaml(file).mapping}
    before = settings.get("mesh") or {}
    settings["mesh"] = {axis: mesh.degree(axis) for axis in before}
    if "rules" in settings:
        settings["rules"] = _with_absolute_base(settings["rules"], file.parent)
    pipeline = {**(settings.get("pipeline") or {})}
    if mesh.pp != before.get("pp", 1):  # lists with an entry for each stage
        pipeline.pop("stages", None)
        if "per_stage" in (settings.get("recompute") or {}):
            settings["recompute"] = {"layers": "all"}
    if "schedule" in pipeline and (file.parent / str(pipeline["schedule"])).is_file():
        pipeline["schedule"] = str((file.parent / str(pipeline["schedule"])).resolve())
    settings["pipeline"] = pipeline
    sharded = {**(settings.get("optimizer_parallel") or {})}
    if isinstance(groups := sharded.get("shard_size"), int) and groups and mesh.replicas % groups:
        del sharded["shard_size"]  # over all replicas, which takes no more memory than groups of them
        settings["optimizer_parallel"] = sharded
    useless = {
        "pipeline": mesh.pp == 1,
        "optimizer_parallel": mesh.replicas == 1,
        "sequence_parallel": mesh.tp == 1,
        "context_parallel": mesh.cp == 1,
        "engine": mesh.size == 1,
    }
    return {key: value for key, value in settings.items() if not useless.get(key, False) and value is not None}


def settings_text(settings: dict[str, Any], head: str) -> str:
    """The text of a strategy file with these keys, each on a line as JSON, which YAML includes."""
    return "\n".join([f"# {head}", *(f"{key}: {json_text(value)}" for key, value in settings.items())]) + "\n"


def _with_absolute_base(rules: Any, folder: Path) -> Any:
    if isinstance(rules, str):
        return (
            rules
            if rules in shipped_names(RULES) and not (folder / rules).is_file()
            else str((folder / rules).resolve())
        )
    if isinstance(rules, dict) and "base" in rules:
        base = rules["base"]
        return {**rules, "base": [_with_absolute_base(b, folder) for b in ([base] if isinstance(base, str) else base)]}
    return rules
