# SPDX-License-Identifier: Apache-2.0
"""Evaluation of candidates: of a family's model in processes of their own, of a custom network in this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from sporeloom.strategy_search.scoring import Scored, ScoredCandidates, score, score_neighbours


class Subject(ABC):
    """The model or network of a search, which evaluates its candidates."""

    @abstractmethod
    def scored(self, max_meshes: int) -> ScoredCandidates:
        """The candidates that fit in closed form."""

    @abstractmethod
    def variations(self, candidate: Candidate) -> list[Candidate]:
        """Changes of a candidate that closed forms do not see."""

    @abstractmethod
    def neighbours(self, candidate: Candidate) -> list[Scored]:
        """Strategies with one setting changed, with their closed forms, the fastest first."""

    @abstractmethod
    def step_cost(self, candidate: Candidate, path: Path) -> StepCost:
        """Partition a candidate and simulate a step.

        Args:
            path: its strategy file.

        Raises:
            ConfigError: it cannot be partitioned, or the process that partitions was ended from outside.
        """

    @abstractmethod
    def certify(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, Any]:
        """Certify the strategy file in a folder. Writes the certificate there, and returns its contents.

        Raises:
            ConfigError: it cannot be proved with so many processes.
        """

    @abstractmethod
    def covered(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, object]:
        """Settings that a certificate of the strategy file in a folder covers."""

    @abstractmethod
    def how_to_start(self, candidate: Candidate) -> list[str]:
        """Lines that say how to train with the strategy file of a candidate."""


class NetworkSubject(Subject):
    """A custom network, which has no closed forms: all candidates are simulated, in this process."""

    def __init__(self, request: NetworkRequest):
        self.request, self.network, self.job = request, request.network, request.job

    def scored(self, max_meshes: int) -> ScoredCandidates:
        found = ScoredCandidates(num_meshes=0)
        candidates = list(self.network.candidates(self.request.devices))
        found.fitting = [Scored(one, one.name, 0.0, 0.0) for one in candidates]
        found.num_scored, found.num_meshes = len(candidates), len({str(one.strategy.mesh) for one in candidates})
        return found

    def variations(self, candidate: Candidate) -> list[Candidate]:
        return []

    def neighbours(self, candidate: Candidate) -> list[Scored]:
        return []

    def step_cost(self, candidate: Candidate, path: Path) -> StepCost:
        cost: StepCost = self.network.cost(candidate, self.request.cluster)
        return cost

    def certify(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, Any]:
        job, cluster = self.job, self.request.cluster_file
        return certify_file(job.file, job.name, job.inputs, folder / STRATEGY, folder, processes, cluster=cluster)

    def covered(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, object]:
        return covered_settings_of(self.job.file, self.job.name, load_strategy(folder / STRATEGY))

    def how_to_start(self, candidate: Candidate) -> list[str]:
        return [f"In a script of {self.request.devices} processes: net = auto_parallel(net, {STRATEGY!r})"]


class FamilySubject(Subject):
    """A family's model, which processes of their own partition and prove."""

    def __init__(self, request: TuneRequest):
        self.request = request

    def scored(self, max_meshes: int) -> ScoredCandidates:
        return score(self.request, max_meshes)

    def variations(self, candidate: Candidate) -> list[Candidate]:
        return variations(self.request, candidate)

    def neighbours(self, candidate: Candidate) -> list[Scored]:
        return score_neighbours(self.request, candidate)

    def step_cost(self, candidate: Candidate, path: Path) -> StepCost:
        return pool.step_cost(dry_run_config.check(_dry_run_flags(self.request, candidate, path)))

    def certify(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, Any]:
        return certify_decoder(_certification(self.request, candidate, folder, processes))

    def covered(self, candidate: Candidate, folder: Path, processes: int) -> dict[str, object]:
        return covered_by(_certification(self.request, candidate, folder, processes))

    def how_to_start(self, candidate: Candidate) -> list[str]:
        request, flags = self.request, _dry_run_flags(self.request, candidate, Path(STRATEGY))
        batch = request.batch_size, request.seq_len
        run = DryRun(flags, request.model.values, candidate.strategy, [0], *batch, PLAIN_TEXT)
        return start_lines(command_of(run), STRATEGY, request.devices, request.cluster.devices_per_node)


def subject_of(request: SearchRequest) -> Subject:
    """The subject of a request."""
    if isinstance(request, NetworkRequest):
        return NetworkSubject(request)
    assert isinstance(request, TuneRequest)
    return FamilySubject(request)


def covered_by(certification: Certification) -> dict[str, object]:
    """Settings that a certificate covers."""
    config, full = certification.config, certification.full
    batch = full.batch_size, full.seq_len, config.accumulate
    return covered_settings(config.model, full.model, full.strategy, *batch)


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
