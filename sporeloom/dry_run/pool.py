# SPDX-License-Identifier: Apache-2.0
"""Compile the ranks of a dry run in processes of their own, whose memory ends with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import TypeVar

from sporeloom.core.errors import ConfigError
from sporeloom.core.processes import FAST_MALLOC, MALLOC, begin_forked, forking_context
from sporeloom.dry_run.by_depth import full_depth, reduced_depths
from sporeloom.dry_run.config import DryRun
from sporeloom.dry_run.rank_report import RankReport, StepCost
from sporeloom.dry_run.summary import auxiliary_of_rank
from sporeloom.models.config import ModelConfig
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import Strategy

COMPILER = "sporeloom.dry_run.compile"
"""The module that a process loads, with MindSpore."""

Reports = Future[list[RankReport]]
Result = TypeVar("Result")


def compile_ranks(run: DryRun) -> list[RankReport]:
    """Compile one rank of each stage: at once in one process, or with `--fast` a process for each reduced depth.

    Raises:
        ConfigError: the model cannot be partitioned, or a process ended.
    """
    return _in_pool(run, _extrapolated if run.config.fast else _compiled)


def step_cost(run: DryRun) -> StepCost:
    """Simulate the time of a step and the memory of one rank of each stage, in a process of its own.

    Raises:
        ConfigError: the model cannot be partitioned, or the process ended.
    """
    return _in_pool(run, lambda run, pool: pool.submit(cost_in_process, run).result())


def _in_pool(run: DryRun, work: Callable[[DryRun, ProcessPoolExecutor], Result]) -> Result:
    """Call `work` with processes that have loaded MindSpore."""
    os.environ.setdefault(MALLOC, f"{FAST_MALLOC}:glibc.malloc.hugetlb=1")  # in large pages: these graphs are large
    prepare_environment()
    context, begin = forking_context(COMPILER), (os.getpid(), dict(os.environ))
    with ProcessPoolExecutor(run.jobs, context, begin_forked, begin, max_tasks_per_child=1) as pool:
        try:
            return work(run, pool)
        except BrokenProcessPool:
            raise ConfigError(
                f"a process that compiled (ranks {', '.join(map(str, run.distinct_ranks))}) was ended from outside, most "
                "likely for lack of memory; use --fast, or fewer --jobs"
            ) from None


def _compiled(run: DryRun, pool: ProcessPoolExecutor) -> list[RankReport]:
    return pool.submit(compile_stages, run, run.model, run.strategy, run.distinct_ranks).result()


def _extrapolated(run: DryRun, pool: ProcessPoolExecutor) -> list[RankReport]:
    futures: dict[int, list[Reports]] = {
        rank: [
            pool.submit(compile_stages, run, model, strategy, [rank])
            for model, strategy in reduced_depths(run.model, run.strategy, rank)
        ]
        for rank in run.distinct_ranks
    }
    reports = {rank: [report for future in depths for report in future.result()] for rank, depths in futures.items()}
    return [full_depth(run.model, run.strategy, rank, found) for rank, found in reports.items()]


def compile_stages(run: DryRun, model: ModelConfig, strategy: Strategy, ranks: Sequence[int]) -> list[RankReport]:
    """Compile some ranks in this process, one of each stage at most."""
    options = (run.batch_size, run.seq_len), run.config.inference, run.config.accumulate, run.task
    auxiliary = {rank: auxiliary_of_rank(run, rank) for rank in ranks} if run.config.with_timeline else None
    reports: list[RankReport] = import_module(COMPILER).compile_ranks(
        run.config.model, model, strategy, ranks, *options, auxiliary, run.cluster
    )
    return reports


def cost_in_process(run: DryRun) -> StepCost:
    """Simulate a step in this process."""
    auxiliary = {rank: auxiliary_of_rank(run, rank) for rank in run.distinct_ranks}
    found: StepCost = import_module(COMPILER).step_cost(
        run.config.model,
        run.model,
        run.strategy,
        run.distinct_ranks,
        (run.batch_size, run.seq_len),
        run.config.accumulate,
        run.task,
        auxiliary,
        run.cluster,
    )
    return found
