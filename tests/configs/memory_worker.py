# SPDX-License-Identifier: Apache-2.0
"""Timelines of the memory of ranks, for tests."""

import numpy as np
from mindspore import nn

from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.compile import compile_ranks, rank_report
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.memory.run import memory_timeline
from sporeloom.dry_run.partitioned import partition_custom
from sporeloom.dry_run.summary import auxiliary_of_rank
from sporeloom.strategy.loader import strategy_of


def timelines(flags):
    """Summaries and reports of one rank of each stage, as the command makes them."""
    run = check(parse_args(DryRunConfig, "", flags, check))
    options = (run.batch_size, run.seq_len), run.config.inference, run.config.accumulate, run.task
    auxiliary = {rank: auxiliary_of_rank(run, rank) for rank in run.distinct_ranks}
    reports = compile_ranks(run.config.model, run.model, run.strategy, run.distinct_ranks, *options, auxiliary)
    return [
        {
            **report.memory.summary(),
            "held": report.parameter_bytes + report.optimizer_bytes,
            "auxiliary": sum(auxiliary[report.rank].values()),
            "end": int(report.memory.curve()[-1]),
        }
        for report in reports
    ]


class Mlp(nn.Cell):
    """A custom network that returns its loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(32, 64), nn.Dense(64, 1)

    def construct(self, x):
        return (self.second(self.first(x).sigmoid()) ** 2).mean()


def custom(settings):
    """Summaries of one rank of each stage of a custom network of 16 rows."""
    strategy = strategy_of(settings)
    partitioned = partition_custom(Mlp, strategy, [((16, 32), np.float32)])
    found = []
    for stage in range(strategy.mesh.pp):
        rank = stage * strategy.mesh.stage_size
        report = rank_report(partitioned, rank)
        held = report.parameter_bytes + report.optimizer_bytes
        found.append({**memory_timeline(partitioned, rank).summary(), "held": held})
    return found
