# SPDX-License-Identifier: Apache-2.0
"""Flags of `sporeloom evaluate lm-eval` and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom.core.command_line import Overwrite, option, output
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import unwritable
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import Count, Natural, number_problems
from sporeloom.core.reader import read_json
from sporeloom.evaluation.task_code import code_problems
from sporeloom.inference import config as inference
from sporeloom.inference.config import ComputeFlags, GenerateConfig, GenerateJob
from sporeloom.runtime.environment import is_first_process


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(Overwrite, ComputeFlags):
    """One call of the harness."""

    heading: ClassVar[str] = "benchmark"
    common: ClassVar[tuple[str, ...]] = ("checkpoint", "tasks", "limit", "num_fewshot", "output", "compare")

    benchmark: Literal["lm-eval"] = field(metadata={"positional": True, "help": "benchmark"})
    checkpoint: Path = option(..., "checkpoint folder, or a folder of adapters")
    tasks: tuple[str, ...] = option(..., "names of the harness's tasks, or YAML files of tasks")
    include_path: Path | None = option(None, "folder with further tasks in the harness's format (default: none)")
    num_fewshot: Natural | None = option(
        None, "number of few-shot examples before each question (default: from the task)"
    )
    limit: Count | None = option(None, "maximum number of questions of each task (default: all)")
    apply_chat_template: bool = option(False, "format questions as user messages, in the model's chat template")
    max_new_tokens: Count = option(256, "maximum number of new tokens in an answer, where the task does not give one")
    batch_size: Count = option(8, "number of texts in a batch")
    trust_remote_code: bool = option(
        False,
        "let the files of --tasks and --include-path run Python code with all your rights: functions "
        "(`!function`), metrics and data sets that are programs",
    )
    output: Path | None = output(None, "JSON file for the results, with all questions and answers (default: none)")
    compare: Path | None = option(None, "--output of an earlier call: print the differences, too (default: none)")


@dataclass(frozen=True)
class Harness:
    """A valid configuration, with the files it refers to."""

    config: HarnessConfig
    job: GenerateJob
    earlier: dict[str, Any] | None
    """Earlier results to compare with."""


def check(config: HarnessConfig, num_processes: int | None) -> Harness:
    """Read everything that the call refers to and check all of it together.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    problems += list(number_problems(config))
    if config.output and is_first_process() and (problem := unwritable(config.output.parent)):
        problems.append(f"--output {problem}")
    if config.include_path and not config.include_path.is_dir():
        problems.append(f"--include-path {config.include_path}: there is no such folder")
    for name in config.tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            problems.append(f"--tasks {name}: there is no such file")
    problems += code_of_tasks(config)
    asked = GenerateConfig(
        checkpoint=config.checkpoint,
        tokenizer=config.tokenizer,
        strategy=config.strategy,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        weights=config.weights,
        kv_cache=config.kv_cache,
        domain=config.domain,
    )
    job = problems.of(inference.check, asked, num_processes, [])
    earlier = problems.of(_results, config.compare) if config.compare else None
    problems.raise_if_any()
    assert job
    return Harness(config, job, earlier)


def code_of_tasks(config: HarnessConfig) -> list[str]:
    """List the Python code that the files of tasks would run, unless that is allowed."""
    return [] if config.trust_remote_code else list(code_problems(_task_files(config)))


def _task_files(config: HarnessConfig) -> list[Path]:
    """List the files that the harness reads besides those installed with it."""
    named = [path for path in map(Path, config.tasks) if path.suffix in (".yaml", ".yml") and path.is_file()]
    folder = config.include_path
    return [*named, *(sorted(folder.rglob("*.y*ml")) if folder and folder.is_dir() else ())]


def _results(path: Path) -> dict[str, Any]:
    found = read_json(path).mapping.get("results")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not results of sporeloom evaluate lm-eval --output")
    return found


def rows(results: dict[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """List (task, metric, value, its standard error) of the harness's results."""
    found = []
    for task, values in results.items():
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not name.endswith("_stderr"):
                error = values.get(f"{name}_stderr,{kind}")
                found.append((task, name, float(value), float(error) if isinstance(error, int | float) else None))
    return found


def table(results: dict[str, Any], earlier: dict[str, Any] | None = None) -> str:
    """Format the results as a table; with `earlier` results also the difference and its standard error for
    independent samples."""
    before = {(task, name): (value, error) for task, name, value, error in rows(earlier or {})}
    lines = [f"{'task':24} {'metric':18} {'value':>10}  {'stderr':>8}" + ("  difference" if earlier else "")]
    for task, name, value, error in rows(results):
        line = f"{task:24} {name:18} {value:10.4f}  {'' if error is None else f'{error:8.4f}':>8}"
        if (task, name) in before:
            old, old_error = before[task, name]
            both = "" if error is None or old_error is None else f" +- {(error**2 + old_error**2) ** 0.5:.4f}"
            line += f"  {value - old:+.4f}{both}"
        lines.append(line)
    return "\n".join(lines)


def as_json(results: dict[str, Any], samples: dict[str, Any], config: HarnessConfig) -> str:
    """The document that --output gets."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()}
    return json_text({"results": results, "samples": samples, "asked": asked}, indent=1, default=str) + "\n"
