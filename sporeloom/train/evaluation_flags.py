# SPDX-License-Identifier: Apache-2.0
"""Flags about benchmarks that the model is evaluated on while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.numbers import Count, Natural
from sporeloom.strategy.config import Strategy

FLAGS = ("eval_every", "eval_limit", "eval_num_fewshot", "eval_include_path")


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Tasks of the lm-evaluation-harness, on the mesh of the run and with its present weights."""

    heading: ClassVar[str] = "evaluation"
    trains_values: ClassVar[bool] = False
    """Whether the network returns a value for each token in place of logits."""
    common: ClassVar[tuple[str, ...]] = ("eval_tasks",)

    eval_tasks: tuple[str, ...] = option(
        (),
        "tasks of the lm-evaluation-harness, by name or YAML file, that the model is evaluated on while it is trained and "
        "after the last step (default: none)",
    )
    eval_every: Natural = option(0, "interval in steps between evaluations; 0: after the last step only")
    eval_limit: Count | None = option(None, "maximum number of questions of each of --eval-tasks (default: all)")
    eval_num_fewshot: Natural | None = option(
        None, "number of few-shot examples before each question (default: from the task)"
    )
    eval_include_path: Path | None = option(None, "folder with further tasks in the harness's format (default: none)")

    def evaluation_problems(self) -> Iterator[str]:
        """List the problems of these flags."""
        if not self.eval_tasks:
            given = [name for name in FLAGS if getattr(self, name) not in (0, None)]
            yield from (
                f"--{name.replace('_', '-')}: there is nothing to evaluate; give --eval-tasks, too" for name in given
            )
            return
        flag = f"--eval-tasks {' '.join(self.eval_tasks)}"
        if find_spec("lm_eval") is None:
            yield f"{flag}: lm-eval is not installed: pip install -e '.[eval]'"
        if self.trains_values:
            yield f"{flag}: a reward model has no probabilities of tokens; leave it out"
        for name in self.eval_tasks:
            if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
                yield f"--eval-tasks {name}: there is no such file"
        if self.eval_include_path and not self.eval_include_path.is_dir():
            yield f"--eval-include-path {self.eval_include_path}: there is no such folder"

    def evaluating_problems(self, strategy: Strategy) -> Iterator[str]:
        """List what a model cannot be evaluated under while it is trained."""
        if not self.eval_tasks:
            return
        yield from strategy.axis_problems("sampling")
        if strategy.pipeline.virtual_stages > 1:
            yield (
                f"{strategy.at('pipeline.virtual_stages')}: --eval-tasks runs the model a stage after the other; leave "
                "virtual stages out"
            )
