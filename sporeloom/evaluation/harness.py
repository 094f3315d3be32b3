# SPDX-License-Identifier: Apache-2.0
"""A model of ours for the lm-evaluation-harness. Every rank of a job runs the harness and asks the same, in the same order;
one rank knows the answers and tells the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sporeloom.data.tokenizer import ChatMessage, chat_prompt
from sporeloom.errors import ConfigError
from sporeloom.evaluation.harness_config import Harness
from sporeloom.inference.config import GenerateJob
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import PromptScores, Request, Scheduler
from sporeloom.inference.session import Session, open_session
from sporeloom.runtime.engine import Engine

NEWLINE = "\n"
OWN_TASKS = Path(__file__).parent / "tasks"
NAME = re.compile(rb"""^["']?task["']?:[ \t]*["']?([^\s"'#]+)["']?[ \t]*(?:#.*)?\r?$""", re.M)
"""The line of a task file that names its one task."""
OF_SEVERAL = re.compile(rb"""^["']?(?:group|include)["']?:""", re.M)
"""A line that says that a task file needs others."""


class HarnessModel(TemplateLM):
    """What the harness asks of a model."""

    def __init__(self, engine: Engine, job: GenerateJob):
        super().__init__()
        self.engine, self.job = engine, job
        self.session: Session = open_session(job, engine)
        self.stop = self.session.stop

    @property
    def eot_token_id(self) -> int:
        return self.job.tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.job.config.checkpoint)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.job.tokenizer.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return chat_prompt(self.job.tokenizer, [ChatMessage(each["role"], each["content"]) for each in chat_history])

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "" if chat_template else None

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [(context, continuation) for _, context, continuation in requests]
        return self.scored(asked)

    def scored(self, asked: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """How likely continuations are after their contexts, and whether they are what greedy decoding gives."""
        longest = self.job.model.seq_len
        sampler = Sampler(SamplingConfig(), self.job.stop_ids, self.job.tokenizer.vocab_size)
        scheduler = Scheduler(self.session.decoding, self.engine)
        wanted: dict[int, int] = {}
        for context, continuation in asked:
            # The last token is read only as a label, so one more fits.
            tokens = [*context, *continuation][-(longest + 1) :]
            wanted[scheduler.submit(_question(tokens, sampler))] = min(len(continuation), len(tokens) - 1)
        found: dict[int, tuple[float, bool]] = {}
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, PromptScores) and event.scores:
                    last = event.scores[-wanted[event.request] :]
                    total = sum(score.log_probability for score in last)
                    found[event.request] = (total, all(score.top[0][0] == score.token for score in last))
        told: list[Any] = [found[number] for number in range(len(asked))] if self.engine.is_log_rank else []
        told = self.engine.share(told, self.engine.strategy.mesh.first_rank_of_last_stage)
        return [(float(total), bool(is_greedy)) for total, is_greedy in told]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        longest, windows = self.job.model.seq_len, list[list[Any]]()
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, longest, context_len=1)
            windows.append([make_disjoint_window(window) for window in rolling])
        scores = iter(self.scored([window for text in windows for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers: list[str] = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        for places in alike.values():
            settings = dict(requests[places[0]].args[1])
            until = settings.get("until") or []
            stop = [until] if isinstance(until, str) else [text for text in until if text]
            most = int(settings.get("max_gen_toks", self.job.config.max_new_tokens))
            temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
            sampling = SamplingConfig(temperature=temperature, top_p=float(settings.get("top_p", 1.0)))
            self.session.stop = dataclasses.replace(self.stop, stop_texts=tuple(stop))
            prompts = [self._fitting(requests[place].args[0], most) for place in places]
            for place, completion in zip(places, self.session.complete(prompts, sampling, most), strict=True):
                answers[place] = completion.text
        self.session.stop = self.stop
        return answers

    def _fitting(self, text: str, most: int) -> str:
        """The end of a text that leaves room for an answer."""
        room = self.job.model.seq_len - most
        if room < 1:
            raise ConfigError(f"a task wants answers of {most} tokens; the model's context is {self.job.model.seq_len}")
        ids = self.tok_encode(text)
        if len(ids) > room:
            text = self.job.tokenizer.decode(ids[-room:])
        while len(ids := self.tok_encode(text)) > room:  # what is decoded may be read as more tokens
            text = text[len(ids) - room :]
        return text


def _question(tokens: list[int], sampler: Sampler) -> Request:
    return Request(tokens, 0, sampler, lambda generated: True, num_top=1, score_prompt=True)


def find_tasks(names: Sequence[str], include_path: Path | None) -> tuple[TaskManager, list[str]]:
    """The harness's index of tasks, and what to ask it for.

    It makes one of all its 14,000 files in eight seconds. Single tasks are found in a twentieth of that, by the file that
    names them; groups, tags and what includes other files want the index.
    """
    further = [str(folder) for folder in (OWN_TASKS, include_path) if folder]
    manager = TaskManager(include_path=further, include_defaults=False)
    single = set(manager.all_subtasks) | {name for name in names if _is_file(name) and _is_single(Path(name))}
    if single.issuperset(names):
        return manager, list(names)
    shipped = {name: path for name, path in shipped_tasks().items() if name not in manager.all_tasks}
    if not (single | shipped.keys()).issuperset(names):
        return TaskManager(include_path=further), list(names)
    return manager, [name if name in single else str(shipped[name]) for name in names]


def shipped_tasks() -> dict[str, Path]:
    """The file of each single task that comes with the harness, as its own index has them: of several the first."""
    found: dict[str, Path] = {}
    for path in sorted(Path(lm_eval.tasks.__file__).parent.glob("**/*.yaml"), key=Path.as_posix):
        for name in NAME.findall(path.read_bytes()):
            found.setdefault(name.decode(), path)
    return found


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _is_single(path: Path) -> bool:
    text = path.read_bytes() if path.exists() else b""
    return bool(NAME.search(text)) and not OF_SEVERAL.search(text)


def evaluate(harness: Harness) -> dict[str, Any] | None:
    """Results and samples as the harness gives them; None on all ranks but one.

    Raises:
        ConfigError: tasks there are none of, or that cannot be read.
    """
    config = harness.config
    manager, tasks = find_tasks([str(Path(name)) for name in config.tasks], config.include_path)
    unknown = [name for name in tasks if not _is_file(name) and name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--tasks {', '.join(unknown)}: the harness has no such task; --include-path names further ones"
        )
    engine = Engine.start(harness.job.strategy)
    model = HarnessModel(engine, harness.job)
    try:
        found = simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            bootstrap_iters=1000,
        )
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ConfigError(f"--tasks {' '.join(config.tasks)}: {str(error).strip().partition(NEWLINE)[0]}") from None
    return found if engine.is_log_rank else None
