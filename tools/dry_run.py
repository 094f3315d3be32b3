# SPDX-License-Identifier: Apache-2.0
"""What ranks of a cluster would hold, send and compute: the real graph, partitioned by MindSpore, without a device.

    python tools/dry_run.py --model pangu --size 13b --strategy parallel_configs/pangu_13b_dp4_tp8_pp2.yaml --ranks 0,37,last
    python tools/dry_run.py --model pangu --size 200b --strategy parallel_configs/pangu_200b_dp16_tp8_pp16.yaml --fast
    python tools/dry_run.py explain query.weight --model pangu --size 13b --strategy parallel_configs/pangu_13b_tp8.yaml

Ranks of one pipeline stage have the same graph over other groups, so each stage is compiled once. Activation bytes are
the memory model's (docs/planner.md); everything else is read from the compiled graph.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mindloom.cli import argument, option, parse_args
from mindloom.dry_run.config import DryRunConfig, check
from mindloom.dry_run.html import page
from mindloom.dry_run.pool import compile_ranks
from mindloom.dry_run.summary import summarize, text_report
from mindloom.errors import run_tool
from mindloom.family import size_config
from mindloom.files import write_text_atomically
from mindloom.runtime.environment import prepare_environment
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


if __name__ == "__main__":
    run_tool(main)
