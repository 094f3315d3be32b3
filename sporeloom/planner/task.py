# SPDX-License-Identifier: Apache-2.0
"""The training task of dry runs, plans and certificates, with its adapters and auxiliary models.

Reinforcement learning holds more than a training step: a reference, a reward model, and the KV cache of the texts
it samples. The policy's weights are counted once: texts are sampled from them, the critic is a second head on
them, and with adapters the reference is the policy without them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.numbers import Count
from sporeloom.models.adapters import HEAD, LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import size_config
from sporeloom.models.slots import num_slots_for
from sporeloom.planner.activations import layer_activations
from sporeloom.planner.closed_forms import parameter_bytes
from sporeloom.planner.dimensions import Dimensions, of_decoder
from sporeloom.planner.memory import StageMemory, stage_memory
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import head_columns
from sporeloom.strategy.flags import StateDtype

TaskName = Literal["pretraining", "sft", "reward", "dpo", "simpo", "orpo", "kto", "grpo", "ppo"]
SAMPLING = ("grpo", "ppo")
OF_PAIRS = ("reward", "dpo", "simpo", "orpo")
"""Tasks whose batches are pairs of sequences."""
EVALUATING = ("dpo", "kto", *SAMPLING)
"""Tasks that evaluate batches without gradients: log-probabilities of the initial model, once or in each step."""


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """The task, for commands that read no training data."""

    common: ClassVar[tuple[str, ...]] = ("task", "seq_len")
    task: TaskName = option("pretraining", "training task: the command that would run it")
    lora_r: Count | None = option(
        None, "rank of LoRA adapters, which are trained instead of the model (default: train all weights)"
    )
    lora_targets: tuple[str, ...] = option(
        ("attention.query", "attention.value"), "matrices that get an adapter, as --lora-targets of sft"
    )
    reference: bool = option(False, "for grpo: with --beta, so that a reference model is kept; ppo always has one")
    reward_size: str | None = option(
        None, "for grpo and ppo: size of the family that the reward model has (default: no reward model)"
    )
    seq_len: Count | None = option(None, "number of tokens in a sequence (default: the model's maximum context length)")


@dataclass(frozen=True)
class TrainedTask:
    """A training task. Without arguments: pretraining of a model."""

    name: TaskName = "pretraining"
    lora: LoRAConfig | None = None
    model: ModelConfig | None = None
    """The model that adapters belong to."""
    has_reference: bool = False
    """Whether log-probabilities of the initial model are needed, too."""
    reward_model: ModelConfig | None = None
    optimizer_state_dtype: StateDtype = "float32"

    @property
    def optimizer_bytes(self) -> dict[str, Any]:
        """Bytes of master weights and AdamW's moments for each parameter, as arguments of `Parallelism`."""
        moments = 4 if self.optimizer_state_dtype == "bfloat16" else 8
        return {"optimizer_bytes": 4 + moments, "moment_bytes": moments}

    @property
    def has_drops(self) -> bool:
        """Whether experts drop what is beyond their capacity: only where a model learns from plain text or examples (see
        `sporeloom.nn.moe`)."""
        return self.name in ("pretraining", "sft")

    @property
    def samples(self) -> bool:
        """Whether texts are sampled from the trained weights."""
        return self.name in SAMPLING

    @property
    def rows_per_unit(self) -> int:
        """Number of sequences that belong together."""
        return 2 if self.name in OF_PAIRS else 1

    @property
    def has_copy(self) -> bool:
        """Whether the reference is a copy of the model; with adapters it is the model without them."""
        return self.has_reference and self.lora is None

    def of_reward_model(self, dims: Dimensions) -> Dimensions | None:
        """Dimensions of the reward model, for sequences of the same length."""
        return of_decoder(self.reward_model, dims.seq_len) if self.reward_model else None

    def about(self) -> dict[str, Any]:
        """The task's part in the graph's identity, as JSON data."""
        narrow = {"optimizer_state_dtype": "bfloat16"} if self.optimizer_state_dtype == "bfloat16" else {}
        lora = self.lora and dataclasses.asdict(self.lora)
        return {"name": self.name, "reference": self.has_reference, "lora": lora, **narrow}

    def describe(self) -> str:
        """Short text for reports; empty for pretraining."""
        parts: list[str] = [] if self.name == "pretraining" else [self.name]
        parts += [f"adapters of rank {self.lora.r}"] if self.lora else []
        parts += ["a reference model"] if self.has_copy else []
        parts += ["a reward model"] if self.reward_model else []
        parts += ["moments in bfloat16"] if self.optimizer_state_dtype == "bfloat16" else []
        return ", ".join(parts)


