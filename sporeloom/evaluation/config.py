# SPDX-License-Identifier: Apache-2.0
"""Flags of tools/evaluate.py and their checks: every mistake that can be found before MindSpore is loaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.files import read_gzip, unwritable
from sporeloom.core.lines import split_lines
from sporeloom.core.numbers import Bounds, Count, Positive, number_problems
from sporeloom.core.reader import parse_json, read_json
from sporeloom.data.tokenizer import Prompt
from sporeloom.evaluation.checks import Problem
from sporeloom.evaluation.programs import NAMES
from sporeloom.evaluation.prompter import PromptForm, prompter_of
from sporeloom.evaluation.sandbox import check_isolation
from sporeloom.inference import config as inference
from sporeloom.inference.config import ComputeFlags, GenerateConfig, GenerateJob
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.stopping import StopCondition
from sporeloom.runtime.environment import is_first_process

Megabytes = Annotated[int, Bounds(64, 1 << 20)]
SETTINGS_FILE, SAMPLES_FILE, RESULTS_FILE, SUMMARY_FILE = (
    "settings.json",
    "samples.jsonl",
    "results.jsonl",
    "summary.json",
)
FREE_OPTIONS = (
    *("data", "output_dir", "language", "canonical", "num_samples", "k", "max_problems", "strategy", "launch"),
    *("batch_size", "allow_execution", "workers", "time_limit", "memory_limit_mb"),
)
"""Options that may change between calls with the same folder: samples do not depend on them."""
PROBLEM_FIELDS = ("task_id", "prompt", "declaration", "canonical_solution", "test")
MAX_BENCHMARK_BYTES = 256 << 20
"""Maximum size of the file of one language; the published ones have half a megabyte."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ComputeFlags, SamplingConfig):
    """One call of tools/evaluate.py."""

    heading: ClassVar[str] = "benchmark"
    common: ClassVar[tuple[str, ...]] = (
        "data",
        "output_dir",
        "language",
        "checkpoint",
        "num_samples",
        "max_problems",
        "batch_size",
        "allow_execution",
    )

    benchmark: Literal["humaneval-x", "lm-eval"] = field(metadata={"positional": True, "help": "benchmark"})
    data: Path = option(..., "folder of the benchmark: humaneval_LANGUAGE.jsonl.gz, at its top or in LANGUAGE/data/")
    output_dir: Path = option(
        ..., "folder for samples, results and summary; a call continues what an earlier one began"
    )
    language: tuple[str, ...] = option(("python",), f"languages of the programs: {', '.join(NAMES)}, or all")
    checkpoint: Path | None = option(None, "checkpoint folder (default: judge the samples in --output-dir)")
    canonical: bool = option(False, "judge the benchmark's own solutions instead of a model's")
    translate_from: str | None = option(
        None, "give the solution in this language and request a translation (default: none)"
    )
    prompt_form: PromptForm | None = option(
        None,
        "form of the prompt: tagged (the line that names its language, then the prompt), plain (the prompt "
        "without surrounding white space), or chat (a question, answered in a code block) (default: as the "
        "model was trained)",
    )
    system_prompt: str | None = option(
        None, "with --prompt-form chat: system message before the question (default: none)"
    )
    num_samples: Count = option(1, "number of samples for each problem")
    k: tuple[Count, ...] = option((1, 10, 100), "values of k for pass@k; each needs at least k samples")
    max_problems: Count | None = option(None, "maximum number of problems of each language (default: all)")
    max_new_tokens: Count = option(1024, "maximum number of new tokens in a sample; fewer where the context ends")
    batch_size: Count | None = option(
        None, "maximum number of prompts generated at the same time (default: as many as fit)"
    )
    allow_execution: bool = option(False, "run the programs, isolated; without it samples are only written")
    workers: Count | None = option(None, "number of programs run at the same time (default: one per core)")
    time_limit: Positive = option(10.0, "seconds that a program may run")
    memory_limit_mb: Megabytes = option(1024, "memory that a program and its child processes may use")


@dataclass(frozen=True)
class SampleRequest:
    """A sample to generate."""

    task_id: str
    sample: int
    prompt: Prompt = field(repr=False)
    stream: int
    """Seed of its random numbers: a function of problem and sample alone."""


@dataclass(frozen=True)
class Evaluation:
    """A valid configuration, with the files it refers to."""

    config: EvaluateConfig
    problems: dict[str, dict[str, Problem]] = field(repr=False)
    """language -> task -> problem."""
    prompts: dict[str, dict[str, Prompt]] = field(default_factory=dict, repr=False)
    """language -> task -> text that the model continues; empty if nothing is generated."""
    endings: dict[str, StopCondition | None] = field(default_factory=dict, repr=False)
    """language -> function that finds where its functions end."""
    prompt_form: PromptForm | None = None
    """Form of the prompts; None if nothing is generated."""
    job: GenerateJob | None = None
    """The model and how it is run."""

    @property
    def folder(self) -> Path:
        return self.config.output_dir

    def settings(self) -> dict[str, Any]:
        """Options that the samples in the folder depend on."""
        own = {f.name: getattr(self.config, f.name) for f in fields(self.config) if f.name not in FREE_OPTIONS}
        settings: dict[str, Any] = json.loads(json.dumps(own, default=str))
        return settings

    def wanted(self, language: str) -> list[SampleRequest]:
        """List every sample of a language, including those that exist already."""
        count = self.config.num_samples
        return [
            SampleRequest(task, sample, prompt, (sample << 20) + place)
            for place, (task, prompt) in enumerate(self.prompts[language].items())
            for sample in range(count)
        ]


