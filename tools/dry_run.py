# SPDX-License-Identifier: Apache-2.0
"""What ranks of a cluster would hold, send and compute: the real graph, partitioned by MindSpore, without a device.

    python tools/dry_run.py --model pangu --size 13b --strategy parallel_configs/pangu_13b_dp4_tp8_pp2.yaml --ranks 0,37,last
    python tools/dry_run.py --model pangu --size 200b --strategy parallel_configs/pangu_200b_dp16_tp8_pp16.yaml --fast
    python tools/dry_run.py explain query.weight --model pangu --size 13b --strategy parallel_configs/pangu_13b_tp8.yaml

Ranks of one pipeline stage have the same graph over other groups, so each stage is compiled once. Activation bytes are
the memory model's (docs/planner.md); everything else is read from the compiled graph.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from mindloom.cli import argument, option, parse_args
from mindloom.dry_run.by_depth import full_depth, small_depths
from mindloom.dry_run.config import DryRun, DryRunConfig, check
from mindloom.dry_run.html import page
from mindloom.dry_run.summary import summarize, text_report
from mindloom.errors import ConfigError, run_tool
from mindloom.family import size_config
from mindloom.files import write_text_atomically
from mindloom.model_config import DecoderConfig
from mindloom.processes import end_with_parent
from mindloom.runtime.environment import prepare_environment
from mindloom.strategy.config import Strategy
from mindloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    name: str = argument("parameter or operator, or the end of its name")
    model: str = option("pangu", "model family")
    size: str = option("tiny", "one of the family's published sizes")
    strategy: Path = option(..., "strategy file")


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    if argv[:1] == ["explain"]:
        asked = parse_args(ExplainConfig, __doc__, argv[1:])
        model, strategy = size_config(asked.model, asked.size), load_strategy(asked.strategy)
        print(import_module("mindloom.dry_run.explain").explain(asked.model, model, strategy, asked.name))
        return 0
    run = check(parse_args(DryRunConfig, __doc__, argv))
    values = summarize(run, compile_ranks(run))
    if run.config.html:
        write_text_atomically(run.config.html, page(values))
        print(f"report in {run.config.html}", file=sys.stderr)
    print(json.dumps(values, indent=1) if run.config.json else text_report(values))
    return 1 if values["job"].get("fits") is False else 0


# Compilation makes and drops millions of small objects: keep freed ones at hand, in large pages, and return none.
ALLOCATOR = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "tcache_count": 4000,
        "mxfast": 0,
        "hugetlb": 1,
    }.items()
)


def compile_ranks(run: DryRun) -> list:
    """One rank of each stage, in parallel processes, each of which ends with its memory."""
    os.environ.setdefault("GLIBC_TUNABLES", ALLOCATOR)  # read when a process starts; other C libraries ignore it
    context = multiprocessing.get_context("spawn")
    begin = partial(end_with_parent, os.getpid())
    fast = run.config.fast
    with ProcessPoolExecutor(run.jobs, context, begin, max_tasks_per_child=1) as pool:
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


def compile_one(run: DryRun, model: DecoderConfig, strategy: Strategy, rank: int):
    prepare_environment()
    compiler, batch = import_module("mindloom.dry_run.compile"), (run.batch_size, run.seq_len)
    options = (run.config.inference, run.config.accumulate)
    return compiler.compile_rank(run.config.model, model, strategy, rank, batch, *options)


if __name__ == "__main__":
    run_tool(main)
