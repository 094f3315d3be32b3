# SPDX-License-Identifier: Apache-2.0
"""Compile the ranks of a dry run in processes of their own."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module

from sporeloom.dry_run.by_depth import full_depth, small_depths
from sporeloom.dry_run.config import DryRun
from sporeloom.dry_run.rank_report import RankReport
from sporeloom.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.processes import FAST_MALLOC, MALLOC, begin_forked, forking_context
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import Strategy

COMPILER = "sporeloom.dry_run.compile"


def compile_ranks(run: DryRun) -> list[RankReport]:
    """One rank of each stage, in parallel processes, each of which ends with its memory."""
    os.environ.setdefault(MALLOC, f"{FAST_MALLOC}:glibc.malloc.hugetlb=1")  # in large pages: these graphs are large
    prepare_environment()
    context, begin, fast = forking_context(COMPILER), (os.getpid(), dict(os.environ)), run.config.fast
    with ProcessPoolExecutor(run.jobs, context, begin_forked, begin, max_tasks_per_child=1) as pool:
        futures = {
            rank: [
                pool.submit(compile_one, run, model, strategy, rank)
                for model, strategy in (
                    small_depths(run.model, run.strategy, rank) if fast else [(run.model, run.strategy)]
                )
            ]
            for rank in run.distinct_ranks
        }
        try:
            reports = {rank: [future.result() for future in of_rank] for rank, of_rank in futures.items()}
        except BrokenProcessPool:
            ended = [str(rank) for rank, of_rank in futures.items() if any(f.done() and f.exception() for f in of_rank)]
            raise ConfigError(
                f"a process that compiled (ranks {', '.join(ended)}) was ended from outside, for want of memory most "
                "likely; use fewer --jobs"
            ) from None
    if not fast:
        return [report for (report,) in reports.values()]
    return [full_depth(run.model, run.strategy, rank, found) for rank, found in reports.items()]


def compile_one(run: DryRun, model: ModelConfig, strategy: Strategy, rank: int) -> RankReport:
    compiler, batch = import_module(COMPILER), (run.batch_size, run.seq_len)
    options = (run.config.inference, run.config.accumulate, run.task)
    report: RankReport = compiler.compile_rank(run.config.model, model, strategy, rank, batch, *options)
    return report