def check(config: EvaluateConfig, num_processes: int | None) -> Evaluation:
    """Read everything that the call refers to and check all of it together.

    Raises:
        ConfigError: all problems at once.
    """
    languages = benchmark_languages(config.language)
    if problems := _own_problems(config, languages):
        raise ConfigError(problems)
    if config.allow_execution:
        check_isolation()
    tasks = {}
    for language in languages:
        tasks[language] = dict(list(read_problems(config.data, language).items())[: config.max_problems])
    evaluation = Evaluation(config, tasks)
    if config.checkpoint is not None:
        evaluation = _with_generation(evaluation, config.checkpoint, num_processes)
        _check_settings(evaluation)
    elif not config.canonical and not (config.output_dir / SAMPLES_FILE).exists():
        raise ConfigError(
            f"{config.output_dir / SAMPLES_FILE}: there are no samples; give --checkpoint to generate some, or "
            "--canonical"
        )
    return evaluation


def read_problems(data: Path, language: str) -> dict[str, Problem]:
    """Read the problems of a language, by task.

    Raises:
        ConfigError: no such file, or not the benchmark's.
    """
    name = f"humaneval_{language}.jsonl.gz"
    path = next((p for p in (data / name, data / language / "data" / name) if p.exists()), None)
    if path is None:
        raise ConfigError(f"{data}: holds no {name}; --data names the folder of HumanEval-X")
    found: dict[str, Problem] = {}
    try:
        for number, line in enumerate(split_lines(read_gzip(path, MAX_BENCHMARK_BYTES).decode()), 1):
            problem = parse_json(line, f"{path}:{number}")
            fields_of = problem if isinstance(problem, dict) else {}
            if missing := [key for key in PROBLEM_FIELDS if not isinstance(fields_of.get(key), str)]:
                raise ConfigError(f"{path}:{number}: no field {', '.join(missing)} with a text")
            found[problem["task_id"]] = problem
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path}: not a gzip file of JSON lines: {error}") from None
    return found


def benchmark_languages(names: Sequence[str], flag: str = "--language") -> tuple[str, ...]:
    """The benchmark's own names of languages; `all` stands for every one.

    Raises:
        ConfigError: it has no such language.
    """
    return tuple(NAMES) if tuple(names) == ("all",) else tuple(benchmark_language(name, flag) for name in names)


def benchmark_language(name: str, flag: str = "--language") -> str:
    """Find the benchmark's own name of a language.

    Raises:
        ConfigError: it has no such language.
    """
    aliases = {"c++": "cpp", "javascript": "js", "py": "python"}
    language = aliases.get(name.lower(), name.lower())
    if language not in NAMES:
        raise ConfigError(f"{flag} {name} is unknown; known: {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    return language


def _own_problems(config: EvaluateConfig, languages: tuple[str, ...]) -> list[str]:
    problems = list(number_problems(config))
    if is_first_process() and (problem := unwritable(config.output_dir)):
        problems.append(f"--output-dir {problem}")
    if config.canonical and config.checkpoint:
        problems.append("--canonical judges the benchmark's own solutions; leave out --checkpoint")
    if config.canonical and not config.allow_execution:
        problems.append("--canonical has nothing to do without --allow-execution")
    if not config.checkpoint and not config.allow_execution:
        problems.append("nothing to do: give --checkpoint to generate samples, --allow-execution to judge them")
    if config.translate_from and benchmark_language(config.translate_from) in languages:
        problems.append(f"--translate-from {config.translate_from} is one of the languages to write")
    if config.num_samples > 1 and config.is_greedy:
        problems.append(
            f"--num-samples {config.num_samples} at temperature {config.temperature:g} are all the same; set --temperature"
        )
    return problems


def _with_generation(evaluation: Evaluation, checkpoint: Path, num_processes: int | None) -> Evaluation:
    """Add the prompts and the generation job to an evaluation."""
    config = evaluation.config
    shared = {f.name for f in fields(GenerateConfig)} & {f.name for f in fields(EvaluateConfig)} - {"language"}
    generate = GenerateConfig(**{**{name: getattr(config, name) for name in shared}, "checkpoint": checkpoint})
    job = inference.check(generate, num_processes, [])
    prompter = prompter_of(job, config.prompt_form, config.system_prompt)
    source_language = benchmark_language(config.translate_from) if config.translate_from else None
    source = read_problems(config.data, source_language) if source_language else {}
    by_number = {task.split("/")[-1]: problem for task, problem in source.items()}
    prompts: dict[str, dict[str, Prompt]] = {}
    for language, problems in evaluation.problems.items():
        prompts[language] = {
            task: prompter.translation(by_number[task.split("/")[-1]], source_language, problem, language)
            if source_language
            else prompter.prompt(problem, language)
            for task, problem in problems.items()
        }
    every = list(dict.fromkeys(prompt for of_language in prompts.values() for prompt in of_language.values()))
    shortest = min(len(prompt.tokens) for prompt in every)
    if shortest >= job.model.seq_len:
        raise ConfigError(
            f"{checkpoint}: no prompt fits into the model's context of {job.model.seq_len} tokens; the shortest has "
            f"{shortest}"
        )
    job = replace(job, prompts=every)
    endings = {language: prompter.ending(language) for language in evaluation.problems}
    return replace(evaluation, prompts=prompts, endings=endings, prompt_form=prompter.form, job=job)


def _check_settings(evaluation: Evaluation) -> None:
    """Refuse to mix new samples with samples that were generated otherwise."""
    path = evaluation.folder / SETTINGS_FILE
    if not path.exists():
        return
    old, new = read_json(path).mapping, evaluation.settings()
    changed = [f"{name} was {old.get(name)}, is {value}" for name, value in new.items() if old.get(name) != value]
    if changed:
        raise ConfigError(f"{path}: the samples there were made otherwise: {'; '.join(changed)}; use another folder")