PLAIN_TEXT = TrainedTask()


def task_from(about: Mapping[str, Any] | None, model: ModelConfig) -> TrainedTask:
    """Read the task from its `about`."""
    if about is None:
        return PLAIN_TEXT
    lora = LoRAConfig(**about["lora"]) if about["lora"] else None
    states = about.get("optimizer_state_dtype", "float32")
    return TrainedTask(about["name"], lora, model, about["reference"], optimizer_state_dtype=states)


def task_problems(flags: TaskFlags, is_training: bool = True) -> list[str]:
    """List conflicts between the flags alone."""
    problems = []
    is_plain = flags.task == "pretraining"
    if flags.lora_r and not is_training:
        problems.append("--lora-r is for training: leave out --inference")
    if not is_plain and not is_training:
        problems.append(f"--task {flags.task} is for training: leave out --inference")
    if flags.reference and flags.task != "grpo":
        problems.append(f"--reference is for --task grpo, not for {flags.task}")
    if flags.reward_size and flags.task not in SAMPLING:
        problems.append(f"--reward-size is for --task grpo and ppo, not for {flags.task}")
    return problems


def task_of(flags: TaskFlags, family: str, model: ModelConfig) -> TrainedTask:
    """Build the task that the flags describe. `model`: as it is trained, see `trained_model`.

    Raises:
        ConfigError: a pattern of --lora-targets that matches nothing, no such size.
    """
    problems, lora, reward_model = Problems(), None, None
    if flags.lora_r:
        lora = LoRAConfig(r=flags.lora_r, target_modules=flags.lora_targets)
        problems.of(lora.targets, model)
    if flags.reward_size and (found := problems.of(_reward_size, family, flags.reward_size)):
        reward_model = dataclasses.replace(found.with_value_head(), compute_dtype=model.compute_dtype)
        if reward_model.seq_len < (longest := flags.seq_len or model.seq_len):
            problems.append(
                f"--reward-size {flags.reward_size}: its context of {reward_model.seq_len} tokens is shorter "
                f"than {longest}, the length of the texts it scores (--seq-len)"
            )
    problems.raise_if_any()
    return TrainedTask(flags.task, lora, model, flags.reference or flags.task == "ppo", reward_model)


def _reward_size(family: str, size: str) -> ModelConfig:
    try:
        return size_config(family, size)
    except ConfigError as error:
        raise ConfigError(problem.replace("--size", "--reward-size") for problem in error.problems) from None


def trained_model(flags: TaskFlags, model: ModelConfig) -> ModelConfig:
    """The model that the task trains: without dropout, as its verb does by itself; with the head of a reward model, if that
    is the task."""
    if flags.task == "pretraining":
        return model
    model = dataclasses.replace(model, dropout_rate=0.0)
    return model.with_value_head() if flags.task == "reward" else model


