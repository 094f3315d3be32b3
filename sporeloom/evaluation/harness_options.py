# SPDX-License-Identifier: Apache-2.0
"""Options of generated answers in tasks of the lm-evaluation-harness (`generation_kwargs`): supported, or refused
by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.core.numbers import number_problems
from sporeloom.core.reader import is_a
from sporeloom.inference.config import GenerateJob
from sporeloom.inference.sampling import SamplingConfig

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Equivalent names of one option."""
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "min_new_tokens": int,
    "seed": int,
}
"""Fields of `SamplingConfig` by these names."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "n": (1,),
    "best_of": (1,),
    "early_stopping": (True, False),  # of beams
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "min_p": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "use_cache": (True, False),  # the numbers are the same
}
"""Unsupported options, with the values that have no effect."""


@dataclass(frozen=True)
class AnswerOptions:
    """Options of generated answers."""

    sampling: SamplingConfig
    max_new_tokens: int
    until: tuple[str, ...]


def read_options(given: Mapping[str, Any], job: GenerateJob) -> AnswerOptions:
    """Read the `generation_kwargs` of a request.

    Raises:
        ConfigError: what is not known, not done here, or out of range; all of it at once.
    """
    options = {name: value for name, value in given.items() if value is not None}
    problems = Problems()
    known = ("until", "do_sample", *MAX_TOKENS, *SAMPLING, *NEUTRAL)
    for name, value in options.items():
        if name not in known:
            problems.append(f"generation_kwargs: {name} is not supported{did_you_mean(name, known)}")
        elif name in NEUTRAL and not any(value == other for other in NEUTRAL[name]):
            problems.append(f"generation_kwargs: {name} {value!r} is not supported; leave it out")
    until = problems.of(_until, options.get("until", []))
    most = problems.of(_max_new_tokens, options, job)
    sampling = problems.of(_sampling, options)
    problems.raise_if_any()
    assert until is not None and most is not None and sampling is not None
    if sampling.leaves_none(job.stop_ids, job.tokenizer.vocab_size):
        raise ConfigError("generation_kwargs: min_new_tokens leaves no token to choose")
    return AnswerOptions(sampling, most, until)


def _until(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"generation_kwargs: until must be a text or a list of texts, got {value!r}")
    return tuple(text for text in texts if text)  # an empty one stands for the end token, for the harness


def _max_new_tokens(options: Mapping[str, Any], job: GenerateJob) -> int:
    given = [name for name in MAX_TOKENS if name in options]
    if len({repr(options[name]) for name in given}) > 1:
        raise ConfigError(f"generation_kwargs: {' and '.join(given)} are one option, but differ; keep one of them")
    name = given[0] if given else "--max-new-tokens"
    most, longest = options.get(name, job.config.max_new_tokens), job.model.seq_len
    if not is_a(most, int) or most < 1:
        raise ConfigError(f"generation_kwargs: {name} must be a whole number of at least 1, got {most!r}")
    if most >= longest - len(job.tokenizer.encode("")):
        raise ConfigError(f"{name}: a task needs answers of {most} tokens; the model's context is {longest}")
    return int(most)


def _sampling(options: Mapping[str, Any]) -> SamplingConfig:
    """Whether to sample: by do_sample, or without it by a temperature above 0."""
    problems, values = Problems(), dict[str, Any]()
    for name, kind in SAMPLING.items():
        if name in options and not is_a(options[name], kind):
            problems.append(f"generation_kwargs: {name} must be a number, got {options[name]!r}")
        elif name in options:
            values[name] = kind(options[name])
    values["top_k"] = max(0, values.get("top_k", 0))  # -1 is all, for some
    do_sample = options.get("do_sample")
    if not isinstance(do_sample, bool | None):
        problems.append(f"generation_kwargs: do_sample must be true or false, got {do_sample!r}")
    problems.raise_if_any()
    config = SamplingConfig(**values)
    problems += list(number_problems(config, lambda name: f"generation_kwargs: {name}"))
    if do_sample and config.is_greedy:
        problems.append(
            "generation_kwargs: do_sample needs a temperature above 0, too; 1.0 samples from the model as it is"
        )
    problems.raise_if_any()
    return SamplingConfig(**{**values, "temperature": 0.0}) if do_sample is False else config
