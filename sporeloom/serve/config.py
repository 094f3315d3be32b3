# SPDX-License-Identifier: Apache-2.0
"""Flags of `sporeloom serve` and their checks: every mistake that can be found before MindSpore is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from sporeloom.checkpoint.adapters import Adapter, empty_adapter
from sporeloom.checkpoint.model_folder import weight_problems
from sporeloom.core.command_line import argument, option
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.lines import split_lines
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, number_problems
from sporeloom.data.documents import decode_text
from sporeloom.data.tokenizer import Tokenizer, find_tokenizer, folder_tokenizer
from sporeloom.inference.cache import cache_problems
from sporeloom.inference.config import ComputeFlags
from sporeloom.inference.formats import CALLS, PLAIN, REASONING, ChatFormat, chat_format
from sporeloom.inference.pooling import Pooling
from sporeloom.inference.speculation_config import DraftModel, SpeculationFlags, read_draft, speculation_problems
from sporeloom.models.config import ModelConfig
from sporeloom.serve.hosts import AllowedHosts, AllowedOrigins
from sporeloom.serve.listening import listen
from sporeloom.serve.lora_modules import read_module
from sporeloom.serve.prefix_cache_flags import prefix_cache_problems
from sporeloom.strategy.checks import launch_problems, model_problems
from sporeloom.strategy.config import SINGLE_DEVICE, Strategy
from sporeloom.strategy.loader import load_strategy

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "llguidance")
CHUNK, MIXED_CHUNK = 64, 10
"""Tokens of a prompt between two tokens of the others; in mixed batches as many as let these take at most twice as long, at
350M on two cores (benchmarks/serve.py)."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ComputeFlags, SpeculationFlags):
    """One call of `sporeloom serve`."""

    heading: ClassVar[str] = "server"
    common: ClassVar[tuple[str, ...]] = (
        "host",
        "port",
        "api_key",
        "served_model_name",
        "max_num_seqs",
        "max_model_len",
    )

    checkpoint: Path = argument("checkpoint folder")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine, best with --api-key")
    port: Natural = option(8000, "port to listen on; 0: any free port, which is printed")
    api_key: str | None = option(None, "key that clients must send as `Authorization: Bearer KEY` (default: none)")
    api_key_file: Path | None = option(
        None,
        "file with a key a line, each for another client, besides --api-key; clients whose requests wait take "
        "turns (default: none)",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host names that clients may use besides localhost and --host (with 0.0.0.0: any address of this "
        "machine, and its name); *.example.com: all subdomains, *: any (default: none)",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "web pages besides the server's own that browsers may let use the server, as https://HOST:PORT; *: "
        "any (default: none)",
    )
    served_model_name: str | None = option(
        None, "name of the model for clients (default: name of the checkpoint folder, or of its run)"
    )
    max_num_seqs: Count = option(
        8,
        "maximum number of sequences generated at the same time; each choice of a request is one, and the others wait",
    )
    max_queue: Count = option(
        256,
        "maximum number of waiting sequences; further requests get status 429, and those that can never fit get 400",
    )
    max_model_len: Count | None = option(
        None, "maximum number of tokens in prompt and answer (default: the model's maximum context length)"
    )
    prefill_chunk: Count | None = option(
        None,
        f"number of prompt tokens prefilled between two decode steps (default: {MIXED_CHUNK} with compiled "
        f"kernels, else {CHUNK})",
    )
    prefix_cache_gb: NotNegative = option(
        1.0,
        "memory in GB, on all devices together, for keys and values of prompts that others may begin with; 0: only "
        "rows that are free now",
    )
    prefix_cache_dir: Path | None = option(
        None,
        "folder for blocks of the prefix cache that leave the memory, or are in it when the server stops; later servers "
        "with the same weights, flags, machine and versions find them; one CPU device only (default: none)",
    )
    prefix_cache_dir_gb: Positive | None = option(
        None,
        "with --prefix-cache-dir: maximum size of its files in GB; the least recently used are removed (default: 10)",
    )
    request_timeout: Positive = option(600.0, "seconds after which a request is aborted")
    max_body_kb: Count = option(1024, "maximum size of a request in KB")
    log_format: Literal["text", "json"] = option(
        "text", "json: log each request as a line of JSON on stdout, with counts and times, without what it says"
    )
    embeddings: Pooling | None = option(
        None,
        "serve /v1/embeddings and /rerank, whose vectors are the last token's state, or the mean of all tokens' "
        "(default: not served)",
    )
    response_store_mb: Natural = option(
        64, "MB of memory for responses that later ones continue (`previous_response_id`); 0: none are kept"
    )
    drain_timeout: Positive = option(30.0, "seconds that open requests may take to finish after the server is stopped")
    tool_call_parser: str = option(
        "auto",
        f"format of the model's tool calls: {', '.join(CALLS)}, none, or auto: that of its chat template",
    )
    reasoning_parser: str = option(
        "auto",
        f"format of the model's reasoning: {', '.join(REASONING)}, none, or auto: that of its chat template",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters as NAME=FOLDER; clients choose them by NAME as their model, and requests of all are "
        "batched together (default: none)",
    )
    runtime_lora_folder: Path | None = option(
        None,
        "folder from which clients may load adapters while the server runs, with /v1/load_lora_adapter (default: none: "
        "they may not)",
    )
    max_loras: Count | None = option(
        None,
        "with --runtime-lora-folder: maximum number of adapters that are loaded so at the same time, for which memory is "
        "reserved (default: 1)",
    )
    max_lora_rank: Count | None = option(
        None, "with --runtime-lora-folder: maximum rank of these adapters (default: 16)"
    )


@dataclass(frozen=True)
class ServedModel:
    """A model name for clients: the checkpoint's, or the checkpoint with adapters."""

    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Tokens that end its texts."""
    adapter: int = 0
    """Number among `ServeJob.adapters`, counted from 1; 0: no adapters. Those that are loaded later have further ones, each
    once."""
    form: ChatFormat = PLAIN
    """Format of its answers to conversations."""


@dataclass(frozen=True)
class ServeJob:
    """A valid configuration, with the files it refers to."""

    config: ServeConfig
    family: str
    model: ModelConfig
    strategy: Strategy
    models: tuple[ServedModel, ...]
    """The checkpoint's model, then one for each of `adapters`, in this order."""
    adapters: tuple[Adapter, ...] = ()
    file_keys: tuple[str, ...] = ()
    """Keys of --api-key-file."""
    draft: DraftModel | None = None
    """With --speculate model."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's model for clients."""
        return self.models[0].name

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys of the clients, each once; none: everyone is served."""
        own = () if self.config.api_key is None else (self.config.api_key,)
        return tuple(dict.fromkeys((*own, *self.file_keys)))

    @property
    def num_reserved(self) -> int:
        """Number of adapters that can be loaded at runtime."""
        return (self.config.max_loras or 1) if self.config.runtime_lora_folder else 0

    @property
    def max_lora_rank(self) -> int:
        """Maximum rank of adapters that are loaded at runtime."""
        return self.config.max_lora_rank or 16

    @property
    def adapter_slots(self) -> tuple[Adapter, ...]:
        """The adapters, then empty ones, in whose place others are loaded at runtime."""
        empty = empty_adapter(self.model, self.max_lora_rank) if self.num_reserved else None
        return self.adapters + ((empty,) * self.num_reserved if empty else ())

    @property
    def num_rows(self) -> int:
        """Number of requests generated at the same time; the same on every replica."""
        dp = self.strategy.mesh.dp
        return -(-self.config.max_num_seqs // dp) * dp

    @property
    def max_texts(self) -> int:
        """Maximum number of texts that wait or are generated at the same time."""
        return self.config.max_queue + self.num_rows

    @property
    def max_model_len(self) -> int:
        return min(self.config.max_model_len or self.model.seq_len, self.model.seq_len)


def check(config: ServeConfig, num_processes: int | None, rank: int = 0) -> ServeJob:
    """Read everything that the call refers to and check all of it together.

    Args:
        num_processes: launched already; None: as many as the strategy needs will be.
        rank: of this process among them.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        problems.append(f"{', '.join(missing)} missing: pip install -e '.[serve]'")
    problems += number_problems(config)
    family, model = problems.of(config.read_model, config.checkpoint) or (None, None)
    strategy = problems.of(load_strategy, config.strategy, True) if config.strategy else SINGLE_DEVICE
    if strategy:
        problems += launch_problems(strategy, num_processes) if num_processes is not None else []
        problems += model_problems(strategy, model) if model else []
        problems += weight_problems(config.weights, config.checkpoint, model, strategy.mesh.tp) if model else []
    problems += cache_problems(config.kv_cache, model) if model else []
    models: list[ServedModel] = []
    adapters: list[Adapter] = []
    problems += speculation_problems(config, model, strategy)
    if config.has_mtp and (config.lora_modules or config.runtime_lora_folder):
        problems.append(
            "--speculate mtp drafts without adapters; leave it out, or --lora-modules and --runtime-lora-folder"
        )
    draft = None
    if family and model:
        if tokenizer := problems.of(folder_tokenizer, family, config.checkpoint, model, config.tokenizer):
            models.append(ServedModel(_name(config), tokenizer, model.end_ids))
            problems.of(chat_format, tokenizer, config.tool_call_parser, config.reasoning_parser)
            draft = problems.of(_read_draft, config, family, model)
        for word in config.lora_modules:
            if found := problems.of(_read_word, word, config, family, model, models):
                adapters.append(found[-1])
                models.append(ServedModel(*found[:-1], len(adapters)))
        if config.max_model_len and config.max_model_len > model.seq_len:
            problems.append(
                f"--max-model-len {config.max_model_len} is more than the model's context of {model.seq_len}"
            )
    problems += _runtime_lora_problems(config) + prefix_cache_problems(config, model, strategy, CHUNK)
    problems.of(AllowedHosts, config.host, config.allowed_hosts)
    problems.of(AllowedOrigins, config.allowed_origins)
    keys = problems.of(_read_keys, config)
    # Of several processes one listens: the others may be on other machines, and find its port taken on this one.
    listens = num_processes is None or (strategy and rank == strategy.mesh.first_rank_of_last_stage)
    if listens and (opened := problems.of(listen, config.host, config.port)):
        opened.close()
    names = [each.name for each in models]
    problems += [f"--lora-modules: {name} names two models" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems.raise_if_any()
    assert family and model and strategy and models
    formats = config.tool_call_parser, config.reasoning_parser
    models = [replace(each, form=chat_format(each.tokenizer, *formats)) for each in models]
    return ServeJob(config, family, model, strategy, tuple(models), tuple(adapters), keys or (), draft)


def _read_draft(config: ServeConfig, family: str, model: ModelConfig) -> DraftModel | None:
    """Read the draft model, if there is one.

    Raises:
        ConfigError: it cannot draft for this model.
    """
    tokenizer = config.tokenizer or find_tokenizer(family, config.checkpoint)
    draft = read_draft(config, (family, model), tokenizer, config.domain, config.weights)
    if draft:
        longest = min(config.max_model_len or model.seq_len, model.seq_len)
        if wrong := draft.context_problems(longest, f"give --max-model-len {draft.model.seq_len}"):
            raise ConfigError(wrong)
    return draft


def _read_keys(config: ServeConfig) -> tuple[str, ...]:
    """Read --api-key-file, and check all keys.

    Raises:
        ConfigError: one that no header can hold, or a file without any.
    """
    found = [("--api-key", config.api_key)] if config.api_key is not None else []
    if path := config.api_key_file:
        lines = [line for line in split_lines(decode_text(path)) if line.strip()]
        if not lines:
            raise ConfigError(f"--api-key-file {path}: contains no key")
        found += [(f"--api-key-file {path}: line {number}", line) for number, line in enumerate(lines, 1)]
    wrong = [place for place, key in found if not (key.isascii() and key.isprintable() and key.strip() == key != "")]
    if wrong:
        raise ConfigError([f"{place} must be of ASCII characters, without spaces around it" for place in wrong])
    return tuple(key for place, key in found if place != "--api-key")


def _name(config: ServeConfig) -> str:
    """Name of the checkpoint's model."""
    folder = config.checkpoint.resolve()
    return config.served_model_name or (folder.parent if folder.name == "checkpoint" else folder).name


def _runtime_lora_problems(config: ServeConfig) -> list[str]:
    """List what is wrong with the flags for adapters that are loaded at runtime."""
    folder = config.runtime_lora_folder
    if folder is not None:
        return [] if folder.is_dir() else [f"--runtime-lora-folder {folder}: there is no such folder"]
    flags = {"--max-loras": config.max_loras, "--max-lora-rank": config.max_lora_rank}
    return [
        f"{name} {value} is for adapters that are loaded at runtime; add --runtime-lora-folder FOLDER"
        for name, value in flags.items()
        if value is not None
    ]


def _read_word(
    word: str, config: ServeConfig, family: str, model: ModelConfig, known: Sequence[ServedModel]
) -> tuple[str, Tokenizer, tuple[int, ...], Adapter]:
    """Read name, tokenizer, stop ids and adapters of one NAME=FOLDER; `known`: the checkpoint's model, if it is valid.

    Raises:
        ConfigError: no such folder, or adapters of another model.
    """
    name, _, place = word.partition("=")
    if not name or not place:
        raise ConfigError(f"--lora-modules {word}: write NAME=FOLDER")

    def tokenizer() -> Tokenizer:
        return known[0].tokenizer if known else folder_tokenizer(family, config.checkpoint, model, config.tokenizer)

    return name, *read_module(f"--lora-modules {word}", Path(place), config.checkpoint, family, model, tokenizer)
