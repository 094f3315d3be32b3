# SPDX-License-Identifier: Apache-2.0
"""Flags of `sporeloom certify`, validated before MindSpore is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.certification.shrink import (
    BATCH,
    POSSIBLE_PROCESSES,
    SEQ_LEN,
    small_model,
    small_strategies,
    small_task,
)
from sporeloom.core.command_line import Overwrite, option, output
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import unwritable
from sporeloom.core.numbers import Count
from sporeloom.dry_run.config import DryRun, DryRunConfig
from sporeloom.dry_run.config import check as check_dry_run
from sporeloom.models.config import AttentionKernel, ComputeDtype, ModelConfig
from sporeloom.models.config_file import with_model_folder
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.task import TaskFlags, TrainedTask
from sporeloom.strategy.checks import batch_problems, model_problems
from sporeloom.strategy.config import Strategy


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(Overwrite, TaskFlags):
    """Flags of `sporeloom certify`."""

    common: ClassVar[tuple[str, ...]] = (
        "model",
        "size",
        "config",
        "strategy",
        "cluster",
        "out",
        "batch_size",
        "processes",
    )
    model: str = option("pangu", "model family, or a model folder, also of Hugging Face")
    size: str = option("tiny", "built-in size of the family")
    config: Path | None = option(
        None, "JSON file with model configuration fields that replace those of the size (default: none)"
    )
    strategy: Path = option(..., "strategy file, or name of a built-in strategy")
    cluster: Path = option(..., "cluster file, or name of a built-in cluster")
    out: Path = output(..., "folder for certificate.json, certificate.html and the logs of the proof")
    batch_size: Count | None = option(
        None,
        "sequences of one step over all devices, two for each pair of reward and dpo (default: one for each microbatch and "
        "replica)",
    )
    accumulate: Count = option(1, "gradient accumulation steps without a pipeline")
    compute_dtype: ComputeDtype | None = option(None, "dtype of matrix products (default: from `--size`)")
    attention: AttentionKernel | None = option(
        None, "attention implementation (default: from `--size`; flash where Ascend supports it for the model)"
    )
    processes: Count = option(4, "number of processes of the proof on this machine: 2, 4, 8 or 16")
    fast: bool = option(False, "compile a few layers of the full size and extrapolate, as dry-run --fast")
    mutate: Count | None = option(
        None,
        "number of faults of each kind that are planted, one at a time, in the program under proof; the certificate reports "
        "how many the proof catches (default: none)",
    )


@dataclass(frozen=True)
class Certification:
    """A validated request for a certificate, with the scaled-down model, strategies and task of its proof."""

    config: CertifyConfig
    full: DryRun
    cluster: Cluster
    small_model: ModelConfig
    small: list[Strategy]
    small_task: TrainedTask


def check(config: CertifyConfig) -> Certification:
    """Validate the flags together with the files that they name: the first check of a certificate.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    if config.processes not in POSSIBLE_PROCESSES:
        problems.append(f"--processes {config.processes}: give one of {', '.join(map(str, POSSIBLE_PROCESSES))}")
    if problem := unwritable(config.out):
        problems.append(f"--out {problem}")
    cluster = problems.of(read_cluster, config.cluster)
    config = problems.of(with_model_folder, config) or config
    dry = DryRunConfig(
        model=config.model,
        size=config.size,
        config=config.config,
        strategy=config.strategy,
        ranks="all",
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        compute_dtype=config.compute_dtype,
        attention=config.attention,
        fast=config.fast,
        devices_per_server=cluster.devices_per_node if cluster else 1,
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(TaskFlags)},
        memory_gb=cluster.usable_bytes / 2**30 if cluster else None,
    )
    full = problems.of(check_dry_run, dry)
    problems.raise_if_any()
    assert full and cluster
    mesh = full.strategy.mesh
    if mesh.size == 1:
        raise ConfigError(f"{full.strategy.at('mesh')}: a certificate is for several devices")
    problems.of(cluster.with_running, mesh.size)
    if problem := cluster.refuses(mesh):
        problems.append(f"{full.strategy.at('mesh')}: {problem}")
    problems.raise_if_any()
    size = mesh.size
    ranks = sorted({0, size // 2, size - 1})
    full = dataclasses.replace(full, ranks=ranks)
    small, model = small_strategies(full.strategy, full.model.num_layers, config.processes), None
    model = small_model(full.model, full.strategy, config.processes)
    for strategy in small:
        problems += model_problems(strategy, model)
        accumulate = 2 if config.accumulate > 1 and strategy.mesh.pp == 1 else 1
        problems += batch_problems(strategy, BATCH // full.task.rows_per_unit, SEQ_LEN, accumulate)
    if problems:
        raise ConfigError(f"{config.strategy}, scaled down for the proof: {problem}" for problem in problems)
    return Certification(config, full, cluster, model, small, small_task(full.task, model))
