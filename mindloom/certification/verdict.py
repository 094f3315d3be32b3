# SPDX-License-Identifier: Apache-2.0
"""From a strategy to a verdict: check, prove small, compile the full size, estimate, write it all down."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindloom.certificate import (
    CERTIFIED,
    REFUSED,
    about_strategy,
    about_task,
    about_versions,
    hashes_of,
    vouched_for,
    write_certificate,
)
from mindloom.certification import full_size
from mindloom.certification.config import Certification
from mindloom.certification.page import page
from mindloom.certification.proof import LIMITS, Proof, prove, timed
from mindloom.certification.shrink import IN_PROOF, POSSIBLE_PROCESSES, small_strategies
from mindloom.errors import ConfigError
from mindloom.files import unwritable, write_text_atomically
from mindloom.log import milestone
from mindloom.shipped import shipped_or_file
from mindloom.strategy.checks import check_own_network
from mindloom.strategy.config import Strategy
from mindloom.strategy.loader import load_strategy, strategy_of

Checks = dict[str, list[str]]
"""By check: what it found wrong."""


def certify_decoder(asked: Certification) -> dict[str, Any]:
    """Carry out everything, write certificate.json and certificate.html. Returns what is in the certificate."""
    config, full = asked.config, asked.full
    seconds: dict[str, float] = {}
    subject = {
        "family": config.model,
        "strategy": str(shipped_or_file(config.strategy).resolve()),
        "num_layers": full.model.num_layers,
        "processes": config.processes,
        "accumulate": config.accumulate,
        "task": asked.small_task.about(),
    }
    milestone(f"1/4 checked: {config.model} {config.size} under {config.strategy}, {full.strategy.mesh}")
    one_device, proofs = _prove(subject, asked.small, config.out, seconds, {"model.json": asked.small_model.to_dict()})
    checks: Checks = {"strategy": [], "proof": _failures(proofs)}
    milestone(f"2/4 {_proved(proofs)} ({seconds['proof']:.0f} s)")
    values = {} if checks["proof"] else _at_full_size(asked, checks, seconds)
    vouched = vouched_for(
        config.model,
        full.model,
        full.strategy,
        full.batch_size,
        full.seq_len,
        full.config.accumulate,
        about_task(config.task, full.task.lora, full.task.has_reference, full.task.reward_model),
    )
    values |= _certificate(vouched, checks, proofs, one_device, asked.small, seconds)
    values |= {
        "subject": ", ".join(filter(None, (f"{config.model} {config.size}", full.task.describe()))),
        "strategy_file": str(config.strategy),
        "small_model": asked.small_model.to_dict(),
        "cluster": {"file": str(config.cluster), "chip": asked.cluster.chip, "memory_gb": asked.cluster.memory_gb},
    }
    return _write(config.out, values)


def _at_full_size(asked: Certification, checks: Checks, seconds: dict[str, float]) -> dict[str, Any]:
    """Compile and estimate; what is wrong goes to `checks`."""
    try:
        with timed(seconds, "full_size"):
            report = full_size.dry_run(asked)
    except ConfigError as error:
        checks["collectives"] = error.problems
        milestone(f"3/4 {error.problems[0]}")
        return {}
    expected = full_size.implied(asked.full)
    checks["collectives"] = list(full_size.differences(report, expected))
    checks["memory"] = list(full_size.memory_problems(report, asked.cluster.usable_bytes))
    ranks = ", ".join(str(rank["rank"]) for rank in report["ranks"])
    what = "; ".join([*checks["collectives"], *checks["memory"]][:1]) or "as the strategy implies, and it fits"
    milestone(f"3/4 ranks {ranks} of {asked.full.strategy.mesh.size}: {what} ({seconds['full_size']:.0f} s)")
    estimate = full_size.estimate(asked)
    known = " on runs of plain text" if asked.config.task != "pretraining" else ""
    milestone(
        f"4/4 estimated: a step of {estimate['step_time_s']:.3g} s (+-{estimate['error']['median']:.0%}{known}), "
        f"{estimate['tokens_per_s']:,.0f} tokens/s, {max(s['total'] for s in estimate['stages']) / 2**30:.1f} GB a device"
    )
    usable = {"implied": expected, "usable_bytes": asked.cluster.usable_bytes}
    return {"full_size": {**report, **usable}, "estimate": estimate}


def certify(
    network: Callable[[], Any],
    inputs: Sequence[Any],
    strategy: str | Path | None = None,
    *,
    out: str | Path,
    processes: int = 4,
    mesh: Mapping[str, int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Prove a network of your own under a strategy: small meshes with each of its axes against one device.

    Args:
        network: a class or function at the top of a Python file, called without arguments: a Cell that returns its loss.
        inputs: NumPy arrays of one batch; every step takes it. The batch is dim 0.
        strategy, mesh, settings: as of `auto_parallel`.
        out: folder for certificate.json, certificate.html and logs.
        processes: the proof may use on this machine.

    Call it under `if __name__ == "__main__":`, in a process of its own. Returns what is in the certificate; `verdict` is
    `certified` or `refused`, `reasons` says why.

    Raises:
        ConfigError: something cannot be used as given.
    """
    if (strategy is None) == (mesh is None):
        raise ConfigError("certify takes a strategy file or mesh=..., one of them")
    if os.environ.get(IN_PROOF):
        raise ConfigError(
            "certify was called while its own processes read the file: call it under `if __name__ == '__main__':`"
        )
    if processes not in POSSIBLE_PROCESSES:
        raise ConfigError(f"processes = {processes}: give one of {', '.join(map(str, POSSIBLE_PROCESSES))}")
    folder = Path(out)
    if problem := unwritable(folder):
        raise ConfigError(f"out {problem}")
    file, name = _place_of(network)
    given = {"mesh": dict(mesh), **settings} if mesh is not None else None
    large = strategy_of(given) if given else load_strategy(str(strategy))
    if large.mesh.size == 1:
        raise ConfigError(f"{large.at('mesh')}: one device needs no certificate")
    check_own_network(large)
    small = small_strategies(large, None, processes)
    _check_rows(len(inputs[0]), small)
    subject = {
        "file": str(file.resolve()),
        "name": name,
        "strategy": str(shipped_or_file(strategy).resolve()) if strategy is not None else None,
        "settings": given,
        "processes": processes,
    }
    seconds: dict[str, float] = {}
    one_device, proofs = _prove(subject, small, folder, seconds, {}, [np.asarray(array) for array in inputs])
    milestone(_proved(proofs))
    vouched = {
        "network": {"file": file.name, "name": name, "source": file.read_text(encoding="utf-8")},
        "strategy": about_strategy(large),
        "versions": about_versions(),
    }
    values = _certificate(vouched, {"strategy": [], "proof": _failures(proofs)}, proofs, one_device, small, seconds)
    values |= {"subject": f"{name} of {file.name}", "strategy_file": str(strategy or "given in Python")}
    return _write(folder, values)


