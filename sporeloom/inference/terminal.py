# SPDX-License-Identifier: Apache-2.0
"""Generated text at the terminal: streamed, as JSON lines, or interactively."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.log import counted, milestone
from sporeloom.data.tokenizer import Prompt
from sporeloom.inference.config import GenerateJob, in_form, prompt_problems
from sporeloom.inference.sampling import finite
from sporeloom.inference.session import Completion, Session, open_session
from sporeloom.runtime.engine import Engine


def run(job: GenerateJob) -> None:
    """Run the call that tools/generate.py's flags describe."""
    if job.strategy.mesh.size == 1:
        # Inside a graph MindSpore turns Ctrl-C into SIGTERM; several processes may well end by that, msrun sends it too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine = Engine.start(job.strategy)
    session = open_session(job, engine)
    if job.config.interactive:
        _converse(session, job)
    elif job.config.json:
        _print_json(session, job)
    else:
        _print_text(session, job, job.prompts)


def _print_json(session: Session, job: GenerateJob) -> None:
    for completion in session.complete(job.prompts, job.config, job.config.max_new_tokens):
        values: dict[str, Any] = {
            "prompt": completion.prompt,
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "prefill_s": completion.prefill_s,
            "time_per_token_s": completion.time_per_token_s,
            "cache_bytes": session.cache_bytes,
        }
        if job.config.logprobs:
            values["log_probabilities"] = [finite(value) for value in completion.log_probabilities]
        if session.engine.is_log_rank:
            print(json_text(values, ensure_ascii=False), flush=True)


def _print_text(session: Session, job: GenerateJob, prompts: list[Prompt]) -> None:
    """Stream the first unfinished prompt's text; that of the others is shown when their turn comes."""
    shown, waiting = 0, [""] * len(prompts)
    completions: dict[int, Completion] = {}
    header = "--- {} ---\n" if len(prompts) > 1 else ""
    say = _say if session.engine.is_log_rank else _say_nothing
    say(header.format(prompts[0].text))
    for piece in session.stream(prompts, job.config, job.config.max_new_tokens):
        completions[piece.place] = piece.completion
        waiting[piece.place] += piece.text
        say(waiting[shown])
        waiting[shown] = ""
        while shown in completions and completions[shown].finish_reason:
            shown += 1
            say("\n" if shown == len(prompts) else "\n" + header.format(prompts[shown].text) + waiting[shown])
            if shown == len(prompts):
                break
            waiting[shown] = ""
    if session.engine.is_log_rank:
        milestone(_summary(list(completions.values()), session))


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _say_nothing(text: str) -> None:
    pass


def _summary(completions: list[Completion], session: Session) -> str:
    tokens = sum(len(completion.tokens) for completion in completions)
    prefill = max(completion.prefill_s for completion in completions)
    times = [completion.time_per_token_s for completion in completions if completion.time_per_token_s is not None]
    reasons = sorted({str(completion.finish_reason) for completion in completions})
    text = f"{counted(tokens, 'token', 'tokens')} ({', '.join(reasons)}), prefill {prefill * 1e3:.0f} ms"
    if times:
        text += f", {sum(times) / len(times) * 1e3:.1f} ms a token"
    by = ", compiled kernels" if session.decoding.has_kernels else ""
    text += f", cache {session.cache_bytes / 2**20:.1f} MiB{by}"
    if drafts := session.speculation:
        text += f"; {drafts.accepted} of {counted(drafts.drafted, 'drafted token', 'drafted tokens')} accepted"
    return text


def _converse(session: Session, job: GenerateJob) -> None:
    milestone("one text a line; end with Ctrl-D")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")  # as in files, see `sporeloom.core.lines`
    while True:
        try:
            text = input("> ").removesuffix("\r")
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        try:
            prompt = in_form(job.config, job.tokenizer, text)
        except ConfigError as error:  # a chat template refuses it
            milestone(error.problems[0])
            continue
        problems = prompt_problems("this text", prompt, job.model, job.config.max_new_tokens)
        if problems:
            milestone(problems[0])
        else:
            _print_text(session, job, [prompt])
