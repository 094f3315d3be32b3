# SPDX-License-Identifier: Apache-2.0
"""Judge the samples of an evaluation and report pass@k of each language."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.evaluation.chat import answer_program
from sporeloom.evaluation.checks import Problem, Program
from sporeloom.evaluation.config import RESULTS_FILE, SAMPLES_FILE, SUMMARY_FILE, Evaluation
from sporeloom.evaluation.generation import Sample, read_samples
from sporeloom.evaluation.judge import Verdict, judge_all, pass_at_k
from sporeloom.evaluation.programs import extract, program
from sporeloom.evaluation.sandbox import Limits
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain


@dataclass(frozen=True)
class LanguageScore:
    """Score of a language's samples."""

    language: str
    problems: int = 0
    samples: int = 0
    passed: int = 0
    pass_at: Mapping[str, float] | None = None
    """k -> mean over the problems, for those k that every problem has enough samples for."""
    outcomes: Mapping[str, int] | None = None
    skipped: str = ""
    """Reason why nothing was judged, or empty."""


def judge_samples(evaluation: Evaluation) -> list[LanguageScore]:
    """Run all samples, write a line for each to the results file and the scores to the summary."""
    config = evaluation.config
    scores, lines = [], []
    stored = [] if config.canonical else read_samples(evaluation.folder / SAMPLES_FILE)
    for language, problems in evaluation.problems.items():
        samples = [s for s in stored if s["language"] == language and s["task_id"] in problems]
        if config.canonical:
            samples = [_canonical(task, language, problem) for task, problem in problems.items()]
        score, verdicts = score_samples(evaluation, language, samples)
        scores.append(score)
        lines += [
            {**_key(sample), **asdict(verdict)} for sample, verdict in zip(samples, verdicts, strict=bool(verdicts))
        ]
    _write(evaluation, scores, lines)
    return scores


def score_samples(
    evaluation: Evaluation, language: str, samples: Sequence[Sample], has_progress: bool = True
) -> tuple[LanguageScore, list[Verdict]]:
    """Run the samples of a language. Returns their score and verdicts; none where the language was skipped."""
    verdicts = _verdicts(evaluation, language, samples, has_progress) if samples else "no samples"
    if isinstance(verdicts, str):
        return LanguageScore(language, skipped=verdicts), []
    return _score(language, samples, verdicts, evaluation.config.k), verdicts


def _canonical(task: str, language: str, problem: Problem) -> Sample:
    return {"task_id": task, "sample": 0, "language": language, "solution": problem["canonical_solution"]}


def _key(sample: Sample) -> dict[str, Any]:
    return {name: sample[name] for name in ("task_id", "sample", "language")}


def _program(sample: Sample, problem: Problem) -> Program:
    language = sample["language"]
    if sample.get("prompt_form") == "chat":
        return answer_program(problem, language, sample["text"])
    solution = sample["solution"] if "solution" in sample else extract(sample["text"], language)
    return program(problem, language, solution, bool(sample.get("translate_from")))


def _verdicts(
    evaluation: Evaluation, language: str, samples: Sequence[Sample], has_progress: bool
) -> list[Verdict] | str:
    """The verdict of each sample, or the reason why the language was skipped."""
    config, problems = evaluation.config, evaluation.problems[language]
    try:
        toolchain = find_toolchain(language)
    except MissingToolchainError as error:
        return str(error)
    limits = Limits(memory_bytes=config.memory_limit_mb << 20)
    programs = [_program(sample, problems[sample["task_id"]]) for sample in samples]
    found: dict[Program, Verdict] = {}
    with tqdm(total=len(set(programs)), unit="program", desc=f"{language} tests", disable=not has_progress) as bar:
        for one, verdict in judge_all(programs, toolchain, limits, config.time_limit, config.workers):
            found[one] = verdict
            bar.update()
    return [found[one] for one in programs]


def _score(
    language: str, samples: Sequence[Sample], verdicts: Sequence[Verdict], wanted_k: Sequence[int]
) -> LanguageScore:
    total = Counter(sample["task_id"] for sample in samples)
    passed = Counter(sample["task_id"] for sample, verdict in zip(samples, verdicts, strict=True) if verdict.passed)
    pass_at = {
        str(k): sum(pass_at_k(count, passed[task], k) for task, count in total.items()) / len(total)
        for k in wanted_k
        if k <= min(total.values())
    }
    outcomes = dict(Counter(verdict.status for verdict in verdicts).most_common())
    return LanguageScore(language, len(total), len(samples), sum(passed.values()), pass_at, outcomes)


def _write(evaluation: Evaluation, scores: Sequence[LanguageScore], lines: Sequence[dict[str, Any]]) -> None:
    texts = {
        RESULTS_FILE: "".join(json_text(line, ensure_ascii=False) + "\n" for line in lines),
        SUMMARY_FILE: json_text([asdict(score) for score in scores], indent=1) + "\n",
    }
    for name, text in texts.items():
        try:
            write_text_atomically(evaluation.folder / name, text)
        except OSError as error:
            raise ConfigError(f"{evaluation.folder / name}: cannot be written: {error.strerror}") from None


def table(scores: Sequence[LanguageScore]) -> str:
    """Format the scores as lines for a terminal."""
    ks = sorted({int(k) for score in scores for k in score.pass_at or {}})
    head = ["language", "problems", "samples", "passed", *(f"pass@{k}" for k in ks)]
    rows = [head]
    for score in scores:
        if score.skipped:
            rows.append([score.language, f"skipped: {score.skipped}"])
            continue
        pass_at = score.pass_at or {}
        numbers = [f"{100 * pass_at[str(k)]:.2f}" if str(k) in pass_at else "-" for k in ks]
        rows.append([score.language, str(score.problems), str(score.samples), str(score.passed), *numbers])
    widths = [max((len(row[i]) for row in rows if len(row) == len(head)), default=0) for i in range(len(head))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = row[1:] if len(row) < len(head) else [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)