def adapter_parameters(task: TrainedTask, dims: Dimensions, job: Parallelism) -> list[int]:
    """Count the trained adapter parameters of each stage on one device: matrices A and B unsharded at most."""
    if task.lora is None:
        return [0] * job.pp
    assert task.model
    paths, layers_of = task.model.layers, job.stages(dims.num_layers)
    per_layer, head = [0] * len(paths), 0
    for name, shape in task.lora.shapes(task.model).items():
        if name == HEAD:
            head = math.prod(shape)
            continue
        layer = next(number for number, path in enumerate(paths) if name.startswith(f"{path}."))
        per_layer[layer] += math.prod(shape)
    ends = list(itertools.accumulate(layers_of))
    counts = [sum(per_layer[end - count : end]) for end, count in zip(ends, layers_of, strict=True)]
    counts[job.last_stage] += head
    return counts


def task_memory(dims: Dimensions, job: Parallelism, task: TrainedTask) -> list[StageMemory]:
    """Estimate the memory of each stage's devices while they train `task`: `stage_memory` plus what the task adds.

    Frozen weights have neither gradients nor moments. Whole batches are evaluated at once where log-probabilities must be
    known before an update; nothing of that is kept, so the larger of both is the peak.
    """
    stages = stage_memory(dims, job, trains_all=not task.lora)
    if task.lora:
        stages = [
            dataclasses.replace(
                stage,
                gradients=job.gradient_copies * job.gradient_bytes * count,
                optimizer=_of_adapters(job, stage.optimizer, count),
            )
            for stage, count in zip(stages, adapter_parameters(task, dims, job), strict=True)
        ]
    evaluates, beside = task.name in EVALUATING, auxiliary_bytes(dims, job, task)
    if not evaluates and not any(beside):
        return stages
    evaluated = _evaluation(dims, job) if evaluates else [0.0] * job.pp
    return [
        dataclasses.replace(
            stage, working=max(stage.working, evaluation - stage.activations), beside=sum(more.values())
        )
        for stage, evaluation, more in zip(stages, evaluated, beside, strict=True)
    ]


def _of_adapters(job: Parallelism, of_all: float, count: int) -> float:
    """Bytes of all master weights, and of the optimizer state of `count` adapter parameters."""
    if job.optimizer_on_host:  # where all moments are already
        return of_all + (job.optimizer_bytes - job.moment_bytes) * count
    return of_all * (job.optimizer_bytes - job.moment_bytes) / job.optimizer_bytes + job.optimizer_bytes * count


def auxiliary_bytes(dims: Dimensions, job: Parallelism, task: TrainedTask) -> list[dict[str, float]]:
    """Bytes of the auxiliary models on a device of each stage: name -> bytes."""
    found: list[dict[str, float]] = [{} for _ in range(job.pp)]
    if task.has_copy:  # parallelized as the policy is
        for beside, size in zip(found, parameter_bytes(dims, job), strict=True):
            beside["reference"] = size
    if reward := task.of_reward_model(dims):  # under the same strategy
        even = dataclasses.replace(job, layers_of_stages=None, expert_layers_of_stages=None)
        for beside, size in zip(found, parameter_bytes(reward, even), strict=True):
            beside["reward model"] = size
    if task.samples:  # KV cache of all texts of a step
        slots = num_slots_for(dims.seq_len) * _rows(job)
        entries = dims.cache_width or 2 * dims.kv_size / math.gcd(job.tp, dims.kv_heads)
        width = job.activation_bytes * entries
        for beside, layers in zip(found, job.stages(dims.num_layers), strict=True):
            beside["KV cache"] = layers * slots * width
    return found


def _rows(job: Parallelism) -> int:
    """Number of sequences of a step on one replica."""
    return job.microbatch * job.num_microbatches


def _evaluation(dims: Dimensions, job: Parallelism) -> list[float]:
    """Bytes of temporary memory on each stage while a full batch is evaluated: one layer, or the head with its
    logits in float32."""
    at_once = dataclasses.replace(job, microbatch=_rows(job), num_microbatches=1)
    layer = layer_activations(dims, at_once, "none")
    head = _rows(job) * dims.seq_len / job.cp * head_columns(dims, job) * 8
    return [max(layer, head) if stage == job.last_stage else layer for stage in range(job.pp)]
