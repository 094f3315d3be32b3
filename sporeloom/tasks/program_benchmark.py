# SPDX-License-Identifier: Apache-2.0
"""HumanEval-X, run on the mesh and with the parameters of the network that is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.evaluation.config import EvaluateConfig, Evaluation, benchmark_languages, read_problems
from sporeloom.evaluation.generation import Sample, sample_of
from sporeloom.evaluation.prompter import prompter_of
from sporeloom.evaluation.sandbox import check_isolation
from sporeloom.evaluation.scores import score_samples
from sporeloom.evaluation.toolchains import MissingToolchainError, find_toolchain
from sporeloom.inference.config import GenerateConfig, GenerateJob
from sporeloom.inference.session import Completion
from sporeloom.runtime.engine import Engine
from sporeloom.tasks.benchmarks import MAX_ROWS, open_session
from sporeloom.tasks.one_rank import from_log_rank
from sporeloom.train.config import Run

NAME: Literal["humaneval-x"] = "humaneval-x"


class ProgramEvaluator:
    """Evaluates the present weights on HumanEval-X, as `sporeloom evaluate humaneval-x` does a checkpoint of them: one sample
    a problem, the most likely tokens.

    Raises:
        ConfigError: no such problems, compiler or isolation, or no prompt fits into the model's context.
    """

    def __init__(self, run: Run, engine: Engine, net: nn.Cell, tokenizer: Tokenizer):
        config, folder, num_rows = run.config, run.config.eval_humaneval_x, MAX_ROWS * run.strategy.mesh.dp
        assert folder
        languages = benchmark_languages(config.eval_languages, "--eval-languages")
        check_isolation()
        missing = []
        for language in languages:
            try:
                find_toolchain(language)
            except MissingToolchainError as error:
                missing.append(f"--eval-languages {language}: {error}")
        if missing:
            raise ConfigError(missing)
        asked = GenerateConfig(checkpoint=config.output_dir, max_new_tokens=config.eval_new_tokens, batch_size=num_rows)
        job = GenerateJob(asked, run.family, run.model, run.strategy, tokenizer, [])
        prompter = prompter_of(job, None, None)
        problems = {
            language: dict(list(read_problems(folder, language).items())[: config.eval_limit]) for language in languages
        }
        prompts = {
            language: {task: prompter.prompt(problem, language) for task, problem in of_language.items()}
            for language, of_language in problems.items()
        }
        every = [prompt for of_language in prompts.values() for prompt in of_language.values()]
        if (shortest := min(len(prompt.tokens) for prompt in every)) >= run.model.seq_len:
            raise ConfigError(
                f"--eval-humaneval-x: no prompt fits into the model's context of {run.model.seq_len} tokens; the shortest "
                f"has {shortest}"
            )
        settings = EvaluateConfig(
            benchmark=NAME,
            data=folder,
            output_dir=config.output_dir,
            language=languages,
            k=(1,),
        )
        endings = {language: prompter.ending(language) for language in languages}
        job = replace(job, prompts=every)
        self.evaluation = Evaluation(settings, problems, prompts, endings, prompter.form, job)
        self.job, self.engine, self.session = job, engine, open_session(run, engine, net, job)

    def metrics(self) -> dict[str, float]:
        """pass@1 by language, on all ranks: one judges the programs."""
        samples = {language: self._samples(language) for language in self.evaluation.problems}

        def scores() -> dict[str, float] | str:
            try:
                return {language: self._pass_at_1(language, of_one) for language, of_one in samples.items()}
            except ConfigError as error:
                return error.problems[0]

        told = from_log_rank(self.engine, scores)
        if isinstance(told, str):
            raise ConfigError(told)
        return {f"{NAME}/{language}/pass@1": value for language, value in told.items()}

    def _samples(self, language: str) -> list[Sample]:
        """Samples of all problems; prompts that exceed the context have none, and fail."""
        limit, wanted = self.job.model.seq_len, self.evaluation.wanted(language)
        fitting = [each for each in wanted if len(each.prompt.tokens) < limit]
        self.session.stop = replace(self.session.stop, rule=self.evaluation.endings[language])
        most = [min(self.job.config.max_new_tokens, limit - len(each.prompt.tokens)) for each in fitting]
        found = {each.task_id: Completion(each.prompt.text, finish_reason="length") for each in wanted}
        streams = [each.stream for each in fitting]
        for piece in self.session.stream([each.prompt for each in fitting], self.job.config, most, streams):
            found[fitting[piece.place].task_id] = piece.completion
        return [sample_of(self.evaluation, language, each, found[each.task_id]) for each in wanted]

    def _pass_at_1(self, language: str, samples: list[Sample]) -> float:
        score, _ = score_samples(self.evaluation, language, samples, has_progress=False)
        if score.pass_at is None:
            raise ConfigError(f"--eval-languages {language}: {score.skipped}")
        return score.pass_at["1"]
