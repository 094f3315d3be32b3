# SPDX-License-Identifier: Apache-2.0
"""Tasks of the lm-evaluation-harness, run on the mesh and with the parameters of the network that is trained."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator

import numpy as np
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import Tokenizer
from sporeloom.evaluation.harness import HarnessModel, known_tasks, load_tasks, run_tasks
from sporeloom.evaluation.harness_config import HarnessConfig, code_of_tasks, rows
from sporeloom.inference.config import GenerateConfig, GenerateJob
from sporeloom.inference.mixed import cached
from sporeloom.inference.model import CACHE, build_model
from sporeloom.inference.session import Session, StopConditions
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run

MAX_ROWS = 8
"""Maximum number of texts that a replica processes at the same time: each has a KV cache."""


class TaskEvaluator:
    """Evaluates the present weights on tasks, as `sporeloom evaluate lm-eval` does a checkpoint of them.

    Raises:
        ConfigError: there is no such task, one runs code, or its data cannot be loaded.
    """

    def __init__(self, run: Run, engine: Engine, net: nn.Cell, tokenizer: Tokenizer):
        config, num_rows = run.config, MAX_ROWS * run.strategy.mesh.dp
        self.config = HarnessConfig(
            benchmark="lm-eval",
            checkpoint=config.output_dir,
            tasks=config.eval_tasks,
            include_path=config.eval_include_path,
            num_fewshot=config.eval_num_fewshot,
            limit=config.eval_limit,
            batch_size=num_rows,
        )
        if problems := code_of_tasks(self.config):
            raise ConfigError(map(_by_own_flags, problems))
        with _own_flags():
            self.tasks = known_tasks(self.config)
            with _same_random_states():  # before the first step, which an error would lose
                load_tasks(self.config, *self.tasks)
        asked = GenerateConfig(
            checkpoint=config.output_dir, max_new_tokens=self.config.max_new_tokens, batch_size=num_rows
        )
        job = GenerateJob(asked, run.family, run.model, run.strategy, tokenizer, [])
        self.engine, self.model = engine, HarnessModel(engine, job, open_session(run, engine, net, job))

    def metrics(self) -> dict[str, float]:
        """Scores and their standard errors, by task and metric. Random states stay as they are."""
        with _own_flags(), _same_random_states(), contextlib.redirect_stderr(io.StringIO()):
            found = run_tasks(self.model, self.config, *self.tasks)
        metrics: dict[str, float] = {}
        for task, name, value, error in rows(found["results"]) if found else ():
            metrics[f"{task}/{name}"] = value
            if error is not None:
                metrics[f"{task}/{name}_stderr"] = error
        return metrics


def open_session(run: Run, engine: Engine, net: nn.Cell, job: GenerateJob) -> Session:
    """Open a session with the parameters of the network that is trained."""
    shape = (job.num_rows, job.num_slots)
    model = build_model(run.family, run.model, run.strategy, shape, weights_of=net.model, lora=run.lora)
    for parameter in model.get_parameters():
        if CACHE in parameter.name:
            parameter.init_data()
    return Session(engine, cached(engine, model, run.model, *shape), StopConditions(job.tokenizer, job.stop_ids))


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
    """Raise problems with the flags of a run."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(map(_by_own_flags, error.problems)) from None


def _by_own_flags(problem: str) -> str:
    """A problem of `sporeloom evaluate lm-eval`, with the flags of a run."""
    for flag, own in (("--tasks", "--eval-tasks"), ("--include-path", "--eval-include-path")):
        problem = problem.replace(flag, own)
    return problem.replace("--trust-remote-code", "`sporeloom evaluate lm-eval --trust-remote-code`")


@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    """Restore the states of Python's and NumPy's global random numbers, which the harness seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
