# SPDX-License-Identifier: Apache-2.0
"""Checks of a training run: every mistake that can be found before MindSpore is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sporeloom.checkpoint.contents import is_trained
from sporeloom.checkpoint.manifest import checkpoints
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import unwritable
from sporeloom.core.numbers import number_problems
from sporeloom.core.reader import fields_from
from sporeloom.data.sample_order import Sizes
from sporeloom.data.tokenizer import find_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import with_precision
from sporeloom.models.parameters import parameter_shapes
from sporeloom.runtime.environment import is_first_process
from sporeloom.strategy.certificate import check_certificate, covered_settings
from sporeloom.strategy.checks import (
    adapter_problems,
    batch_problems,
    group_problems,
    launch_problems,
    model_problems,
    state_problems,
)
from sporeloom.strategy.config import SINGLE_DEVICE, Strategy
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.config import Run, TrainingConfig
from sporeloom.train.elastic_start import ElasticStart, memory_dir
from sporeloom.train.flags import DEFAULT_FOLDER, ValidationFlags
from sporeloom.train.folder import earlier_run, folder_problems, settled
from sporeloom.train.groups import ParameterGroups, read_groups
from sporeloom.train.indexer import first_groups, indexer_problems, with_indexer_loss
from sporeloom.train.loss_scale import FLOAT16_INITIAL, MAX_SCALE
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.prediction import Prediction, job_of_run, read_prediction
from sporeloom.train.spikes import parse_steps
from sporeloom.train.token_dropping import random_ltd_problems

MAX_TOKENS = 1 << 28
"""Maximum number of tokens in one step: more are a typing error."""


def check(config: TrainingConfig, num_processes: int | None) -> Run:
    """Read everything that the run refers to and check all of it together.

    `num_processes`: launched already; None: as many as the strategy needs will be.

    Raises:
        ConfigError: all problems at once.
    """
    problems = Problems()
    family, model = problems.of(_model_config, config) or ("", None)
    config = problems.of(_with_folder, config) or config
    if family:
        config = problems.of(_with_own_tokenizer, config, family) or config
    problems += _flag_problems(config)
    strategy = problems.of(load_strategy, config.strategy) if config.strategy else SINGLE_DEVICE
    if config.tokenizer and not config.tokenizer.exists():
        problems.append(f"--tokenizer {config.tokenizer}: there is no such tokenizer")
    seq_len = (model.seq_len if model else 0) if config.seq_len is None else config.seq_len
    if model and seq_len > model.seq_len:
        problems.append(f"--seq-len {seq_len} is outside 1 .. {model.seq_len}, the model's longest context")
    is_sized = config.batch_size > 0 and seq_len > 0 and config.accumulate > 0
    sizes = problems.of(_sizes, config, seq_len) if is_sized else None
    data = problems.of(config.read_data, model, seq_len)
    lora = problems.of(config.adapters)
    if lora and model:
        problems.of(lora.targets, model)
    problems += _base_problems(config, model, lora)
    problems += _spike_problems(config)
    loss_scale = problems.of(_loss_scale, config, model)
    random_ltd = problems.of(config.random_ltd, model, sizes) if model and sizes else None
    if random_ltd and model and sizes and strategy:
        problems += random_ltd_problems(config, random_ltd, model, sizes, strategy)
    if strategy:
        problems += _strategy_problems(config, strategy, model, sizes, num_processes)
        problems += adapter_problems(strategy) if lora else []
    if config.certificate and model and strategy:
        problems.of(_check_certificate, config, config.certificate, family, model, strategy, seq_len, lora)
    groups = problems.of(_groups, config, model, lora) if model else None
    problems += indexer_problems(config, model, groups, lora is not None) if model and model.indexer else []
    if isinstance(config, MaxLogitFlags) and model and strategy:
        problems += config.max_logit_problems(model, strategy, groups, lora is not None, random_ltd is not None)
    predicted = config.predicted and model and strategy and sizes
    prediction = problems.of(_prediction, config, model, strategy, sizes, lora) if predicted else None
    problems += _folder_problems(config)
    numbers = problems.of(_schedule_numbers, config) if family and config.steps > 0 else None
    problems.raise_if_any()
    assert model and strategy and sizes and numbers
    return Run(
        config=config,
        family=family,
        model=model,
        strategy=strategy,
        data=data,
        lora=lora,
        sizes=sizes,
        **numbers,
        loss_scale=loss_scale,
        random_ltd=random_ltd,
        groups=groups,
        prediction=prediction,
    )


def _sizes(config: TrainingConfig, seq_len: int) -> Sizes:
    """Sizes of the batches.

    Raises:
        ConfigError: a step has too many tokens.
    """
    sizes = config.sizes(seq_len)
    if (tokens := max(batch * length for batch, length in sizes.shapes())) > MAX_TOKENS:
        raise ConfigError(f"--batch-size {config.batch_size}: {tokens:,} tokens a step are more than {MAX_TOKENS:,}")
    return sizes


def _prediction(
    config: TrainingConfig, model: ModelConfig, strategy: Strategy, sizes: Sizes, lora: LoRAConfig | None
) -> Prediction:
    """Read the predicted time of a step.

    Raises:
        ConfigError: it is that of another job, or steps are of several sizes.
    """
    assert config.predicted
    if len(sizes.shapes()) > 1:
        raise ConfigError(
            f"--predicted {config.predicted}: one prediction does not fit steps of several sizes; leave it out"
        )
    adapters = sum(map(math.prod, lora.shapes(model).values())) if lora else 0
    (shape,) = sizes.shapes()
    microbatches = strategy.num_microbatches(config.accumulate)
    return read_prediction(config.predicted, job_of_run(config.task, model, strategy, shape, microbatches, adapters))


def _flag_problems(config: TrainingConfig) -> Iterator[str]:
    """List the problems of flags alone."""
    yield from _own_problems(config)
    yield from config.problems()
    yield from config.tracking_problems()
    yield from config.sample_problems()
    yield from config.evaluation_problems()
    yield from config.audit_problems(config.output_dir)
    yield from _ema_and_certificate(config)
    yield from config.elastic_problems(ElasticStart.of_environment() is not None)


def _ema_and_certificate(config: TrainingConfig) -> Iterator[str]:
    if config.certificate and config.optimizer_state_dtype != "float32":
        yield (
            f"--certificate {config.certificate}: it covers runs without --optimizer-state-dtype bfloat16; leave either out"
        )
    if config.certificate and config.ema_decay:
        yield f"--certificate {config.certificate}: it covers runs without --ema-decay; leave either out"


def _groups(config: TrainingConfig, model: ModelConfig, lora: LoRAConfig | None) -> ParameterGroups | None:
    """The parameter groups of the run, if it has any.

    Raises:
        ConfigError: they cannot be read, or do not fit what is trained.
    """
    names = [name for name in (lora.shapes(model) if lora else parameter_shapes(model)) if is_trained(name)]
    first = () if lora else first_groups(config, model)
    if config.parameter_groups is None:
        return ParameterGroups(first, tuple(names)) if first else None
    groups = read_groups(config.parameter_groups, names, first)
    problems = []
    if config.optimizer == "sgd":
        problems.append(
            f"--parameter-groups {config.parameter_groups}: --optimizer sgd has none; use adamw, adafactor or muon"
        )
    if config.certificate:
        problems.append(
            f"--certificate {config.certificate}: it covers runs without --parameter-groups; leave either out"
        )
    if lora and groups.frozen_names:
        problems.append(
            f"--parameter-groups {config.parameter_groups}: adapters are frozen by leaving them out of LoRA's layers"
        )
    if problems:
        raise ConfigError(problems)
    return groups


def _schedule_numbers(config: TrainingConfig) -> dict[str, Any]:
    """The rates and steps of the learning rate schedule, defaults included.

    Raises:
        ConfigError: they do not fit the schedule.
    """
    high, low = config.default_rates()
    numbers: dict[str, Any] = {
        "learning_rate": high if config.learning_rate is None else config.learning_rate,
        "min_learning_rate": low if config.min_learning_rate is None else config.min_learning_rate,
        "warmup_steps": min(2000, config.steps // 10) if config.warmup_steps is None else config.warmup_steps,
        "decay_steps": config.decay_steps or config.steps,
    }
    if problems := [*config.schedule_problems(), *config.schedule_step_problems(*numbers.values())]:
        raise ConfigError(problems)
    return numbers


def _check_certificate(
    config: TrainingConfig,
    certificate: Path,
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    seq_len: int,
    lora: LoRAConfig | None,
) -> None:
    """Compare a run with its certificate.

    Raises:
        ConfigError: it is not a certificate, or not of this run.
    """
    rows = config.batch_size * config.rows_per_unit
    task = config.about_task(lora)
    check_certificate(certificate, covered_settings(family, model, strategy, rows, seq_len, config.accumulate, task))


def _with_folder(config: TrainingConfig) -> TrainingConfig:
    is_default = config.output_dir == DEFAULT_FOLDER
    if config.only_looks:  # the data it makes are found again by the next look
        return dataclasses.replace(config, output_dir=DEFAULT_FOLDER.parent) if is_default else config
    name = config.model_name() if config.task == "pretraining" else f"{config.task} {config.model_name()}"
    return dataclasses.replace(settled(config, name, config.resume), resume=bool(config.resume))


def _loss_scale(config: TrainingConfig, model: ModelConfig | None) -> float | None:
    """Initial loss scale; float16 is not trained without one."""
    is_half = bool(model and model.compute_dtype == "float16")
    scale = FLOAT16_INITIAL if is_half and config.loss_scale is None else config.loss_scale
    if scale and config.optimizer.startswith("adafactor"):
        raise ConfigError("--optimizer adafactor has no loss scaling; use bfloat16 or float32, or adamw")
    if not config.max_skipped_steps:
        return scale
    if config.rewind_at_spike:
        raise ConfigError("--max-skipped-steps and --rewind-at-spike both say what follows a non-finite loss; give one")
    if config.optimizer.startswith("adafactor"):
        raise ConfigError("--optimizer adafactor cannot skip an update; leave --max-skipped-steps out, or use adamw")
    return scale or 1.0  # the graph of a step with a scale skips the update


def _with_own_tokenizer(config: TrainingConfig, family: str) -> TrainingConfig:
    """Use the tokenizer of the initial checkpoint, if no other is named."""
    if config.from_checkpoint is None or config.tokenizer is not None:
        return config
    path = find_tokenizer(family, config.from_checkpoint)
    return dataclasses.replace(config, tokenizer=path) if path.exists() else config


def _model_config(config: TrainingConfig) -> tuple[str, ModelConfig]:
    """Read the family and the network's configuration."""
    family, model = config.base_model()
    if config.dropout is not None:
        model = fields_from(ModelConfig, Document("--dropout", {"dropout_rate": config.dropout}), model)
    model = with_indexer_loss(config, config.network_config(model))
    return family, with_precision(model, config.compute_dtype, config.attention)


