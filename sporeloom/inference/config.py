# SPDX-License-Identifier: Apache-2.0
"""Flags of tools/generate.py and their checks: every mistake that can be found before MindSpore is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from sporeloom.checkpoint.model_folder import load_text_config, weight_problems
from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.core.lines import split_lines
from sporeloom.core.numbers import Count, Natural
from sporeloom.data.chat_template import read_variables
from sporeloom.data.documents import decode_text, json_lines
from sporeloom.data.tokenizer import (
    ChatMessage,
    Prompt,
    Tokenizer,
    chat_prompt,
    find_tokenizer,
    folder_tokenizer,
    infill_prompt,
    text_prompt,
)
from sporeloom.inference.cache import KV_CACHE_HELP, CacheName, cache_problems
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.speculation_config import DraftModel, SpeculationFlags, read_draft, speculation_problems
from sporeloom.inference.stopping import StopCondition, at_closed_brace, at_dedent
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.slots import num_slots_for
from sporeloom.models.weight_formats import WEIGHTS_HELP, WeightName
from sporeloom.strategy.checks import launch_problems, model_problems
from sporeloom.strategy.config import SINGLE_DEVICE, Strategy
from sporeloom.strategy.flags import StrategyFlags
from sporeloom.strategy.loader import load_strategy

MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(StrategyFlags):
    """The checkpoint's computation: tokenizer, number type, domain and strategy."""

    heading: ClassVar[str] = "model"
    common: ClassVar[tuple[str, ...]] = ("weights",)

    tokenizer: Path | None = option(None, "tokenizer of the family: a file or a folder (default: the checkpoint's)")
    weights: WeightName = option("float32", WEIGHTS_HELP)
    kv_cache: CacheName = option("auto", KV_CACHE_HELP)
    domain: Natural | None = option(None, "domain of all texts, for models with domain-routed experts (default: none)")

    def read_model(self, checkpoint: Path) -> tuple[str, ModelConfig]:
        """Read the family and the configuration of a checkpoint folder, for texts of the domain.

        Raises:
            ConfigError: it cannot be used, or has no such domain.
        """
        family, model = load_text_config(checkpoint)
        return family, model.with_domain(self.domain)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ComputeFlags, SamplingConfig, SpeculationFlags):
    """One call of tools/generate.py."""

    heading: ClassVar[str] = "text"
    common: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "prompt",
        "prompt_file",
        "interactive",
        "max_new_tokens",
        "stop",
        "chat",
        "json",
    )

    checkpoint: Path = option(..., "checkpoint folder")
    prompt: str | None = option(None, "prompt to continue (default: none)")
    prompt_file: Path | None = option(
        None,
        "file of prompts: one a line, or .jsonl with a `prompt` field (default: standard input, as one prompt)",
    )
    interactive: bool = option(False, "read prompts from the terminal, one after another; one device only")
    max_new_tokens: Count = option(64, "maximum number of new tokens")
    stop: tuple[str, ...] = option((), "texts that end the output and are not part of it (default: none)")
    language: str | None = option(
        None,
        "programming language of the output: its tag precedes the prompt, and the output stops where the "
        "function in the prompt ends (default: none)",
    )
    chat: bool = option(False, "treat each prompt as a user message, in the chat template of the model")
    chat_template_kwargs: str | None = option(
        None,
        "with --chat: JSON object of variables for the chat template, as '{\"enable_thinking\": false}' "
        "(default: none)",
    )
    suffix: str | None = option(
        None, "text after the gap to fill, for models trained to fill in the middle (default: none)"
    )
    stop_ids: tuple[Natural, ...] = option((), "token ids that end the output, besides end-of-document (default: none)")
    batch_size: Count | None = option(
        None, f"maximum number of prompts generated at the same time (default: all, at most {MAX_ROWS})"
    )
    no_cache: bool = option(
        False, "compute all tokens again for each new token instead of using the KV cache, for comparison"
    )
    json: bool = option(False, "print a JSON object for each prompt instead of its text")
    logprobs: bool = option(False, "with --json: print the log-probability of each token")


