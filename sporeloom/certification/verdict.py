# SPDX-License-Identifier: Apache-2.0
"""From a strategy to a verdict: check, prove small, compile the full size, estimate, write it all down."""

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
from pathlib import Path
from typing import Any

from sporeloom.certificate import (
    CERTIFIED,
    REFUSED,
    about_strategy,
    about_task,
    hashes_of,
    vouched_for,
    write_certificate,
)
from sporeloom.certification import full_size
from sporeloom.certification.config import Certification
from sporeloom.certification.page import interval_text, page
from sporeloom.certification.proof import LIMITS, Proof, prove, timed
from sporeloom.errors import ConfigError
from sporeloom.files import write_text_atomically
from sporeloom.log import milestone
from sporeloom.shipped import shipped_or_file
from sporeloom.strategy.config import Strategy

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
    with subject_folder(config.out, subject) as folder:
        (folder / "model.json").write_text(json.dumps(asked.small_model.to_dict()))
        with timed(seconds, "proof"):
            one_device, proofs = prove(folder, asked.small, config.out / "logs")
    checks: Checks = {"strategy": [], "proof": failures_of(proofs)}
    milestone(f"2/4 {told_of(proofs)} ({seconds['proof']:.0f} s)")
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
    values |= certificate_values(vouched, checks, proofs, one_device, asked.small, seconds)
    values |= {
        "subject": ", ".join(filter(None, (f"{config.model} {config.size}", full.task.describe()))),
        "strategy_file": str(config.strategy),
        "small_model": asked.small_model.to_dict(),
        "cluster": {"file": str(config.cluster), "chip": asked.cluster.chip, "memory_gb": asked.cluster.memory_gb},
    }
    return write(config.out, values)


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
    milestone(
        f"4/4 estimated: a step of {estimate['step_time_s']:.3g} s ({interval_text(estimate)}), "
        f"{estimate['tokens_per_s']:,.0f} tokens/s, {max(s['total'] for s in estimate['stages']) / 2**30:.1f} GB a device"
    )
    compared = asked.full.strategy.engine != "spmd"  # the closed formulas are of MindSpore's partitioner
    usable = {"implied": expected if compared else None, "usable_bytes": asked.cluster.usable_bytes}
    return {"full_size": {**report, **usable}, "estimate": estimate}


@contextlib.contextmanager
def subject_folder(out: Path, subject: Mapping[str, Any]) -> Iterator[Path]:
    """Where processes of a proof find what they train, and leave what came out; gone afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".proof-", dir=out))
    try:
        (folder / "subject.json").write_text(json.dumps(subject))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def failures_of(proofs: Sequence[Proof]) -> list[str]:
    return [f"{proof.mesh}: {proof.failure}" for proof in proofs if proof.failure]


def told_of(proofs: Sequence[Proof]) -> str:
    if failures := failures_of(proofs):
        return f"NOT equal to one device. {failures[0]}"
    return f"equal to one device on {', '.join(proof.mesh for proof in proofs)}"


def certificate_values(
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


def write(out: Path, values: dict[str, Any]) -> dict[str, Any]:
    write_certificate(out / "certificate.json", values)
    write_text_atomically(out / "certificate.html", page(values))
    return values
