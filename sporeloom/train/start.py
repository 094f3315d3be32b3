# SPDX-License-Identifier: Apache-2.0
"""Prepare a run up to its first step: network, data, optimizer, graph."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.checkpoint.contents import is_orthogonalized
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import split_lines
from sporeloom.core.log import milestone
from sporeloom.data.loader import Prefetcher
from sporeloom.models.adapters import is_adapter
from sporeloom.models.cells import ClippedAttention
from sporeloom.models.parameters import num_parameters
from sporeloom.nn.decoder import DecoderWithLoss
from sporeloom.nn.flash import has_flash
from sporeloom.nn.routing import freeze_balance_biases
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.cluster import chips
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.drawing import drawing_later
from sporeloom.train.adafactor import Adafactor
from sporeloom.train.audit_writer import AuditWriter
from sporeloom.train.checks import is_sharded
from sporeloom.train.config import Run
from sporeloom.train.ema import Averages
from sporeloom.train.evaluations import Evaluations
from sporeloom.train.groups import Scales
from sporeloom.train.history import History
from sporeloom.train.indexer import describe_indexer
from sporeloom.train.loading import leave_undrawn
from sporeloom.train.loss_scale import LossScale
from sporeloom.train.max_logit_flags import MaxLogitFlags
from sporeloom.train.muon import ITERATIONS, Muon
from sporeloom.train.narrow_states import adamw
from sporeloom.train.optim import SGD, AdamW
from sporeloom.train.prediction import MeasuredSteps
from sporeloom.train.profile import Profile
from sporeloom.train.qk_clip import QKClip
from sporeloom.train.run_summary import RunTimes
from sporeloom.train.samples import Samples
from sporeloom.train.saving import BEGIN_AS_ZEROS, WEIGHTS
from sporeloom.train.spikes import SpikeGuard
from sporeloom.train.task import Task
from sporeloom.train.utilization import Utilization
from sporeloom.train.validation import Validation


@dataclass
class Training:
    """The objects that a run needs while it trains."""

    run: Run
    engine: Engine
    task: Task
    report: Report
    step: TrainStep
    optimizer: AdamW | SGD | Adafactor | Muon
    batches: Prefetcher[list[NDArray[Any]]]
    """Inputs of each step, made ahead."""
    loss_scale: LossScale | None
    utilization: Utilization
    guard: SpikeGuard | None = None
    """Handler of loss spikes, which leads back to a checkpoint."""
    validation: Validation | None = None
    """Losses of validation sets, where the run has some."""
    samples: Samples | None = None
    """Texts for given prompts, where the run has some."""
    evaluations: Evaluations | None = None
    """Scores on benchmarks, where the run has some."""
    profile: Profile | None = None
    """Recorder of some steps."""
    times: RunTimes = dataclasses.field(default_factory=RunTimes)
    measured: MeasuredSteps | None = None
    """Measured times of steps, where there is a predicted one."""
    audit: AuditWriter | None = None
    """Writer of the hash chain, where the run has one."""
    history: History | None = None
    """Starts of the run; the logging rank has it."""
    compiled: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Batch shapes that graphs are compiled for."""
    updates: int = 0
    """Number of weight updates so far: fewer than steps where some were skipped. The optimizer and the learning
    rate count these."""

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1."""
        self.optimizer.prepare(update, learning_rate)
        if self.step.averages is not None:
            self.step.averages.prepare()

    def say(self, text: str) -> None:
        """Log a milestone, once for all ranks."""
        if self.engine.is_log_rank:
            milestone(text)

    def batch(self, index: int) -> list[Tensor]:
        """Inputs of step `index`, counted from 0: with the shape of the global batch and this rank's rows filled
        in."""
        return [Tensor(array) for array in (self.batches.get if self.task.is_ahead else self.task.inputs)(index)]


def start(run: Run) -> Training:
    """Prepare everything up to the first step: network, data, graph."""
    engine = Engine.start(run.strategy, in_graphs=bool(run.config.record))
    run = _with_shared_folder(run, engine)
    config = run.config
    _check_target(run, engine)
    _check_prediction(run, engine)
    engine.backend.watch_for(config.watchdog_s)
    if config.record:
        engine.backend.record(config.output_dir, config.record)
    if config.find_nan:
        engine.backend.look_for_nan()
    task: Task = import_module(f"sporeloom.tasks.{config.task}").TASK(run, engine)
    net = _network(run, engine, task)
    report = parallelize(net, run.strategy)  # before the data: it may find mistakes, and nothing is written yet
    task.open_data()
    training = _build_step(run, engine, task, net, report)
    if sets := task.validation_sets(net):
        given: Any = config
        training.validation = Validation(engine, net, sets, given.validate_every, given.early_stopping_patience)
    if sampler := task.sampler(net):
        training.samples = Samples(engine, net, sampler, config.prompts(), config.output_dir, config.evaluate_every)
    evaluators = []
    if config.eval_tasks:  # the harness takes seconds to load
        evaluators.append(import_module("sporeloom.tasks.benchmarks").TaskEvaluator(run, engine, net, task.tokenizer))
    if config.eval_humaneval_x:
        programs = import_module("sporeloom.tasks.program_benchmark")
        evaluators.append(programs.ProgramEvaluator(run, engine, net, task.tokenizer))
    if evaluators:
        training.evaluations = Evaluations(engine, net, evaluators, config.eval_every)
    if steps := config.profiled_steps():
        training.profile = Profile(engine, config.output_dir, steps)
    what = f"{config.model_name()}: {num_parameters(run.model):,} parameters"
    if run.lora:
        trained = sum(map(math.prod, run.lora.shapes(run.model).values()))
        what += f", frozen but for {trained:,} of adapters" + (" and head" if run.model.value_head else "")
    training.say(f"{what} on {run.strategy.mesh}")
    if told := describe_indexer(config, run.model):
        training.say(told)
    if has_flash(net):
        training.say(f"attention: {_told_of_attention(engine, net)}")
    drops = isinstance(net, DecoderWithLoss) and net.has_router_losses
    if (experts := run.model.experts) and experts.capacity_factor and not drops and run.strategy.mesh.ep > 1:
        more = run.seq_len / experts.capacity(run.seq_len)
        training.say(f"experts drop no token where models are compared: {more:.1f} times the work of capacity_factor")
    if experts and not experts.capacity_factor and run.strategy.mesh.ep > 1 and not run.strategy.sorts_expert_rows:
        more = experts.num_experts / experts.experts_per_token
        training.say(
            f"experts have capacity for all tokens on this mesh, {more:.1f} times the rows that they are given"
        )
    for line in split_lines(task.describe()):
        training.say(line)
    training.say(f"metrics, configuration and checkpoints go to {config.output_dir}")
    return training


def _with_shared_folder(run: Run, engine: Engine) -> Run:
    """Use the folder that the first process created."""
    folder = Path(engine.broadcast_value(str(run.config.output_dir), 0))
    return dataclasses.replace(run, config=dataclasses.replace(run.config, output_dir=folder))


def _network(run: Run, engine: Engine, task: Task) -> nn.Cell:
    """Create the task's network. CPU processes initialize no weights that belong to other stages or come from a
    checkpoint."""
    with drawing_later() if engine.partitions_itself else contextlib.nullcontext():
        net = task.network()
    frozen = run.groups.frozen_names if run.groups else []
    for parameter in net.get_parameters() if frozen else ():
        if parameter.name.removeprefix(WEIGHTS) in frozen:
            parameter.requires_grad = False
    if frozen:
        freeze_balance_biases(net, of_frozen=True)
    if not engine.partitions_itself:
        return net
    if run.config.resume or run.config.from_checkpoint:
        new = tuple(f"{WEIGHTS}{name}" for name in task.new_weights)
        given = (p for p in net.get_parameters() if p.name.startswith(WEIGHTS) and p.name not in new)
        leave_undrawn(parameter for parameter in given if not is_adapter(parameter.name))
    return net


def _check_target(run: Run, engine: Engine) -> None:
    """Check what a run needs against the devices of this process.

    Raises:
        ConfigError: it does not go together.
    """
    if engine.target == "Ascend" and run.model.attention == "flash" and run.model.compute_dtype == "float32":
        raise ConfigError("attention flash: Ascend has it for float16 and bfloat16; give --compute-dtype")
    if engine.target == "GPU" and run.model.attention == "flash":
        raise ConfigError("attention flash: MindSpore has it for Ascend alone; write plain")
    if engine.target == "CPU" and run.config.chip:
        raise ConfigError(
            f"--chip {run.config.chip}: this process computes on CPUs, whose peak is unknown; leave it out"
        )


def _check_prediction(run: Run, engine: Engine) -> None:
    """Raises:
    ConfigError: the step was predicted for other devices than this process has.
    """
    if run.prediction and engine.target == "CPU" and run.prediction.chip in chips():
        raise ConfigError(
            f"--predicted {run.config.predicted}: of a step on {run.prediction.chip}, and this process computes on CPUs; "
            "measure them with `sporeloom calibrate`, and give its file as --cluster of the dry run"
        )


def _told_of_attention(engine: Engine, net: nn.Cell) -> str:
    """Describe the attention implementation of a network that has FlashAttention."""
    if engine.target == "Ascend":
        return "FlashAttentionScore"
    if net.parallel_report.is_spmd:
        return "FlashAttentionScore, by NumPy here, which is slow"
    return "plain; CPUs have no FlashAttentionScore"


def compile_for(training: Training, step: int) -> None:
    """Compile for the batches of `step`, counted from 0, if their shape is new."""
    shape = training.task.shape(step)
    if shape in training.compiled:
        return
    begin = time.perf_counter()
    # Not those made ahead: a task may still have to compute some of their inputs.
    inputs = map(Tensor, training.task.shaped_inputs(step))
    with training.times.measure("compile"):
        training.engine.prepare(training.step, *inputs)
    training.compiled.add(shape)
    for_what = f" for {shape[0]} sequences of {shape[1]}" if len(training.run.sizes.shapes()) > 1 else ""
    seen = f"; {shape[2]} tokens of each in the layers that drop some" if shape[2:] else ""
    training.say(f"compiled{for_what} in {time.perf_counter() - begin:.1f} s{seen}")
    if (told := training.engine.backend.graph_summary) and len(training.compiled) == 1:
        training.say(told)
    if (rounded := training.engine.rounded) and len(training.compiled) == 1:
        kinds = ", ".join(f"{kind} {count}" for kind, count in rounded.most_common())
        training.say(
            f"bfloat16: CPUs have no kernels; computed in float32, rounded after {rounded.total()} operators: {kinds}"
        )


def _build_step(run: Run, engine: Engine, task: Task, net: nn.Cell, report: Report) -> Training:
    config = run.config
    in_parts = engine.partitions_itself
    with no_init_parameters() if in_parts else contextlib.nullcontext():
        optimizer = _optimizer(run, engine, net, report)
        step = TrainStep(
            wrap(net, run.strategy, config.accumulate),
            optimizer,
            report,
            engine.rank,
            engine.all_reduce(),
            max_grad_norm=config.max_grad_norm or None,
            accumulate=config.accumulate,
            loss_scale=run.loss_scale is not None,
            qk_clip=_qk_clip(run, net),
            averages=Averages(optimizer.parameters, config.ema_decay) if config.ema_decay else None,
        )
    if in_parts:
        leave_undrawn(parameter for parameter in step.get_parameters() if parameter.name.startswith(BEGIN_AS_ZEROS))
    scale = None
    if run.loss_scale is not None:
        scale = LossScale(run.loss_scale, config.loss_scale_factor, config.loss_scale_window, config.max_skipped_steps)
    batches = Prefetcher(task.inputs, config.steps)
    utilization = Utilization(run, engine.target)
    guard = SpikeGuard(config.rewind_at_spike, config.spike_window) if config.rewind_at_spike else None
    measured = MeasuredSteps(run.prediction) if run.prediction else None
    return Training(
        run, engine, task, report, step.set_train(), optimizer, batches, scale, utilization, guard, measured=measured
    )


def _qk_clip(run: Run, net: nn.Cell) -> QKClip | None:
    threshold = run.config.qk_clip_threshold if isinstance(run.config, MaxLogitFlags) else None
    attentions = [cell for _, cell in net.cells_and_names() if isinstance(cell, ClippedAttention)]
    return QKClip(threshold, attentions) if threshold else None


def _optimizer(run: Run, engine: Engine, net: nn.Cell, report: Report) -> AdamW | SGD | Adafactor | Muon:
    weights = net.trainable_params()
    scales = None
    if run.groups and run.config.parameter_groups:
        scales = run.groups.scales([weight.name.removeprefix(WEIGHTS) for weight in weights])
    if run.config.optimizer == "muon":
        return _muon(run, weights, report, scales)
    if run.config.optimizer == "sgd":
        return SGD(weights)
    if run.config.optimizer.startswith("adafactor"):
        return Adafactor(
            weights,
            report.norm_shares([weight.name for weight in weights], engine.rank),
            engine.all_reduce(),
            factored=run.config.optimizer == "adafactor-factored",
            beta1=run.config.adam_beta1,
            weight_decay=run.config.weight_decay,
            scales=scales,
        )
    return adamw(
        weights,
        run.config.optimizer_state_dtype,
        beta1=run.config.adam_beta1,
        beta2=run.config.adam_beta2,
        epsilon=run.config.adam_epsilon,
        weight_decay=run.config.weight_decay,
        bias_correction=run.config.optimizer == "adamw",
        on_host=run.strategy.optimizer_on_host,
        scales=scales,
    )


def _muon(run: Run, weights: list[Parameter], report: Report, scales: Scales | None) -> Muon:
    """Raises:
    ConfigError: MindSpore's partitioner would shard its matrices.
    """
    config = run.config
    if not report.is_spmd and is_sharded(run.strategy):
        raise ConfigError(
            f"{run.strategy.source}: --optimizer muon needs full matrices, which MindSpore's partitioner shards; give "
            "engine: spmd, or dp alone without optimizer_parallel"
        )
    return Muon(
        weights,
        is_orthogonalized,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        phases=ITERATIONS[config.muon_iteration],
        scale=config.muon_scale,
        scale_factor=config.muon_scale_factor,
        weight_decay=config.weight_decay,
        adam_rate_factor=config.muon_adam_factor,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        scales=scales,
        state_dtype=config.optimizer_state_dtype,
    )


def adapter_settings(run: Run) -> dict[str, Any]:
    return dataclasses.asdict(run.lora) if run.lora else {}


def optimizer_settings(run: Run) -> dict[str, Any]:
    config = run.config
    names = [field.name for field in dataclasses.fields(config) if field.name.startswith("muon_")]
    return {
        **({name: getattr(config, name) for name in names} if config.optimizer == "muon" else {}),
        "name": config.optimizer,
        "optimizer_state_dtype": config.optimizer_state_dtype,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "ema_decay": config.ema_decay,
        "qk_clip_threshold": config.qk_clip_threshold if isinstance(config, MaxLogitFlags) else None,
        "parameter_groups": run.groups and run.groups.settings(),
        **config.schedule_settings(),
    }
