# SPDX-License-Identifier: Apache-2.0
"""Report what ranks of a cluster would store, send and compute: the real graph, partitioned as runs are, without a
device.

    sporeloom dry-run --model pangu --size 13b --strategy pangu_13b_dp4_tp8_pp2 --ranks 0,37,last
    sporeloom dry-run --model pangu --size 200b --strategy pangu_200b_dp16_tp8_pp16 --fast
    sporeloom dry-run explain query.weight --model pangu --size 13b --strategy pangu_13b_tp8

`--memory` follows every allocation of a step (docs/how-to/memory_timeline.md), `--time` simulates it on a cluster
(docs/how-to/step_time.md).

The graph of one device is compiled once for all ranks. Activation bytes are those of the memory model
(docs/explanation/planner.md); everything else is read from the partitioned graphs.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sporeloom.core.command_line import argument, check_subcommand, option, parse_args
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.log import print_report
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.html import page
from sporeloom.dry_run.memory.exports import memory_block_csv, trace
from sporeloom.dry_run.memory.timeline import Timeline
from sporeloom.dry_run.pool import compile_ranks
from sporeloom.dry_run.summary import summarize, text_report
from sporeloom.dry_run.time.chakra import write_chakra
from sporeloom.dry_run.time.trace import trace as step_trace
from sporeloom.models.config_file import named_model, with_model_folder
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    name: str = argument("parameter or operator, or the end of its name")
    model: str = option("pangu", "model family, or a model folder, also of Hugging Face")
    size: str = option("tiny", "built-in size of the family")
    config: Path | None = option(
        None, "JSON file with model configuration fields that replace those of the size (default: none)"
    )
    strategy: Path = option(..., "strategy file, or name of a built-in strategy")


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    if argv[:1] == ["explain"]:
        asked = parse_args(ExplainConfig, __doc__, argv[1:])
        asked = with_model_folder(asked)
        model, strategy = named_model(asked.model, asked.size, asked.config), load_strategy(asked.strategy)
        print(import_module("sporeloom.dry_run.explain").explain(asked.model, model, strategy, asked.name))
        return 0
    check_subcommand(argv, ("explain",))
    run = check(parse_args(DryRunConfig, __doc__, argv, check))
    reports = compile_ranks(run)
    values = summarize(run, reports)
    write_timelines(run.config, {report.rank: report.memory for report in reports if report.memory})
    if run.config.trace is not None and reports[0].step:
        write_text_atomically(run.config.trace, json_text(step_trace(reports[0].step)))
        print(f"trace of a step in {run.config.trace}: open it in ui.perfetto.dev", file=sys.stderr)
    if run.config.chakra is not None and reports[0].step:
        write_chakra(reports[0].step, run.strategy.mesh.size, run.config.chakra)
        print(f"Chakra traces of {run.strategy.mesh.size} ranks in {run.config.chakra}", file=sys.stderr)
    if run.config.html:
        write_text_atomically(run.config.html, page(values))
        print(f"report in {run.config.html}", file=sys.stderr)
    print_report(json_text(values, indent=1) if run.config.json else text_report(values))
    verdicts = [values["job"].get("fits"), *(rank.get("memory", {}).get("fits") for rank in values["ranks"])]
    return 1 if False in verdicts else 0


def write_timelines(config: DryRunConfig, timelines: Mapping[int, Timeline]) -> None:
    """Write the memory over the step in the formats of other tools."""
    if (folder := config.memory_csv) is not None:
        for rank, timeline in timelines.items():
            path = folder / f"rank_{rank}" / "memory_block.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, memory_block_csv(timeline))
            print(f"memory of rank {rank} in {path}", file=sys.stderr)
    if config.memory_trace is not None:
        write_text_atomically(config.memory_trace, json_text(trace(timelines)))
        print(f"trace in {config.memory_trace}: open it in ui.perfetto.dev", file=sys.stderr)
