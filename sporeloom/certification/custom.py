# SPDX-License-Identifier: Apache-2.0
"""Certify a custom network from Python."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.certification import full_size
from sporeloom.certification.proof import compile_ranks, prove, timed
from sporeloom.certification.shrink import IN_PROOF, POSSIBLE_PROCESSES, small_strategies
from sporeloom.certification.verdict import (
    Checks,
    certificate_values,
    failures_of,
    proof_summary,
    subject_folder,
    write,
)
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_utf8, unwritable
from sporeloom.core.log import milestone
from sporeloom.core.shipped import shipped_or_file
from sporeloom.dry_run.summary import GB
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.strategy.certificate import about_strategy, about_versions
from sporeloom.strategy.checks import check_own_network
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_strategy, strategy_of


def certify(
    network: Callable[[], Any],
    inputs: Sequence[Any],
    strategy: str | Path | None = None,
    *,
    out: str | Path,
    processes: int = 4,
    memory_gb: float | None = None,
    cluster: str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Certify a custom network under a strategy.

    It trains the network on small meshes with each axis of the strategy and compares it with one device. Then it partitions
    the network on the full mesh, for which it needs no device, and checks the first, the middle and the last rank. Call it
    under `if __name__ == "__main__":`, in a process of its own.

    Args:
        network: a class or function at the top of a Python file, called without arguments: a Cell that returns its loss.
        inputs: NumPy arrays of one batch, which every step takes. The batch is dim 0.
        strategy, mesh, settings: as in `auto_parallel`.
        out: folder for certificate.json, certificate.html and logs.
        processes: number of processes that the proof may use on this machine.
        memory_gb: memory of one device. A strategy that needs more for weights, gradients and AdamW's moments is refused.
        cluster: a cluster file, or the name of a built-in one. It gives `memory_gb` where that is absent, and an estimate of
            the time of a step from the work in the partitioned graphs, with nothing overlapping.

    Returns:
        The contents of the certificate. `verdict` is `certified` or `refused`; `reasons` says why.

    Raises:
        ConfigError: an argument cannot be used.
    """
    given = {"mesh": dict(mesh), **settings} if mesh is not None else None
    file, name = _source_of(network)
    return certify_file(
        file, name, inputs, strategy, Path(out), processes, given=given, memory_gb=memory_gb, cluster=cluster
    )


def certify_file(
    file: Path,
    name: str,
    inputs: Sequence[Any],
    strategy: str | Path | None,
    folder: Path,
    processes: int,
    *,
    given: dict[str, Any] | None = None,
    memory_gb: float | None = None,
    cluster: str | Path | None = None,
) -> dict[str, Any]:
    """Certify the network that `name` of a Python file makes: see `certify`.

    Args:
        given: settings of the strategy instead of its file.
    """
    large = _checked(strategy, given, folder, processes)
    chips = _cluster_of(cluster, large)
    memory_gb = chips.usable_bytes / GB if chips and memory_gb is None else memory_gb
    small = small_strategies(large, None, processes)
    _check_rows(len(inputs[0]), small)
    subject = {"file": str(file.resolve()), "name": name, "settings": given, "processes": processes}
    subject["strategy"] = str(shipped_or_file(strategy).resolve()) if strategy is not None else None
    seconds: dict[str, float] = {}
    checks: Checks = {"strategy": []}
    with subject_folder(folder, subject) as partial:
        np.savez(partial / "inputs.npz", *map(np.asarray, inputs))
        with timed(seconds, "proof"):
            one_device, proofs = prove(partial, small, folder / "logs")
        checks["proof"] = failures_of(proofs)
        milestone(proof_summary(proofs))
        ranks = _on_full_mesh(large, partial, folder / "logs", checks, seconds) if not checks["proof"] else []
    if memory_gb is not None and ranks:
        checks["memory"] = list(full_size.state_problems(ranks, memory_gb))
    values = certificate_values(covered_settings_of(file, name, large), checks, proofs, one_device, small, seconds)
    if chips and ranks and not checks["shards"]:
        values["estimate"] = estimate = full_size.custom_estimate(ranks, large, len(inputs[0]), chips)
        milestone(f"estimated: a step with {estimate['step_time_s']:.3g} s of work on {chips.chip} (no interval known)")
    about = {"ranks": ranks, "subject": f"{name} of {file.name}", "strategy_file": str(strategy or "given in Python")}
    return write(folder, values | about)


def _cluster_of(cluster: str | Path | None, strategy: Strategy) -> Cluster | None:
    """Read the cluster, if there is one.

    Raises:
        ConfigError: the mesh does not fit it.
    """
    chips = read_cluster(Path(cluster)).with_running(strategy.mesh.size) if cluster is not None else None
    if chips and (problem := chips.refuses(strategy.mesh)):
        raise ConfigError(f"{strategy.at('mesh')}: {problem}")
    return chips


def _checked(strategy: str | Path | None, given: dict[str, Any] | None, out: Path, processes: int) -> Strategy:
    """Read the strategy and validate the other arguments.

    Raises:
        ConfigError: an argument cannot be used.
    """
    if (strategy is None) == (given is None):
        raise ConfigError("certify takes a strategy file or mesh=..., one of them")
    if os.environ.get(IN_PROOF):
        raise ConfigError(
            "certify was called while its own processes read the file: call it under `if __name__ == '__main__':`"
        )
    if processes not in POSSIBLE_PROCESSES:
        raise ConfigError(f"processes = {processes}: give one of {', '.join(map(str, POSSIBLE_PROCESSES))}")
    if problem := unwritable(out):
        raise ConfigError(f"out {problem}")
    large = strategy_of(given) if given else load_strategy(str(strategy))
    if large.mesh.size == 1:
        raise ConfigError(f"{large.at('mesh')}: a certificate is for several devices")
    check_own_network(large)
    if problems := large.graph_problems():
        raise ConfigError(problems)
    return large


def covered_settings_of(file: Path, name: str, strategy: Strategy) -> dict[str, Any]:
    """Describe the settings that the certificate covers."""
    network = {"file": file.name, "name": name, "source": read_utf8(file)}
    return {"network": network, "strategy": about_strategy(strategy), "versions": about_versions()}


def _source_of(network: Callable[[], Any]) -> tuple[Path, str]:
    """Find the file of a custom network, and its name there."""
    name = getattr(network, "__qualname__", "")
    file = inspect.getsourcefile(network) if name.isidentifier() else None
    if not file:
        raise ConfigError(f"{network!r:.60}: give a class or function from the top level of a Python file")
    return Path(file), name


def _check_rows(rows: int, small: Sequence[Strategy]) -> None:
    for one in small:
        parts = one.mesh.dp * one.num_parts()
        if rows % parts:
            raise ConfigError(f"a batch of {rows} rows is not divisible by {parts}, which {one.mesh} needs")


def _on_full_mesh(
    large: Strategy, folder: Path, logs: Path, checks: Checks, seconds: dict[str, float]
) -> list[dict[str, Any]]:
    """Partition a custom network, and report its first, middle and last rank. Problems are added to `checks`."""
    mesh, chosen = large.mesh, sorted({0, large.mesh.size // 2, large.mesh.size - 1})
    with timed(seconds, "full_mesh"):
        ranks, checks["shards"] = compile_ranks(folder, chosen, logs)
    checks["shards"] += full_size.group_problems(ranks)
    result = (checks["shards"] or ["shards are those of the rules"])[0]
    milestone(f"ranks {', '.join(map(str, chosen))} of {mesh.size}: {result}")
    return ranks