def _place_of(network: Callable[[], Any]) -> tuple[Path, str]:
    """The file that has a user's network, and its name there."""
    name = getattr(network, "__qualname__", "")
    file = inspect.getsourcefile(network) if name.isidentifier() else None
    if not file:
        raise ConfigError(f"{network!r:.60}: give a class or function that stands at the top of a Python file")
    return Path(file), name


def _check_rows(rows: int, small: Sequence[Strategy]) -> None:
    for one in small:
        parts = one.mesh.dp * one.num_parts()
        if rows % parts:
            raise ConfigError(f"a batch of {rows} rows is not divisible by {parts}, which {one.mesh} needs")


def _prove(
    subject: Mapping[str, Any],
    small: Sequence[Strategy],
    out: Path,
    seconds: dict[str, float],
    files: Mapping[str, Any],
    inputs: Sequence[Any] = (),
) -> tuple[list[float], list[Proof]]:
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".proof-", dir=out))
    try:
        for name, values in {"subject.json": subject, **files}.items():
            (folder / name).write_text(json.dumps(values))
        if inputs:
            np.savez(folder / "inputs.npz", *inputs)
        with timed(seconds, "proof"):
            return prove(folder, small, out / "logs")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failures(proofs: Sequence[Proof]) -> list[str]:
    return [f"{proof.mesh}: {proof.failure}" for proof in proofs if proof.failure]


def _proved(proofs: Sequence[Proof]) -> str:
    if failures := _failures(proofs):
        return f"NOT equal to one device. {failures[0]}"
    return f"equal to one device on {', '.join(proof.mesh for proof in proofs)}"


def _certificate(
    vouched: Mapping[str, Any],
    checks: Checks,
    proofs: Sequence[Proof],
    one_device: Sequence[float],
    small: Sequence[Strategy],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    reasons = [problem for problems in checks.values() for problem in problems]
    return {
        "verdict": REFUSED if reasons else CERTIFIED,
        "reasons": reasons,
        "checks": checks,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}",
        "seconds": dict(seconds),
        "vouched_for": vouched,
        "hashes": hashes_of(vouched),
        "proof": {
            "limits": LIMITS,
            "one_device_losses": list(one_device),
            "meshes": [dataclasses.asdict(proof) for proof in proofs],
            "strategies": [about_strategy(strategy) | {"rules": "as vouched_for"} for strategy in small],
        },
    }


def _write(out: Path, values: dict[str, Any]) -> dict[str, Any]:
    write_certificate(out / "certificate.json", values)
    write_text_atomically(out / "certificate.html", page(values))
    return values
