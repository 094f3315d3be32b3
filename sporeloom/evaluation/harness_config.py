# SPDX-License-Identifier: Apache-2.0
"""What `sporeloom evaluate lm-eval` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from sporeloom import cli
from sporeloom.cli import Overwrite, option
from sporeloom.errors import ConfigError, Problems
from sporeloom.evaluation.task_code import code_problems
from sporeloom.files import unwritable
from sporeloom.inference import config as inference
from sporeloom.inference.config import ComputeFlags, GenerateConfig, GenerateJob
from sporeloom.json_text import json_text
from sporeloom.numbers import Count, Natural, number_problems
from sporeloom.reader import read_json
from sporeloom.runtime.environment import is_first_process


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(Overwrite, ComputeFlags):
    """One call of the harness."""

    heading: ClassVar[str] = "benchmark"
    common: ClassVar[tuple[str, ...]] = ("checkpoint", "tasks", "limit", "num_fewshot", "output", "compare")

    benchmark: Literal["lm-eval"] = field(metadata={"positional": True, "help": "the benchmark"})
    checkpoint: Path = option(..., "checkpoint folder, or a folder of adapters")
    tasks: tuple[str, ...] = option(..., "names of the harness' tasks, or YAML files of tasks")
    include_path: Path | None = option(None, "folder with further tasks, as the harness has them")
    num_fewshot: Natural | None = option(None, "examples in front of each question; the task's own number without it")
    limit: Count | None = option(None, "only so many questions of each task")
    apply_chat_template: bool = option(False, "questions as a user's messages, as the model was taught to talk")
    max_new_tokens: Count = option(256, "tokens of a generated answer at most, where a task does not say")
    batch_size: Count = option(8, "texts worked on at once")
    trust_remote_code: bool = option(
        False,
        "let the files of --tasks and --include-path run Python code, with all your rights: functions (`!function`), metrics "
        "and data sets that are programs",
    )
    output: Path | None = cli.output(None, "JSON file for the results, with what was asked and answered")
    compare: Path | None = option(None, "--output of an earlier call: tell the differences, too")


@dataclass(frozen=True)
class Harness:
    """A configuration that was found right, with what it refers to."""

    config: HarnessConfig
    job: GenerateJob
    earlier: dict[str, Any] | None
    """Results to compare with."""


def check(config: HarnessConfig, num_processes: int | None) -> Harness:
    """Everything the call refers to, read and held against each other.

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
    if not config.trust_remote_code:
        problems += code_problems(_task_files(config))
    asked = GenerateConfig(
        checkpoint=config.checkpoint,
        tokenizer=config.tokenizer,
        strategy=config.strategy,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        weights=config.weights,
        domain=config.domain,
    )
    job = problems.of(inference.check, asked, num_processes, [])
    earlier = problems.of(_results, config.compare) if config.compare else None
    problems.tell()
    assert job
    return Harness(config, job, earlier)


def _task_files(config: HarnessConfig) -> list[Path]:
    """Files that the harness reads besides those installed with it."""
    named = [path for path in map(Path, config.tasks) if path.suffix in (".yaml", ".yml") and path.is_file()]
    folder = config.include_path
    return [*named, *(sorted(folder.rglob("*.y*ml")) if folder and folder.is_dir() else ())]


def _results(path: Path) -> dict[str, Any]:
    found = read_json(path).mapping.get("results")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: no results of sporeloom evaluate lm-eval --output")
    return found


def rows(results: dict[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """(task, metric, value, its standard error) of what the harness found."""
    found = []
    for task, values in results.items():
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not name.endswith("_stderr"):
                error = values.get(f"{name}_stderr,{kind}")
                found.append((task, name, float(value), float(error) if isinstance(error, int | float) else None))
    return found


def table(results: dict[str, Any], earlier: dict[str, Any] | None = None) -> str:
    """For a reader; with `earlier` results the difference and its standard error, were both samples apart."""
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
    """What --output holds."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()}
    return json_text({"results": results, "samples": samples, "asked": asked}, indent=1, default=str) + "\n"
