# SPDX-License-Identifier: Apache-2.0
"""A model of this package for the lm-evaluation-harness. Every rank of a job runs the harness with the same
requests, in the same order; one rank has the answers and broadcasts them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lm_eval.tasks
import lm_eval.utils
from jinja2 import StrictUndefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_bytes
from sporeloom.core.lines import first_line
from sporeloom.data.tokenizer import ChatMessage, Prompt
from sporeloom.evaluation.harness_config import Harness, HarnessConfig
from sporeloom.evaluation.harness_options import read_options
from sporeloom.evaluation.written_chats import WrittenChats
from sporeloom.inference.config import GenerateJob
from sporeloom.inference.requests import Failure, PromptScores, Request
from sporeloom.inference.sampling import Sampler, SamplingConfig
from sporeloom.inference.scheduler import Scheduler
from sporeloom.inference.session import Session, open_session
from sporeloom.runtime.engine import Engine

OWN_TASKS = Path(__file__).parent / "tasks"
NAME = re.compile(rb"""^["']?task["']?:[ \t]*["']?([^\s"'#]+)["']?[ \t]*(?:#.*)?\r?$""", re.M)
"""The line of a task file that names its one task."""
OF_SEVERAL = re.compile(rb"""^["']?(?:group|include)["']?:""", re.M)
"""A line that says that a task file needs others."""


class HarnessModel(TemplateLM):
    """The model interface of the harness.

    `session`: that of a model which is in memory already; without it, that of the job's checkpoint.
    """

    def __init__(self, engine: Engine, job: GenerateJob, session: Session | None = None):
        super().__init__()
        self.engine, self.job = engine, job
        self.session: Session = session or open_session(job, engine)
        self.stop = self.session.stop
        self.chats = WrittenChats(job.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.job.tokenizer.eod_id

    @cached_property
    def own_prefix(self) -> list[int]:
        """Tokens that the tokenizer adds before every text."""
        return self.job.tokenizer.encode("")

    @property
    def prefix(self) -> list[int]:
        """Context of a text's first token: the tokenizer's own prefix, or else the token that ends documents."""
        return self.own_prefix or [self.eot_token_id]

    @property
    def prefix_token_id(self) -> int:
        return self.prefix[-1]

    @property
    def tokenizer_name(self) -> str:
        return str(self.job.config.checkpoint)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; with the tokenizer's prefix once, unless that is declined."""
        ids, count = self.chats.encode(string), len(self.own_prefix)
        has_one, has_two = ids[:count] == self.own_prefix, ids[count : 2 * count] == self.own_prefix
        if add_special_tokens is None:  # the text may have the prefix of its own
            return ids[count:] if has_two else ids
        return ids[count:] if has_one and not add_special_tokens else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        messages = [ChatMessage(each["role"], each["content"]) for each in chat_history]
        return self.chats.write(messages, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "" if chat_template else None

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.scored([self._pair(*request.args) for request in requests])

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of its continuation.

        Raises:
            ConfigError: no token of what follows is left, or more than the model reads.
        """
        if context == "":
            before, after = self.prefix, self.tok_encode(continuation, add_special_tokens=False)
            if after[: len(before)] == before:  # written out at the start of the text
                after = after[len(before) :]
        else:
            before, after = self._encode_pair(context, continuation)
        if continuation and not after:
            raise ConfigError(
                f"{continuation[:40]!r} after {context[-40:]!r}: the tokenizer leaves no token of it to score; let the task "
                "put white space between them (target_delimiter)"
            )
        if len(after) > self.job.model.seq_len:
            raise ConfigError(
                f"{continuation[:40]!r}...: {len(after)} tokens to score; the model's context is {self.job.model.seq_len}"
            )
        return before or self.prefix, after

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.scored([(context, continuation) for _, context, continuation in requests])

    def scored(self, asked: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-probability of continuations after their contexts, and whether greedy decoding gives them.

        Raises:
            ConfigError: the model gives no numbers.
        """
        longest = self.job.model.seq_len
        sampler = Sampler(SamplingConfig(), self.job.stop_ids, self.job.tokenizer.vocab_size)
        scheduler = Scheduler(self.session.decoding, self.engine)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(asked)  # of no token
        places: dict[int, int] = {}
        for place, (context, continuation) in enumerate(asked):
            if continuation:  # whose last token is read only as a label, so one more fits
                tokens = [*context, *continuation][-(longest + 1) :]
                places[scheduler.submit(_question(tokens, sampler))] = place
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, Failure):
                    raise ConfigError(f"{self.job.config.checkpoint}: {event.error}")
                if isinstance(event, PromptScores) and event.scores:
                    place = places[event.request]
                    last = event.scores[-len(asked[place][1]) :]
                    total = sum(score.log_probability for score in last)
                    found[place] = total, all(score.top[0][0] == score.token for score in last)
        told: list[Any] = self.engine.broadcast_value(found, self.engine.strategy.mesh.first_rank_of_last_stage)
        return [(float(total), bool(is_greedy)) for total, is_greedy in told]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [list(rolling_windows(tokens, self.prefix, self.job.model.seq_len)) for tokens in texts]
        scores = iter(self.scored([window for text in windows for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers: list[str] = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        asked = [(read_options(requests[places[0]].args[1], self.job), places) for places in alike.values()]
        for options, places in asked:
            self.session.stop = dataclasses.replace(self.stop, stop_texts=options.until)
            prompts = [self._fitting(requests[place].args[0], options.max_new_tokens) for place in places]
            made = self.session.complete(prompts, options.sampling, options.max_new_tokens, places)
            for place, completion in zip(places, made, strict=True):
                answers[place] = completion.text
        self.session.stop = self.stop
        return answers

    def _fitting(self, text: str, most: int) -> Prompt:
        """Tokens of a text, or the last tokens of a long one, which leave room for an answer; the tokenizer's
        prefix stays."""
        ids, room = self.tok_encode(text), self.job.model.seq_len - most
        if len(ids) > room:
            ids = [*self.own_prefix, *ids[len(ids) - (room - len(self.own_prefix)) :]]
        return Prompt(text, tuple(ids or self.prefix))


def _question(tokens: list[int], sampler: Sampler) -> Request:
    return Request(tokens, 0, sampler, lambda generated: True, num_top=1, score_prompt=True)


def rolling_windows(
    tokens: Sequence[int], prefix: Sequence[int], longest: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Split a text into (context, continuation) so that each token is scored once: the first after the prefix,
    those of a further window after as much of the text as the model reads. With a prefix of one token these are
    the harness's windows."""
    first = longest - len(prefix) + 1
    if tokens:
        yield [*prefix], [*tokens[:first]]
    for start in range(first, len(tokens), longest):
        end = min(start + longest, len(tokens))
        yield [*tokens[max(0, end - longest - 1) : start]], [*tokens[start:end]]


def find_tasks(names: Sequence[str], include_path: Path | None) -> tuple[TaskManager, list[str]]:
    """The harness's index of tasks, and the names to request from it.

    It makes one of all its 14,000 files in eight seconds. Single tasks are found in a twentieth of that, by the file that
    names them; groups, tags and files that include others need the index.
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
    """The file of each single task of the harness, by its own index: the first of several."""
    found: dict[str, Path] = {}
    for path in sorted(Path(lm_eval.tasks.__file__).parent.glob("**/*.yaml"), key=Path.as_posix):
        for name in NAME.findall(read_bytes(path)):
            found.setdefault(name.decode(), path)
    return found


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _is_single(path: Path) -> bool:
    text = read_bytes(path) if path.exists() else b""
    return bool(NAME.search(text)) and not OF_SEVERAL.search(text)


def _confine_templates() -> None:
    """Restrict templates of tasks (`doc_to_text: ...`) to the row they format: in the harness's own Jinja an
    expression can get at every module."""
    there = lm_eval.utils.env
    confined = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    confined.filters.update(there.filters)
    lm_eval.utils.env = confined


def evaluate(harness: Harness) -> dict[str, Any] | None:
    """Results and samples of the harness; None on all ranks but one.

    Raises:
        ConfigError: tasks there are none of, or that cannot be read.
    """
    engine = Engine.start(harness.job.strategy)
    return run_tasks(HarnessModel(engine, harness.job), harness.config, *known_tasks(harness.config))


def known_tasks(config: HarnessConfig) -> tuple[TaskManager, list[str]]:
    """The harness's index of tasks, and the names of those of `config` in it.

    Raises:
        ConfigError: tasks there are none of.
    """
    manager, tasks = find_tasks([str(Path(name)) for name in config.tasks], config.include_path)
    unknown = [name for name in tasks if not _is_file(name) and name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--tasks {', '.join(unknown)}: the harness has no such task; --include-path names further ones"
        )
    return manager, tasks


def run_tasks(
    model: HarnessModel, config: HarnessConfig, manager: TaskManager, tasks: Sequence[str]
) -> dict[str, Any] | None:
    """Results and samples of a model that is in memory; None on all ranks but one.

    Args:
        manager: index of tasks, and `tasks` the names in it: see `known_tasks`.

    Raises:
        ConfigError: tasks that cannot be read.
    """
    if not config.trust_remote_code:
        _confine_templates()
    with _errors_of(config):
        found = simple_evaluate(
            model=model,
            tasks=[*tasks],
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            bootstrap_iters=1000,
        )
    return found if model.engine.is_log_rank else None


def load_tasks(config: HarnessConfig, manager: TaskManager, tasks: Sequence[str]) -> None:
    """Load the data of tasks once, for errors to come before other work; `run_tasks` finds them in the cache.

    Raises:
        ConfigError: tasks that cannot be read.
    """
    if not config.trust_remote_code:
        _confine_templates()
    with _errors_of(config):
        manager.load([*tasks])


@contextlib.contextmanager
def _errors_of(config: HarnessConfig) -> Iterator[None]:
    """Raise errors of the harness about its tasks as `ConfigError`."""
    try:
        yield
    except (FileNotFoundError, ConnectionError, ValueError, SecurityError) as error:
        raise ConfigError(f"--tasks {' '.join(config.tasks)}: {first_line(error)}") from None
