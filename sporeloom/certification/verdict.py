# SPDX-License-Identifier: Apache-2.0
"""Make a certificate: check the strategy, prove it scaled down, partition the full size, estimate, write the files."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sporeloom.certification import full_size
from sporeloom.certification.config import Certification
from sporeloom.certification.page import interval_text, memory_text, page
from sporeloom.certification.power import measure
from sporeloom.certification.proof import LIMITS, Proof, prove, timed
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.log import milestone
from sporeloom.core.shipped import shipped_or_file
from sporeloom.dry_run.job_command import command_of
from sporeloom.strategy.certificate import (
    CERTIFIED,
    COVERS,
    REFUSED,
    about_strategy,
    about_task,
    covered_settings,
    hashes_of,
    write_certificate,
)
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.launching import start_lines

Checks = dict[str, list[str]]
"""Name of a check -> the problems that it found."""


def certify_decoder(certification: Certification) -> dict[str, Any]:
    """Certify a family's model. Writes certificate.json and certificate.html, and returns the contents."""
    config, full = certification.config, certification.full
    seconds: dict[str, float] = {}
    subject = {
        "family": config.model,
        "strategy": str(shipped_or_file(config.strategy).resolve()),
        "num_layers": full.model.num_layers,
        "processes": config.processes,
        "accumulate": config.accumulate,
        "task": certification.small_task.about(),
        **({"faults": config.mutate} if config.mutate else {}),
    }
    faults: dict[str, Any] | None = None
    milestone(f"1/4 checked: {config.model} {config.size} under {config.strategy}, {full.strategy.mesh}")
    with subject_folder(config.out, subject) as folder:
        (folder / "model.json").write_text(json.dumps(certification.small_model.to_dict()))
        with timed(seconds, "proof"):
            one_device, proofs = prove(folder, certification.small, config.out / "logs")
        if config.mutate and not failures_of(proofs):
            faults = measure(certification, subject, folder)
    checks: Checks = {"strategy": [], "proof": failures_of(proofs)}
    milestone(f"2/4 {proof_summary(proofs)} ({seconds['proof']:.0f} s)")
    values = {} if checks["proof"] else _at_full_size(certification, checks, seconds)
    covered = covered_settings(
        config.model,
        full.model,
        full.strategy,
        full.batch_size,
        full.seq_len,
        full.config.accumulate,
        about_task(config.task, full.task.lora, full.task.has_reference, full.task.reward_model),
    )
    values |= certificate_values(covered, checks, proofs, one_device, certification.small, seconds)
    cluster = certification.cluster
    values |= {
        "subject": ", ".join(filter(None, (f"{config.model} {config.size}", full.task.describe()))),
        "strategy_file": str(config.strategy),
        "run": _start(certification),
        "small_model": certification.small_model.to_dict(),
        "cluster": {"file": str(config.cluster), "chip": cluster.chip, "memory_gb": cluster.memory_gb},
        **({"faults": faults} if faults else {}),
    }
    return write(config.out, values)


def _start(certification: Certification) -> list[str]:
    """Lines with the command that runs what is certified, and refuses to run anything else."""
    config, full = certification.config, certification.full
    words = [*command_of(full), "--certificate", str(config.out / "certificate.json")]
    return start_lines(words, str(config.strategy), full.strategy.mesh.size, full.config.devices_per_server)


def _at_full_size(certification: Certification, checks: Checks, seconds: dict[str, float]) -> dict[str, Any]:
    """Partition and estimate the full size. Problems are added to `checks`."""
    try:
        with timed(seconds, "full_size"):
            report = full_size.dry_run(certification)
    except ConfigError as error:
        if isinstance(error.__context__, BrokenProcessPool):  # for lack of memory here: says nothing about the strategy
            raise
        checks["shards"] = error.problems
        milestone(f"3/4 {error.problems[0]}")
        return {}
    usable_bytes = certification.cluster.usable_bytes
    checks["shards"] = list(full_size.group_problems(report["ranks"]))
    checks["memory"] = list(full_size.memory_problems(report, usable_bytes))
    ranks = ", ".join(str(rank["rank"]) for rank in report["ranks"])
    result = "; ".join([*checks["shards"], *checks["memory"]][:1]) or "shards are those of the rules, and it fits"
    milestone(f"3/4 ranks {ranks} of {certification.full.strategy.mesh.size}: {result} ({seconds['full_size']:.0f} s)")
    estimate = full_size.estimate(certification)
    milestone(
        f"4/4 estimated: a step of {estimate['step_time_s']:.3g} s ({interval_text(estimate)}), "
        f"{estimate['tokens_per_s']:,.0f} tokens/s, {memory_text(estimate)}"
    )
    return {"full_size": {**report, "usable_bytes": usable_bytes}, "estimate": estimate}


@contextlib.contextmanager
def subject_folder(out: Path, subject: Mapping[str, Any]) -> Iterator[Path]:
    """Make a temporary folder for the subject of a proof and the results of its processes."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".proof-", dir=out))
    try:
        (folder / "subject.json").write_text(json.dumps(subject))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def failures_of(proofs: Sequence[Proof]) -> list[str]:
    """List the failures, each with its mesh."""
    return [f"{proof.mesh}: {proof.failure}" for proof in proofs if proof.failure]


def proof_summary(proofs: Sequence[Proof]) -> str:
    """Summarize the proofs in one line."""
    if failures := failures_of(proofs):
        return f"NOT equal to one device. {failures[0]}"
    return f"equal to one device on {', '.join(proof.mesh for proof in proofs)}"


def certificate_values(
    covered: Mapping[str, Any],
    checks: Checks,
    proofs: Sequence[Proof],
    one_device: Sequence[float],
    small: Sequence[Strategy],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Assemble the contents that all certificates have."""
    reasons = [problem for problems in checks.values() for problem in problems]
    return {
        "verdict": REFUSED if reasons else CERTIFIED,
        "reasons": reasons,
        "checks": checks,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}",
        "seconds": dict(seconds),
        COVERS: covered,
        "hashes": hashes_of(covered),
        "proof": {
            "limits": LIMITS,
            "one_device_losses": list(one_device),
            "meshes": [dataclasses.asdict(proof) for proof in proofs],
            "strategies": [about_strategy(strategy) | {"rules": "as in `covers`"} for strategy in small],
        },
    }


def write(out: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Write certificate.json and certificate.html to a folder."""
    write_certificate(out / "certificate.json", values)
    write_text_atomically(out / "certificate.html", page(values))
    return values
