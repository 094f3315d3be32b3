# SPDX-License-Identifier: Apache-2.0
"""Samples of a model, written as they are generated; a call continues where the last one ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sporeloom.core.files import read_bytes, write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import split_lines
from sporeloom.core.log import milestone
from sporeloom.core.reader import parse_json
from sporeloom.evaluation.config import SAMPLES_FILE, SETTINGS_FILE, Evaluation, SampleRequest
from sporeloom.inference.session import Completion, open_session
from sporeloom.runtime.engine import Engine

Sample = dict[str, Any]
"""`task_id`, `sample` (its number), `language`, `translate_from` (or null), `prompt_form`, `text`, `finish_reason`."""


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    whole = read_bytes(path).rpartition(b"\n")[0]
    return [parse_json(line, f"{path}:{number}") for number, line in enumerate(split_lines(whole), 1)]


def make_samples(evaluation: Evaluation) -> Engine:
    """Generate the missing samples. All ranks take part, one writes."""
    job = evaluation.job
    assert job is not None
    engine = Engine.start(job.strategy)
    path = evaluation.folder / SAMPLES_FILE
    if engine.is_log_rank:
        _repair(path)
        settings = json_text(evaluation.settings(), indent=1, ensure_ascii=False)
        write_text_atomically(evaluation.folder / SETTINGS_FILE, settings)
    session = None
    for language in evaluation.problems:
        missing = _missing(evaluation, language, engine, path)
        fitting = [wanted for wanted in missing if len(wanted.prompt.tokens) < job.model.seq_len]
        if engine.is_log_rank and len(fitting) < len(missing):
            too_long = [wanted for wanted in missing if len(wanted.prompt.tokens) >= job.model.seq_len]
            milestone(f"{language}: {len({w.task_id for w in too_long})} prompts exceed the context: counted as failed")
            for wanted in too_long:
                _append(path, evaluation, language, wanted, Completion(wanted.prompt.text, finish_reason="length"))
        if not fitting:
            continue
        session = session or open_session(job, engine)
        session.stop = dataclasses.replace(session.stop, rule=evaluation.endings[language])
        limits = [min(job.config.max_new_tokens, job.model.seq_len - len(wanted.prompt.tokens)) for wanted in fitting]
        pieces = session.stream([w.prompt for w in fitting], job.config, limits, [w.stream for w in fitting])
        with tqdm(total=len(fitting), unit="sample", desc=language, disable=not engine.is_log_rank) as bar:
            for piece in pieces:
                if piece.completion.finish_reason:
                    bar.update()
                    if engine.is_log_rank:
                        _append(path, evaluation, language, fitting[piece.place], piece.completion)
    if engine.is_log_rank:
        milestone(f"samples in {path}")
    return engine


def _missing(evaluation: Evaluation, language: str, engine: Engine, path: Path) -> list[SampleRequest]:
    """The samples still to generate, as broadcast by the rank that writes."""
    wanted = evaluation.wanted(language)
    there = {(s["task_id"], s["sample"]) for s in read_samples(path)} if engine.is_log_rank else set()
    flags = np.array([(w.task_id, w.sample) in there for w in wanted], np.int32)
    flags = engine.broadcast(flags, engine.strategy.mesh.first_rank_of_last_stage)
    if engine.is_log_rank and flags.any():
        milestone(f"{language}: {flags.sum()} of {len(wanted)} samples are there already")
    return [w for w, is_there in zip(wanted, flags, strict=True) if not is_there]


def _repair(path: Path) -> None:
    """Remove a last line that was cut off when a run was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = read_bytes(path)
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _append(path: Path, evaluation: Evaluation, language: str, wanted: SampleRequest, completion: Completion) -> None:
    sample = sample_of(evaluation, language, wanted, completion)
    with path.open("a", encoding="utf-8") as file:
        file.write(json_text(sample, ensure_ascii=False) + "\n")


def sample_of(evaluation: Evaluation, language: str, wanted: SampleRequest, completion: Completion) -> Sample:
    """The sample that a completion is."""
    return {
        "task_id": wanted.task_id,
        "sample": wanted.sample,
        "language": language,
        "translate_from": evaluation.config.translate_from,
        "prompt_form": evaluation.prompt_form,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
