# SPDX-License-Identifier: Apache-2.0
"""Flags about benchmarks that the model is evaluated on while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import option
from sporeloom.core.numbers import Count, Natural
from sporeloom.strategy.config import Strategy

OF_TASKS = ("eval_num_fewshot", "eval_include_path")
OF_PROGRAMS = ("eval_languages", "eval_new_tokens", "eval_allow_execution")


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Tasks of the lm-evaluation-harness and HumanEval-X, on the mesh of the run and with its present weights."""

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
    eval_limit: Count | None = option(
        None, "maximum number of questions of each of --eval-tasks, and of problems of each language (default: all)"
    )
    eval_num_fewshot: Natural | None = option(
        None, "number of few-shot examples before each question (default: from the task)"
    )
    eval_include_path: Path | None = option(None, "folder with further tasks in the harness's format (default: none)")

    eval_humaneval_x: Path | None = option(
        None,
        "folder of HumanEval-X, as --data of `sporeloom evaluate humaneval-x`, that the model is evaluated on likewise: "
        "pass@1 of the most likely tokens (default: none)",
    )
    eval_languages: tuple[str, ...] = option(("python",), "languages of --eval-humaneval-x, or all")
    eval_new_tokens: Count = option(1024, "maximum number of new tokens for a problem of --eval-humaneval-x")
    eval_allow_execution: bool = option(
        False, "run the programs that the model writes for --eval-humaneval-x, isolated"
    )

    def evaluation_problems(self) -> Iterator[str]:
        """List the problems of these flags."""
        defaults = {field.name: field.default for field in fields(EvaluationFlags)}
        needed = {"--eval-tasks": OF_TASKS, "--eval-humaneval-x": OF_PROGRAMS}
        given = {"--eval-tasks": bool(self.eval_tasks), "--eval-humaneval-x": self.eval_humaneval_x is not None}
        if not any(given.values()):
            needed = {"--eval-tasks or --eval-humaneval-x": ("eval_every", "eval_limit", *OF_TASKS, *OF_PROGRAMS)}
        for flag, names in needed.items():
            for name in names if not given.get(flag) else ():
                if getattr(self, name) != defaults[name]:
                    yield f"--{name.replace('_', '-')}: there is nothing to evaluate; give {flag}, too"
        yield from self._task_problems() if self.eval_tasks else ()
        yield from self._program_problems(self.eval_humaneval_x) if self.eval_humaneval_x else ()

    def _task_problems(self) -> Iterator[str]:
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

    def _program_problems(self, folder: Path) -> Iterator[str]:
        flag = f"--eval-humaneval-x {folder}"
        if not folder.is_dir():
            yield f"{flag}: there is no such folder"
        if not self.eval_allow_execution:
            yield f"{flag} runs programs that a model wrote: give --eval-allow-execution, too"
        if self.trains_values:
            yield f"{flag}: a reward model writes no programs; leave it out"

    def evaluating_problems(self, strategy: Strategy) -> Iterator[str]:
        """List what a model cannot be evaluated under while it is trained."""
        if not self.eval_tasks and not self.eval_humaneval_x:
            return
        flag = "--eval-tasks" if self.eval_tasks else "--eval-humaneval-x"
        yield from strategy.axis_problems("sampling")
        if strategy.pipeline.virtual_stages > 1:
            yield (
                f"{strategy.at('pipeline.virtual_stages')}: {flag} runs the model a stage after the other; leave "
                "virtual stages out"
            )