@dataclass(frozen=True)
class GenerateJob:
    """A valid configuration, with the files it refers to."""

    config: GenerateConfig
    family: str
    model: ModelConfig
    strategy: Strategy
    tokenizer: Tokenizer
    prompts: list[Prompt] = field(repr=False)
    """Empty with --interactive."""
    ending: StopCondition | None = None
    """Function that finds where the language's functions end."""
    draft: DraftModel | None = None
    """With --speculate model."""

    @property
    def num_rows(self) -> int:
        """Number of prompts generated at the same time; the same on every replica."""
        wanted = self.config.batch_size or min(len(self.prompts) or 1, MAX_ROWS)
        dp = self.strategy.mesh.dp
        return -(-wanted // dp) * dp

    @property
    def num_slots(self) -> int:
        """Number of positions in each row of the KV cache."""
        tokens = [len(prompt.tokens) + self.config.max_new_tokens for prompt in self.prompts]
        return num_slots_for(min(max(tokens, default=self.model.seq_len), self.model.seq_len))

    @property
    def stop_ids(self) -> list[int]:
        return sorted({*self.model.end_ids, *self.config.stop_ids})


def check(
    config: GenerateConfig, num_processes: int | None, prompts: list[tuple[str, str]] | None = None
) -> GenerateJob:
    """Read everything that the call refers to and check all of it together.

    Args:
        num_processes: launched already; None: as many as the strategy needs will be.
        prompts: (name, text) of each prompt, instead of those the configuration names.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    family, model = problems.of(config.read_model, config.checkpoint) or (None, None)
    problems += config.problems(model.vocab_size if model else None)
    problems += _own_problems(config, model)
    strategy = problems.of(load_strategy, config.strategy, True) if config.strategy else SINGLE_DEVICE
    if strategy:
        problems += launch_problems(strategy, num_processes) if num_processes is not None else []
        problems += model_problems(strategy, model) if model else []
        problems += weight_problems(config.weights, config.checkpoint, model, strategy.mesh.tp) if model else []
        if config.interactive and strategy.mesh.size > 1:
            problems.append("--interactive runs on one device; use --prompt-file with --strategy")
    problems += speculation_problems(config, model, strategy)
    tokenizer = problems.of(_tokenizer, config, family, model) if family and model else None
    draft = problems.of(_draft, config, family, model) if tokenizer and family and model else None
    language = problems.of(find_language, config.language, family) if config.language and family else None
    named = prompts
    if named is None and strategy:
        named = [] if config.interactive else problems.of(read_prompts, config, strategy)
    if tokenizer and model and config.leaves_none((*model.end_ids, *config.stop_ids), tokenizer.vocab_size):
        problems.append("--banned-tokens, and stop tokens with --min-new-tokens, leave no token to choose")
    if language and named:
        named = [(name, language.tagged(prompt)) for name, prompt in named]
    formed = (problems.of(_all_in_form, config, tokenizer, named or []) if tokenizer else None) or []
    if model and config.max_new_tokens > 0:
        wrong = [p for place in formed for p in prompt_problems(*place, model, config.max_new_tokens)]
        problems += wrong[:8] + ([f"and {len(wrong) - 8} more prompts like these"] if len(wrong) > 8 else [])
        longest = max((len(prompt.tokens) + config.max_new_tokens for _, prompt in formed), default=model.seq_len)
        remedy = "shorten the prompts or --max-new-tokens" if formed else "leave out --interactive"
        problems += draft.context_problems(min(longest, model.seq_len), remedy) if draft else []
    problems.raise_if_any()
    assert family and model and strategy and tokenizer and named is not None
    ending = language.ending if language else None
    return GenerateJob(config, family, model, strategy, tokenizer, [prompt for _, prompt in formed], ending, draft)


def _tokenizer(config: GenerateConfig, family: str, model: ModelConfig) -> Tokenizer:
    return folder_tokenizer(family, config.checkpoint, model, config.tokenizer)


def _draft(config: GenerateConfig, family: str, model: ModelConfig) -> DraftModel | None:
    tokenizer = config.tokenizer or find_tokenizer(family, config.checkpoint)
    return read_draft(config, (family, model), tokenizer, config.domain, config.weights)


def _all_in_form(
    config: GenerateConfig, tokenizer: Tokenizer, named: list[tuple[str, str]]
) -> list[tuple[str, Prompt]]:
    """The prompts in the form of the flags, by name.

    Raises:
        ConfigError: what is wrong with them, each mistake once.
    """
    if not named:  # with --interactive there are no prompts yet
        in_form(config, tokenizer, "?")
    formed, problems = [], list[str]()
    for name, text in named:
        try:
            formed.append((name, in_form(config, tokenizer, text)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return formed


def in_form(config: GenerateConfig, tokenizer: Tokenizer, text: str) -> Prompt:
    """Format a prompt as a user message, or with a gap to fill after it, as the flags say.

    Raises:
        ConfigError: the tokenizer's model was not trained for that.
    """
    if config.chat:
        variables = read_variables("--chat-template-kwargs", config.chat_template_kwargs)
        return chat_prompt(tokenizer, [ChatMessage("user", text)], variables=variables)
    return text_prompt(tokenizer, text) if config.suffix is None else infill_prompt(tokenizer, text, config.suffix)


@dataclass(frozen=True)
class Language:
    """A programming language that a family of models knows by a tag."""

    tagged: Callable[[str], str]
    """Put the tag before a prompt."""
    ending: StopCondition | None
    """Find where the function that the prompt began ends; None: the language has no rule for this."""


def find_language(name: str, family: str) -> Language:
    """Find the language `name` of the family.

    Raises:
        ConfigError: the family knows no languages, or not this one.
    """
    try:
        module = family_module(family, "languages")
    except ModuleNotFoundError:
        raise ConfigError(f"--language: models of {family} have no tags for programming languages") from None
    language = module.ALIASES.get(name.lower(), name.lower())
    if language not in module.TAGS:
        raise ConfigError(
            f"--language {name} is unknown; known: {', '.join(module.TAGS)}{did_you_mean(name, module.TAGS)}"
        )
    endings = {"dedent": at_dedent(), "closed_brace": at_closed_brace()}
    return Language(lambda prompt: module.tagged(prompt, language), endings.get(module.FUNCTION_ENDS.get(language)))


def language_tags(family: str) -> dict[str, str]:
    """Programming languages that a family's models know, with the tag line of each."""
    try:
        return dict(family_module(family, "languages").TAGS)
    except ModuleNotFoundError:
        return {}


def read_prompts(config: GenerateConfig, strategy: Strategy) -> list[tuple[str, str]]:
    """Read the prompts, as (where it stands, text).

    Raises:
        ConfigError: no prompt, a file that cannot be read, text that is not UTF-8.
    """
    if config.prompt is not None:
        try:
            config.prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError("--prompt: not UTF-8 text") from None
        return [("--prompt", config.prompt)]
    if path := config.prompt_file:
        text = decode_text(path)
        if path.suffix == ".jsonl":
            named = [(f"{path}:{number}", value) for number, value in json_lines(path, text, "prompt")]
        else:
            named = [(f"{path}:{n}", line) for n, line in enumerate(split_lines(text), 1) if line.strip()]
        if not named:
            raise ConfigError(f"{path}: contains no prompt")
        return named
    if strategy.mesh.size > 1:
        raise ConfigError("several processes cannot share standard input; give --prompt or --prompt-file")
    if sys.stdin.isatty():
        raise ConfigError("no prompt; give --prompt, --prompt-file or --interactive, or pipe a text in")
    try:
        return [("standard input", sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r"))]
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: not UTF-8 text ({error.reason} at byte {error.start})") from None


def prompt_problems(name: str, prompt: Prompt, model: ModelConfig, max_new_tokens: int) -> list[str]:
    """List the reasons why a prompt cannot be continued."""
    length = len(prompt.tokens)
    if length == 0:
        return [f"{name}: contains no token"]
    if length >= model.seq_len:
        return [f"{name}: {length} tokens fill the model's context of {model.seq_len}; shorten it"]
    if length + max_new_tokens > model.seq_len:
        return [
            f"{name}: {length} tokens and --max-new-tokens {max_new_tokens} exceed the model's context of "
            f"{model.seq_len}; use at most --max-new-tokens {model.seq_len - length}"
        ]
    return []


def _own_problems(config: GenerateConfig, model: ModelConfig | None) -> list[str]:
    problems: list[str] = []
    sources = [config.prompt is not None, config.prompt_file is not None, config.interactive]
    if sum(sources) > 1:
        problems.append("--prompt, --prompt-file and --interactive exclude each other")
    problems += cache_problems(config.kv_cache, model) if model else []
    if config.kv_cache != "auto" and config.no_cache:
        problems.append(f"--kv-cache {config.kv_cache} has no effect with --no-cache; leave one of them out")
    if config.num_drafts and config.no_cache:
        problems.append(f"--speculate {config.speculate} drafts into the KV cache; leave out --no-cache")
    if config.min_new_tokens > config.max_new_tokens:
        problems.append(
            f"--min-new-tokens {config.min_new_tokens} is more than --max-new-tokens {config.max_new_tokens}"
        )
    if config.interactive and config.language:
        problems.append("--interactive takes texts of one line; use --prompt or --prompt-file with --language")
    if config.interactive and config.json:
        problems.append("--interactive prints text; leave out --json")
    if config.chat + (config.suffix is not None) + bool(config.language) > 1:
        problems.append("--chat, --suffix and --language each format the prompt; give one of them")
    if config.chat_template_kwargs is not None and not config.chat:
        problems.append("--chat-template-kwargs is for --chat; add --chat")
    if config.logprobs and not config.json:
        problems.append("--logprobs is part of the --json output; add --json")
    if "" in config.stop:
        problems.append("--stop: an empty text would end every output")
    for token in config.stop_ids:
        if model and token >= model.vocab_size:
            problems.append(f"--stop-ids: {token} is outside the vocabulary of {model.vocab_size}")
    return problems
