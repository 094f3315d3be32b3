# SPDX-License-Identifier: Apache-2.0
"""Run a search: score, simulate, certify, write. A folder continues a search with the same inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import milestone
from sporeloom.core.reader import read_json
from sporeloom.strategy_search.certified import certify_front
from sporeloom.strategy_search.folders import INPUTS, check_folder
from sporeloom.strategy_search.goodput import goodput
from sporeloom.strategy_search.report import as_dict, page
from sporeloom.strategy_search.request import SearchRequest
from sporeloom.strategy_search.simulated import GB, Simulated, simulate_all
from sporeloom.strategy_search.subjects import subject_of


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the cost of a search."""

    meshes: int
    simulate: int
    certify: int
    processes: int
    """Processes of a proof."""


def tune(request: SearchRequest, limits: Limits, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Search, and write strategies, certificates, tune.json and tune.html to `out`.

    Raises:
        ConfigError: `out` has files but no search, or a search with other inputs; or nothing fits.
    """
    check_folder(out)
    _check_inputs(request, out, overwrite)
    scores = subject_of(request).scored(limits.meshes)
    milestone(f"1/3 scored {scores.num_scored:,} strategies on {scores.num_meshes} meshes, {len(scores.fitting):,} fit")
    usable = request.cluster.usable_bytes
    if not scores.fitting:
        if nearest := scores.nearest:
            raise ConfigError(
                f"nothing fits: the nearest ({nearest.name}) needs {nearest.peak_bytes / GB:.2f} GB on a device that has "
                f"{usable / GB:.1f} GB to use; give more --devices or a smaller --global-batch-size, or raise --meshes"
            )
        raise ConfigError(f"no strategy is legal on the best {limits.meshes} meshes; raise --meshes")
    simulated = [_with_goodput(request, one) for one in simulate_all(request, scores.fitting, limits.simulate, out)]
    front = certify_front(request, simulated, limits.certify, limits.processes, out, retry=overwrite)
    values = as_dict(request, scores, simulated, front)
    write_text_atomically(out / "tune.json", json_text(values, indent=1) + "\n")
    write_text_atomically(out / "tune.html", page(values))
    return values


def _with_goodput(request: SearchRequest, one: Simulated) -> Simulated:
    if not request.faults or one.problem:
        return one
    mesh, servers = one.scored.candidate.strategy.mesh, request.cluster.devices_per_node
    return replace(one, goodput=goodput(request.faults, mesh, one.seconds, servers))


def _check_inputs(request: SearchRequest, out: Path, overwrite: bool) -> None:
    """Compare the inputs with those of an earlier search in the folder, and keep them there."""
    path, about = out / INPUTS, json.loads(json_text(request.about()))
    if path.is_file() and not overwrite:
        changed = [*_changes(read_json(path).mapping, about)]
        if changed:
            raise ConfigError(
                [
                    *(f"{path}: {line}" for line in changed),
                    f"--out {out} has a search with other inputs; name another folder, or give --overwrite",
                ]
            )
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json_text(about, indent=1) + "\n")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], key: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{key}{name}.")
        elif old != new:
            yield f"{key}{name} was {json_text(old)[:80]}, is {json_text(new)[:80]}"
