# SPDX-License-Identifier: Apache-2.0
"""Flags of `sporeloom dry-run`, validated before MindSpore is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sporeloom.core.command_line import Overwrite, option, output
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.numbers import Count, Positive, number_problems
from sporeloom.models.config import AttentionKernel, ComputeDtype, ModelConfig
from sporeloom.models.config_file import named_model, with_model_folder
from sporeloom.models.family import with_precision
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.task import TaskFlags, TrainedTask, task_of, task_problems, trained_model
from sporeloom.strategy.checks import adapter_problems, batch_problems, group_problems, model_problems, state_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.flags import StateFlags
from sporeloom.strategy.launching import DEVICES_PER_SERVER
from sporeloom.strategy.loader import load_strategy

TIMED_TASKS = ("pretraining", "sft", "reward", "simpo", "orpo")
"""Tasks whose step is that of one model."""


@dataclass(frozen=True, kw_only=True)
class DryRunConfig(Overwrite, StateFlags, TaskFlags):
    """Flags of `sporeloom dry-run`."""

    common: ClassVar[tuple[str, ...]] = (
        "model",
        "size",
        "config",
        "strategy",
        "ranks",
        "batch_size",
        "fast",
        "memory",
        "time",
        "cluster",
        "html",
        "json",
    )
    model: str = option("pangu", "model family, or a model folder, also of Hugging Face")
    size: str = option("tiny", "built-in size of the family")
    config: Path | None = option(
        None, "JSON file with model configuration fields that replace those of the size (default: none)"
    )
    strategy: Path = option(..., "strategy file, or name of a built-in strategy")
    ranks: str = option("0,last", "ranks to report, for example 0,37,last, or all")
    batch_size: Count | None = option(
        None,
        "sequences of one step over all devices, two for each pair of reward and dpo (default: one for each microbatch and "
        "replica)",
    )
    accumulate: Count = option(1, "gradient accumulation steps without a pipeline")
    compute_dtype: ComputeDtype | None = option(None, "dtype of matrix products (default: from `--size`)")
    attention: AttentionKernel | None = option(
        None, "attention implementation (default: from `--size`; flash where Ascend supports it for the model)"
    )
    inference: bool = option(False, "report the prefill of a prompt instead of a training step")
    fast: bool = option(
        False,
        "compile one and two layers of each kind and extrapolate to the stage's full depth: the same numbers, sooner",
    )
    memory: bool = option(False, "report the memory over the step: peaks, what is alive at the peak")
    memory_csv: Path | None = output(
        None, "folder to write RANK/memory_block.csv to, an allocation a row, as MindSpore does (default: none)"
    )
    memory_trace: Path | None = output(None, "JSON file of counters for Perfetto to write (default: none)")
    time: bool = option(
        False, "simulate a step on `--cluster`: its time, critical path, exposed communication, idle time"
    )
    cluster: Path | None = option(None, "cluster file, or name of a built-in cluster, for `--time` (default: none)")
    trace: Path | None = output(None, "JSON file for Perfetto to write what `--time` simulates to (default: none)")
    chakra: Path | None = output(
        None, "folder to write what `--time` simulates to as Chakra execution traces, a file a rank (default: none)"
    )
    memory_gb: Positive | None = option(None, "memory of a device, to report whether ranks fit (default: not reported)")
    devices_per_server: Count = option(
        DEVICES_PER_SERVER, "number of devices of a server, for the command that runs the job"
    )
    jobs: Count | None = option(None, "number of processes that compile at the same time (default: 1, with --fast 2)")
    json: bool = option(False, "print JSON instead of the report")
    html: Path | None = output(None, "HTML file to write the report to, too (default: none)")

    @property
    def with_time(self) -> bool:
        """Whether a step is simulated."""
        return self.time or self.trace is not None or self.chakra is not None

    @property
    def with_timeline(self) -> bool:
        """Whether the memory over the step is reported."""
        return self.memory or self.memory_csv is not None or self.memory_trace is not None


@dataclass(frozen=True)
class DryRun:
    """A validated dry run, with its model, strategy and task."""

    config: DryRunConfig
    model: ModelConfig
    strategy: Strategy
    ranks: list[int]
    batch_size: int
    seq_len: int
    task: TrainedTask
    cluster: Cluster | None = None
    """The cluster on which a step is simulated, if requested."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return 1 if self.config.inference else self.strategy.num_microbatches(self.config.accumulate)

    @property
    def jobs(self) -> int:
        """Number of processes that compile at the same time."""
        return self.config.jobs or (2 if self.config.fast else 1)

    @property
    def distinct_ranks(self) -> list[int]:
        """One rank of each stage: ranks of one stage differ only in their groups."""
        first: dict[int, int] = {}
        for rank in self.ranks:
            first.setdefault(self.strategy.mesh.coordinate(rank, "pp"), rank)
        return list(first.values())


