# SPDX-License-Identifier: Apache-2.0
"""Evaluation of candidates: of a family's model in processes of their own, of a custom network in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sporeloom.certification import config as certification_config
from sporeloom.certification.config import Certification, CertifyConfig
from sporeloom.certification.custom import certify_file, covered_settings_of
from sporeloom.certification.verdict import certify_decoder
from sporeloom.dry_run import config as dry_run_config
from sporeloom.dry_run import pool
from sporeloom.dry_run.config import DryRun, DryRunConfig
from sporeloom.dry_run.job_command import command_of
from sporeloom.dry_run.rank_report import StepCost
from sporeloom.planner.task import PLAIN_TEXT
from sporeloom.strategy.certificate import covered_settings
from sporeloom.strategy.launching import start_lines
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy_search.candidates import Candidate, variations
from sporeloom.strategy_search.folders import STRATEGY
from sporeloom.strategy_search.request import NetworkRequest, SearchRequest, TuneRequest
from sporeloom.strategy_search.scoring import Scored, ScoredCandidates, score


def scored(request: SearchRequest, max_meshes: int) -> ScoredCandidates:
    """All candidates that fit in closed form; for custom networks, which have none, all of them."""
    return _networks(request) if isinstance(request, NetworkRequest) else score(_family(request), max_meshes)


def variations_of(request: SearchRequest, candidate: Candidate) -> list[Candidate]:
    """Changes of a candidate that closed forms do not see."""
    return [] if isinstance(request, NetworkRequest) else variations(_family(request), candidate)


def step_cost(request: SearchRequest, candidate: Candidate, path: Path) -> StepCost:
    """Partition a candidate and simulate a step.

    Args:
        path: its strategy file.

    Raises:
        ConfigError: it cannot be partitioned, or the process that partitions was ended from outside.
    """
    if isinstance(request, NetworkRequest):
        return request.network.cost(candidate, request.cluster)
    return pool.step_cost(dry_run_config.check(_dry_run_flags(_family(request), candidate, path)))


def certify(request: SearchRequest, candidate: Candidate, folder: Path, processes: int) -> dict[str, Any]:
    """Certify the strategy file in a folder. Writes the certificate there, and returns its contents.

    Raises:
        ConfigError: it cannot be proved with so many processes.
    """
    if isinstance(request, NetworkRequest):
        job = request.job
        return certify_file(
            job.file, job.name, job.inputs, folder / STRATEGY, folder, processes, cluster=request.cluster_file
        )
    return certify_decoder(_certification(_family(request), candidate, folder, processes))


def covered(request: SearchRequest, candidate: Candidate, folder: Path, processes: int) -> dict[str, object]:
    """Settings that a certificate of the strategy file in a folder covers."""
    if isinstance(request, NetworkRequest):
        return covered_settings_of(request.job.file, request.job.name, load_strategy(folder / STRATEGY))
    return covered_by(_certification(_family(request), candidate, folder, processes))


def covered_by(certification: Certification) -> dict[str, object]:
    """Settings that a certificate covers."""
    config, full = certification.config, certification.full
    batch = full.batch_size, full.seq_len, config.accumulate
    return covered_settings(config.model, full.model, full.strategy, *batch)


def how_to_start(request: SearchRequest, candidate: Candidate) -> list[str]:
    """Lines that say how to train with the strategy file of a candidate."""
    if isinstance(request, NetworkRequest):
        return [f"In a script of {request.devices} processes: net = auto_parallel(net, {STRATEGY!r})"]
    family = _family(request)
    flags, cluster = _dry_run_flags(family, candidate, Path(STRATEGY)), family.cluster
    run = DryRun(flags, family.model.values, candidate.strategy, [0], family.batch_size, family.seq_len, PLAIN_TEXT)
    return start_lines(command_of(run), STRATEGY, family.devices, cluster.devices_per_node)


def _family(request: SearchRequest) -> TuneRequest:
    assert isinstance(request, TuneRequest)
    return request


def _networks(request: NetworkRequest) -> ScoredCandidates:
    found = ScoredCandidates(num_meshes=0)
    candidates = list(request.network.candidates(request.devices))
    found.fitting = [Scored(one, one.name, 0.0, 0.0) for one in candidates]
    found.num_scored, found.num_meshes = len(candidates), len({str(one.strategy.mesh) for one in candidates})
    return found


def _dry_run_flags(request: TuneRequest, candidate: Candidate, path: Path) -> DryRunConfig:
    """Flags of the dry run of a candidate. `path`: its strategy file."""
    model = request.model
    return DryRunConfig(
        model=model.family,
        size=model.size,
        config=model.config,
        strategy=path,
        ranks="all",
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        accumulate=candidate.accumulate,
        compute_dtype=model.compute_dtype,
        attention=model.attention,
        time=True,
        cluster=request.cluster_file,
        devices_per_server=request.cluster.devices_per_node,
    )


def _certification(request: TuneRequest, candidate: Candidate, folder: Path, processes: int) -> Certification:
    model = request.model
    return certification_config.check(
        CertifyConfig(
            model=model.family,
            size=model.size,
            config=model.config,
            strategy=folder / STRATEGY,
            cluster=request.cluster_file,
            out=folder,
            batch_size=request.batch_size,
            seq_len=request.seq_len,
            accumulate=candidate.accumulate,
            compute_dtype=model.compute_dtype,
            attention=model.attention,
            processes=processes,
            fast=True,
        )
    )
