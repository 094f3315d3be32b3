# SPDX-License-Identifier: Apache-2.0
"""Write a strategy as the text of its file, with flags of tools/train.py in a comment."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.core.shipped import DECODER, EXPERTS
from sporeloom.strategy.config import Offload, OptimizerParallel, Pipeline, Recompute, Stages, Strategy

FLAGS = "# tools/train.py "


def fitting_rules(rules: str, strategy: Strategy) -> str:
    """Name of the decoder rules that suit a strategy: with those of experts where there are some."""
    return EXPERTS if rules == DECODER and strategy.mesh.ep > 1 else rules


def strategy_text(strategy: Strategy, rules: str, head: Iterable[str] = ()) -> str:
    """Write a strategy file. `rules`: a file, the name of built-in ones, or nothing. `head`: comments at its top."""
    rules = fitting_rules(rules, strategy)
    lines = [
        *head,
        "mesh: {" + ", ".join(f"{axis}: {degree}" for axis, degree in strategy.mesh.degrees.items()) + "}",
        *([f"rules: {rules}"] if rules else []),
    ]
    if strategy.pipeline != Pipeline():
        stages, others = strategy.pipeline.stages, dataclasses.replace(strategy.pipeline, stages="uniform", listed=None)
        if strategy.pipeline.listed:  # the text may be for another folder
            path = (Path(strategy.source).parent / others.schedule).resolve()
            others = dataclasses.replace(others, schedule=json_text(str(path)))
        dealt = [f"stages: {{{_fields(stages, Stages())}}}"] if isinstance(stages, Stages) else []
        lines.append(f"pipeline: {{{', '.join([*filter(None, [_fields(others, Pipeline())]), *dealt])}}}")
    if strategy.recompute:
        lines.append(f"recompute: {{{_fields(strategy.recompute, Recompute()) or 'layers: all'}}}")
    if strategy.offload:
        lines.append(f"offload: {{{_fields(strategy.offload, Offload())}}}")
    if strategy.optimizer_parallel:
        fields = _fields(strategy.optimizer_parallel, OptimizerParallel())
        lines.append(f"optimizer_parallel: {{axis: dp{', ' * bool(fields)}{fields}}}")
    if strategy.sequence_parallel:
        lines.append("sequence_parallel: true")
    if strategy.context_parallel != Strategy.context_parallel:
        lines.append(f"context_parallel: {strategy.context_parallel}")
    if strategy.micro_batch_interleave > 1:
        lines.append(f"micro_batch_interleave: {strategy.micro_batch_interleave}")
    if strategy.engine:
        lines.append(f"engine: {strategy.engine}")
    return "\n".join(lines) + "\n"


def flags_comment(train: dict[str, Any]) -> str:
    """Format flags of tools/train.py as a comment."""
    words = list[str]()
    for name, value in train.items():
        if value is False or value is None:
            continue
        words += ["--" + name.replace("_", "-")]
        words += [] if value is True else [str(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    return FLAGS + shlex.join(words)


def _fields(found: Any, default: Any) -> str:
    """Format `name: value` of the fields that differ from their defaults."""
    changed = [(name, value) for name, value in vars(found).items() if value != getattr(default, name)]
    return ", ".join(f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in changed)