def check(config: DryRunConfig) -> DryRun:
    """Validate the flags of a dry run together with the files that they name.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems(number_problems(config))
    found = problems.of(with_model_folder, config)
    config, model = found or config, problems.of(_model_config, found) if found else None
    strategy = problems.of(load_strategy, config.strategy, config.inference)
    written = {"--html": config.html, "--memory-trace": config.memory_trace, "--trace": config.trace}
    for flag, path in written.items():
        if path and (path.is_dir() or not path.resolve().parent.is_dir()):
            problems.append(f"{flag} {path}: no file can be written there; name one in a folder that exists")
    if (folder := config.memory_csv) and (folder.is_file() or not folder.resolve().parent.is_dir()):
        problems.append(f"--memory-csv {folder}: no folder can be made there; name one in a folder that exists")
    if (folder := config.chakra) and (folder.is_file() or not folder.resolve().parent.is_dir()):
        problems.append(f"--chakra {folder}: no folder can be made there; name one in a folder that exists")
    if config.fast and config.with_timeline:
        problems.append("--fast compiles a few layers, but --memory follows all of them: leave one of both out")
    problems += time_problems(config)
    cluster = problems.of(read_cluster, config.cluster) if config.cluster else None
    ranks = problems.of(parse_ranks, config.ranks, strategy.mesh.size) if strategy else None
    if model and config.seq_len and config.seq_len > model.seq_len:
        problems.append(f"--seq-len {config.seq_len} is outside 1 .. {model.seq_len}, the model's longest context")
    if not model or not strategy:
        problems.raise_if_any()
    assert model and strategy
    cluster = problems.of(cluster.with_running, strategy.mesh.size) if cluster else None
    problems += [*strategy.graph_problems(), *model_problems(strategy, model)]
    problems += adapter_problems(strategy) if config.lora_r else []
    problems += task_problems(config, not config.inference)
    task = problems.of(task_of, config, config.model, model)
    problems += (
        ["--fast extrapolates models without adapters: leave it out with --lora-r"]
        if config.fast and config.lora_r
        else []
    )
    parts = 1 if config.inference else strategy.num_parts(config.accumulate)
    unit = task.rows_per_unit if task else 1
    batch = strategy.mesh.dp * parts * unit if config.batch_size is None else config.batch_size
    seq_len = model.seq_len if config.seq_len is None else config.seq_len
    if batch > 0 and config.accumulate > 0:
        problems += [f"--batch-size {batch}: {config.task} trains on pairs, two sequences each"] if batch % unit else []
        problems += batch_problems(strategy, batch // unit, seq_len, config.accumulate, training=not config.inference)
        problems += [] if config.inference else group_problems(strategy, model, batch, seq_len, config.accumulate)
    if config.optimizer_state_dtype == "bfloat16":
        problems += state_problems(strategy)
        problems += ["--optimizer-state-dtype is for training: leave out --inference"] if config.inference else []
    problems += strategy.axis_problems("sampling") if task and task.samples else []
    problems.raise_if_any()
    assert ranks and task
    task = dataclasses.replace(task, optimizer_state_dtype=config.optimizer_state_dtype)
    return DryRun(config, model, strategy, ranks, batch, seq_len, task, cluster)


def time_problems(config: DryRunConfig) -> list[str]:
    """Problems of simulating a step."""
    flag = "--time" if config.time else "--trace" if config.trace else "--chakra"
    if not config.with_time:
        return ["--cluster names what a step is simulated on: add --time, or leave it out"] if config.cluster else []
    problems = [] if config.cluster else [f"{flag} simulates a step on a cluster: name one, as in --cluster ascend910b"]
    if config.fast:
        problems.append(f"--fast compiles a few layers, but {flag} simulates all of them: leave one of both out")
    if config.inference:
        problems.append(f"{flag} simulates training steps: leave --inference out")
    if config.task not in TIMED_TASKS:
        problems.append(
            f"--task {config.task}: {flag} simulates steps that only train, of {', '.join(TIMED_TASKS)}; it also "
            "evaluates models"
        )
    return problems


def _model_config(config: DryRunConfig) -> ModelConfig:
    model = named_model(config.model, config.size, config.config)
    model = with_precision(model, config.compute_dtype, config.attention)
    if config.attention == "flash" and model.compute_dtype == "float32":
        raise ConfigError("--attention flash: Ascend has it for float16 and bfloat16; give --compute-dtype")
    model = trained_model(config, model)
    return dataclasses.replace(model, attention=model.attention_on_ascend)  # the implementation on devices


def parse_ranks(text: str, size: int) -> list[int]:
    """Parse `0,37,last` or `all`.

    Raises:
        ConfigError: not a number, or not a rank of the job.
    """
    if text.strip() == "all":
        return list(range(size))
    ranks = []
    for word in text.split(","):
        word = word.strip()
        rank = size - 1 if word == "last" else int(word) if word.isdecimal() else -1
        if not 0 <= rank < size:
            raise ConfigError(
                f"--ranks {text}: {word!r} is not a rank; give numbers from 0 to {size - 1}, `last` or `all`"
            )
        ranks.append(rank)
    return list(dict.fromkeys(ranks))
