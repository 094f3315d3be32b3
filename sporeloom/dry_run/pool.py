# SPDX-License-Identifier: Apache-2.0
"""Compile the ranks of a dry run in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
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

BY_MINDSPORE, BY_SPMD = "sporeloom.dry_run.by_mindspore", "sporeloom.dry_run.compile"
"""Who compiles, by the strategy's engine."""


def compile_ranks(run: DryRun) -> list[RankReport]:
    """One rank of each stage, in parallel processes, each of which ends with its memory. `engine: spmd` compiles once for all
    of them."""
    os.environ.setdefault(MALLOC, f"{FAST_MALLOC}:glibc.malloc.hugetlb=1")  # in large pages: these graphs are large
    prepare_environment()
    compiler, fast = _compiler(run.strategy), run.config.fast
    context, begin = forking_context(compiler), (os.getpid(), dict(os.environ))
    ranks = [run.distinct_ranks] if compiler == BY_SPMD and not fast else [[rank] for rank in run.distinct_ranks]
    with ProcessPoolExecutor(run.jobs, context, begin_forked, begin, max_tasks_per_child=1) as pool:
        futures = [
            [
                pool.submit(compile_stages, run, model, strategy, some)
                for model, strategy in (
                    small_depths(run.model, run.strategy, some[0]) if fast else [(run.model, run.strategy)]
                )
            ]
            for some in ranks
        ]
        try:
            reports = [[future.result() for future in of_some] for of_some in futures]
        except BrokenProcessPool:
            ended = [
                ", ".join(map(str, some))
                for some, of_some in zip(ranks, futures, strict=True)
                if any(f.done() and f.exception() for f in of_some)
            ]
            raise ConfigError(
                f"a process that compiled (ranks {', '.join(ended)}) was ended from outside, for want of memory most "
                "likely; use fewer --jobs"
            ) from None
    if not fast:
        return [report for (found,) in reports for report in found]
    return [
        full_depth(run.model, run.strategy, rank, [report for (report,) in found])
        for (rank,), found in zip(ranks, reports, strict=True)
    ]


def compile_stages(run: DryRun, model: ModelConfig, strategy: Strategy, ranks: Sequence[int]) -> list[RankReport]:
    """Compile some ranks, one of each stage at most."""
    compiler = import_module(_compiler(strategy))
    options = (run.batch_size, run.seq_len), run.config.inference, run.config.accumulate, run.task
    reports: list[RankReport] = compiler.compile_ranks(run.config.model, model, strategy, ranks, *options)
    return reports


def _compiler(strategy: Strategy) -> str:
    return BY_SPMD if strategy.engine == "spmd" else BY_MINDSPORE