def is_sharded(strategy: Strategy) -> bool:
    """Whether ranks hold parts of parameters or layers, not the full model."""
    return strategy.mesh.size > strategy.mesh.dp or strategy.optimizer_parallel is not None


def _optimizer_problems(config: TrainingConfig, strategy: Strategy) -> Iterator[str]:
    if config.optimizer_state_dtype == "bfloat16":
        yield from state_problems(strategy)
        if not config.optimizer.startswith(("adamw", "muon")):
            yield (
                f"--optimizer-state-dtype bfloat16: AdamW's moments and Muon's momentum can be bfloat16, not the states of "
                f"--optimizer {config.optimizer}; leave it out"
            )
    if config.optimizer == "muon" and strategy.engine == "mindspore" and is_sharded(strategy):
        yield (
            f"{strategy.at('engine')}: --optimizer muon needs full matrices, which MindSpore's partitioner shards; give "
            "engine: spmd, or dp alone without optimizer_parallel"
        )
    if config.optimizer != "adafactor-factored":
        return
    if is_sharded(strategy):
        yield (
            "--optimizer adafactor-factored needs unsharded matrices on every rank: dp alone, without "
            f"optimizer_parallel, not {strategy.mesh}; use adafactor"
        )


def _place_problems(config: TrainingConfig) -> Iterator[str]:
    if problem := unwritable(config.output_dir):
        yield f"--output-dir {problem}"
    elif (config.save_every or config.save_minutes) and (problem := unwritable(config.states_dir)):
        yield problem.replace("no file", "no checkpoint")


def _base_problems(config: TrainingConfig, model: ModelConfig | None, lora: LoRAConfig | None) -> Iterator[str]:
    """Check the initial model against what is trained."""
    if lora and config.optimizer == "muon":
        yield "--optimizer muon: factors of adapters are not the matrices that it orthogonalizes; use adamw"
    base = config.from_checkpoint
    if lora and base and base.resolve() == config.checkpoint_dir.resolve():
        yield f"--output-dir {config.output_dir}: adapters would replace the model they belong to"
    if model and model.value_head and not config.trains_values:
        yield f"--from-checkpoint {base}: a reward model; only `sporeloom reward` can continue its training"


def problems_of_strategy(run: Run, strategy: Strategy) -> list[str]:
    """List why a run could not continue under another strategy."""
    problems = [*_strategy_problems(run.config, strategy, run.model, run.sizes, None)]
    if run.random_ltd:
        problems += random_ltd_problems(run.config, run.random_ltd, run.model, run.sizes, strategy)
    return problems + (adapter_problems(strategy) if run.lora else [])


def _strategy_problems(
    config: TrainingConfig,
    strategy: Strategy,
    model: ModelConfig | None,
    sizes: Sizes | None,
    num_processes: int | None,
) -> Iterator[str]:
    """Check the strategy against everything else."""
    yield from _optimizer_problems(config, strategy)
    yield from config.strategy_problems(strategy)
    yield from config.ema_problems(strategy)
    yield from config.sampling_problems(strategy)
    yield from config.evaluating_problems(strategy)
    yield from launch_problems(strategy, num_processes) if num_processes is not None else []
    yield from model_problems(strategy, model) if model else []
    yield from strategy.axis_problems("sampling") if config.samples_texts else []
    if strategy.optimizer_on_host and not config.optimizer.startswith("adamw"):
        yield f"{strategy.at('offload.optimizer')}: AdamW's moments can be moved, not those of --optimizer {config.optimizer}"
    if strategy.pipeline.virtual_stages > 1 and config.task in ("dpo", "kto", "grpo", "ppo"):
        yield (
            f"{strategy.at('pipeline.virtual_stages')}: {config.task} also runs the model by itself, a stage after "
            "the other; leave virtual stages out"
        )
    validates = isinstance(config, ValidationFlags) and config.validation_data
    if strategy.pipeline.virtual_stages > 1 and not strategy.is_spmd and validates:
        yield (
            f"{strategy.at('pipeline.virtual_stages')}: --validation-data runs the model by itself, which MindSpore's "
            "partitioner does a stage after the other; leave virtual stages out, or engine: mindspore"
        )
    for batch_size, length in sizes.shapes() if sizes else []:
        yield from batch_problems(strategy, batch_size // config.rows_per_unit, length, config.accumulate)
        yield from group_problems(strategy, model, batch_size, length, config.accumulate) if model else []


def _spike_problems(config: TrainingConfig) -> Iterator[str]:
    problems = Problems()
    skipped = problems.of(parse_steps, config.skip_steps) or ()
    yield from problems
    if config.find_nan and not config.strategy:
        yield "--find-nan reads graphs of CPU processes: give a --strategy with several, such as pangu_tiny_dp2"
    if any(config.steps in steps for steps in skipped):
        yield f"--skip-steps: step {config.steps} is the last of the run, which cannot be skipped; change --steps"
    if (skipped or config.rewind_at_spike) and config.samples_texts:
        yield f"--{'skip-steps' if skipped else 'rewind-at-spike'}: steps of {config.task} depend on earlier ones"
    if config.rewind_at_spike and config.rewind_at_spike <= 1:
        yield f"--rewind-at-spike must be above 1, or 0, got {config.rewind_at_spike:g}"
    if config.rewind_at_spike and not (config.save_every or config.save_minutes):
        yield "--rewind-at-spike goes back to a checkpoint: give --save-every or --save-minutes"


def _own_problems(config: TrainingConfig) -> list[str]:
    problems = list(number_problems(config))
    if config.loss_scale_factor <= 1:
        problems.append(f"--loss-scale-factor must be above 1, got {config.loss_scale_factor:g}")
    if config.loss_scale is not None and not 1 <= config.loss_scale <= MAX_SCALE:
        problems.append(f"--loss-scale must be from 1 to 2^64, got {config.loss_scale:g}")
    place = list(_place_problems(config)) if is_first_process() else []
    problems += place
    in_memory = memory_dir()
    has_checkpoints = not place and bool(checkpoints(config.states_dir) or (in_memory and checkpoints(in_memory)))
    if (
        config.resume and not has_checkpoints and config.output_dir != DEFAULT_FOLDER
    ):  # otherwise there is no run at all
        instead = "with --overwrite instead of" if earlier_run(config.output_dir) else "without"
        problems.append(f"--resume: {config.states_dir} holds no checkpoint; start {instead} --resume")
    if config.resume and config.overwrite:
        problems.append("--resume continues a run, --overwrite replaces it; leave one out")
    return problems


def _folder_problems(config: TrainingConfig) -> Iterator[str]:
    """Check the folder for an earlier run."""
    if is_first_process() and not config.resume and not config.only_looks:
        given = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
        yield from folder_problems(config, (v for name, v in given if isinstance(v, Path) and name != "output_dir"))
