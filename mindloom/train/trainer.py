# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, model, engine, one step after another, metrics, checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from mindloom.checkpoint.adapters import Adapter, write_adapter
from mindloom.checkpoint.contents import model_of
from mindloom.checkpoint.manifest import Manifest
from mindloom.checkpoint.model_folder import load_config, save_checkpoint, write_config
from mindloom.data.loader import Prefetched
from mindloom.errors import ConfigError
from mindloom.files import write_text_atomically
from mindloom.locks import one_writer
from mindloom.log import milestone
from mindloom.models.parameters import num_parameters, parameter_shapes
from mindloom.nn.flash import has_flash
from mindloom.parallel.parallelize import parallelize, wrap
from mindloom.parallel.report import Report
from mindloom.parallel.step import TrainStep
from mindloom.runtime.engine import Engine
from mindloom.runtime.environment import is_first_process
from mindloom.runtime.gather import gather_whole
from mindloom.train.adafactor import Adafactor
from mindloom.train.config import Run, TrainingConfig
from mindloom.train.loss_scale import LossScale
from mindloom.train.metrics import MetricsWriter, StepMetrics
from mindloom.train.optim import SGD, AdamW, set_number
from mindloom.train.rerun import run_twice
from mindloom.train.saving import Saver, load_state, newest_complete, start_from, versions
from mindloom.train.schedules import learning_rate
from mindloom.train.spikes import SpikeGuard, parse_steps
from mindloom.train.task import Task

LEFTOVERS = (".checkpoint_parts-*", ".checkpoint.*.partial", ".*.json.*.partial", "data/.*.partial")
"""What a run that was killed leaves in its folder, besides unfinished states and tokens."""
UNSAID = {"schedule": "cosine", "random_ltd": None, "packing": "stream", "curriculum": None}
"""What checkpoints of earlier releases do not say."""
SCHEDULE = ("learning_rate", "min_learning_rate", "warmup_steps", "decay_steps")


@dataclass
class Training:
    """Everything that one run holds while it goes on."""

    run: Run
    engine: Engine
    task: Task
    report: Report
    step: TrainStep
    optimizer: AdamW | SGD | Adafactor
    batches: Prefetched[list[NDArray[Any]]]
    """Inputs of each step."""
    loss_scale: LossScale | None
    guard: SpikeGuard | None = None
    """Where spikes of the loss lead back to a checkpoint."""
    compiled: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Batch shapes there are graphs for."""

    def say(self, text: str) -> None:
        """A milestone, once for all ranks."""
        if self.engine.is_log_rank:
            milestone(text)

    def batch(self, index: int) -> list[Tensor]:
        """Inputs of step `index`, counted from 0: the shape of the whole batch, this rank's rows filled in."""
        return [Tensor(array) for array in (self.batches.get if self.task.is_ahead else self.task.inputs)(index)]


def start(run: Run) -> Training:
    """Everything up to the first step: network, data, graph."""
    config = run.config
    engine = Engine.start(run.strategy)
    _check_target(run, engine)
    engine.backend.watch_for(config.watchdog_s)
    if config.find_nan:
        engine.backend.look_for_nan()
    task: Task = import_module(f"mindloom.tasks.{config.task}").TASK(run, engine)
    net = task.network()
    report = parallelize(net, run.strategy)  # before the data: it may find mistakes, and nothing is written yet
    task.open_data()
    training = _build_step(run, engine, task, net, report)
    what = f"{config.model_name()}: {num_parameters(run.model):,} parameters"
    if run.lora:
        trained = sum(map(math.prod, run.lora.shapes(run.model).values()))
        what += f", frozen but for {trained:,} of adapters" + (" and head" if run.model.value_head else "")
    training.say(f"{what} on {run.strategy.mesh}")
    if has_flash(net):
        training.say(f"attention: {_told_of_attention(engine, net)}")
    for line in task.describe().splitlines():
        training.say(line)
    training.say(f"metrics, configuration and checkpoints go to {config.output_dir}")
    return training


def _check_target(run: Run, engine: Engine) -> None:
    """What a run asks for against what this process computes on.

    Raises:
        ConfigError: it does not go together.
    """
    if engine.target == "Ascend" and run.model.attention == "flash" and run.model.compute_dtype == "float32":
        raise ConfigError("attention flash: Ascend has it for float16 and bfloat16; give --compute-dtype")
    if engine.target == "GPU" and run.model.attention == "flash":
        raise ConfigError("attention flash: MindSpore has it for Ascend alone; write plain")


def _told_of_attention(engine: Engine, net: nn.Cell) -> str:
    """How attention is computed in a network that has FlashAttention."""
    if engine.backend_of(net).partitions:
        return "FlashAttentionScore, by NumPy here, which is slow"
    return "FlashAttentionScore" if engine.target == "Ascend" else "plain; one CPU device has no FlashAttentionScore"


def train(run: Run) -> Path | None:
    """Train as `run` says. Returns the checkpoint folder; None if the run was told to stop before its end.

    Raises:
        ConfigError: another run writes to the same folder, or nothing can be written there.
    """
    if not is_first_process():
        return _train(run)
    with one_writer(run.config.output_dir):
        for pattern in LEFTOVERS:
            for path in run.config.output_dir.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
        return _train(run)


def _train(run: Run) -> Path | None:
    config = run.config
    training = start(run)
    steps_done = resume(training) if config.resume else 0
    _compile(training, steps_done)
    if training.engine.rank == 0:  # now that all layouts are known
        _write_resolved(training.run, training.report)
    if config.from_checkpoint and (run.lora or not config.resume):
        start_from(
            training.step,
            training.engine,
            training.report,
            config.from_checkpoint,
            training.task.new_weights,
            only_frozen=config.resume,
        )
        training.say(f"weights from {config.from_checkpoint}")
    training.task.begin(training.step, steps_done)
    saver = make_saver(training)  # after the schedule that is resumed is known
    if training.engine.is_log_rank:
        with MetricsWriter(config.output_dir, config.steps, steps_done) as writer:
            done, first, last = run_steps(training, writer, saver, steps_done)
    else:
        done, first, last = run_steps(training, None, saver, steps_done)
    if done == config.steps and (config.save_every or config.save_minutes):
        saver.save(done)
    saver.wait()
    training.engine.largest(0)  # nobody leaves before all is written: msrun ends the others with the first
    if done < config.steps:
        training.say(f"stopped after step {done}; --resume goes on from there")
        training.engine.largest(0)  # likewise: before it is told
        return None
    training.say(f"loss {first.loss:.4f} -> {last.loss:.4f} in {config.steps - steps_done} steps")
    _save(training, saver.token)
    training.say(f"checkpoint in {config.checkpoint_dir}")
    return config.checkpoint_dir


def make_saver(training: Training) -> Saver:
    """What saves the run's state, as its configuration asks."""
    run, config = training.run, training.run.config
    about = {
        "model": {"family": run.family, **run.model.to_dict()},
        "strategy": {**dataclasses.asdict(run.strategy.mesh), "file": str(config.strategy or "")},
        "versions": versions(),
    }

    def add_files(folder: Path) -> None:
        training.task.add_files(folder)
        write_config(folder, run.family, run.model)

    return Saver(
        training.step,
        training.engine,
        training.report,
        config.states_dir,
        lambda: {"state": _state(training), **about},
        add_files,
        every=config.save_every,
        minutes=config.save_minutes,
        keep_last=config.keep_last,
        in_background=config.async_save,
    )


def _state(training: Training) -> dict[str, Any]:
    """What besides tensors a run needs to go on. Sample order and learning rate are functions of these and the step."""
    run, config = training.run, training.run.config
    return {
        "data": training.task.data_state(),
        "optimizer": _state_of_optimizer(config),
        "schedule": {name: getattr(run, name) for name in SCHEDULE},
        "loss_scale": training.loss_scale and training.loss_scale.state(),
        "lora": _state_of_adapters(run),
        "beside": training.task.beside(),
        "task": training.task.state(),
    }


def _state_of_adapters(run: Run) -> dict[str, Any]:
    return dataclasses.asdict(run.lora) if run.lora else {}


def _state_of_optimizer(config: TrainingConfig) -> dict[str, Any]:
    return {
        "name": config.optimizer,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "schedule": config.schedule,
    }


def resume(training: Training) -> int:
    """Load the newest complete checkpoint. Returns the steps done.

    Raises:
        ConfigError: there is none, or it belongs to a run that differs in more than its mesh.
    """
    run, config = training.run, training.run.config
    folder, manifest = newest_complete(config.states_dir, training.engine)
    mine = {"model": {"family": run.family, **run.model.to_dict()}, **_state(training)}
    family, model = model_of(manifest, folder)  # which fills in what earlier releases did not say
    theirs = {"model": {"family": family, **model.to_dict()}, **manifest.state}
    given = {name for name in SCHEDULE if getattr(config, name) is not None}
    training.run = run = dataclasses.replace(
        run, **{name: value for name, value in manifest.state["schedule"].items() if name not in given}
    )
    changed = [
        f"{folder}: {part} {name} was {theirs[part].get(name)}, is {value}"
        for part in ("model", "data", "optimizer", "lora")
        for name, value in _plain(mine[part]).items()
        if name != "attention"  # the kernel may be another, as the mesh may
        if theirs.get(part, {}).get(name, UNSAID.get(name)) != value
    ]
    if manifest.step >= config.steps:
        changed.append(f"{folder}: {manifest.step} steps are done, --steps {config.steps} leaves none")
    if changed:
        raise ConfigError(changed)
    _compile(training, manifest.step)  # which decides what this rank holds
    _take_up(training, folder, manifest)
    training.say(f"resumed after step {manifest.step} from {folder}")
    return manifest.step


def _take_up(training: Training, folder: Path, manifest: Manifest) -> None:
    """Give everything that a step changes the values of a checkpoint."""
    load_state(training.step, training.engine, training.report, folder, manifest)
    if training.loss_scale and (saved := manifest.state.get("loss_scale")):
        training.loss_scale.restore(saved)
    training.task.restore(manifest.state.get("task") or {})


def _rewind(training: Training, guard: SpikeGuard, saver: Saver, step: int) -> None:
    """Go back to the state of a checkpoint after a spike at `step`. All ranks take part.

    Raises:
        ConfigError: there is none to go back to.
    """
    engine, folder = training.engine, training.run.config.states_dir
    saver.wait()
    dropped = guard.to_drop(step, folder)
    engine.largest(0)  # all have looked
    for path in dropped if engine.rank == 0 else ():
        shutil.rmtree(path)
    engine.largest(0)
    found, manifest = newest_complete(folder, engine)
    _take_up(training, found, manifest)
    training.say(f"step {step}: a spike of the loss; back to {found}, without steps {manifest.step + 1}-{step}")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _compile(training: Training, step: int) -> None:
    """Compile for the batches of `step`, counted from 0, if their shape is new."""
    shape = training.task.shape(step)
    if shape in training.compiled:
        return
    begin = time.perf_counter()
    # Not those made ahead: a task may still have to learn what belongs into them.
    inputs = map(Tensor, training.task.shaped_inputs(step))
    training.engine.prepare(training.step, *inputs)
    training.compiled.add(shape)
    for_what = f" for {shape[0]} sequences of {shape[1]}" if len(training.run.sizes.shapes()) > 1 else ""
    seen = f"; {shape[2]} tokens of each in the layers that drop some" if shape[2:] else ""
    training.say(f"compiled{for_what} in {time.perf_counter() - begin:.1f} s{seen}")
    if (rounded := training.engine.rounded) and len(training.compiled) == 1:
        kinds = ", ".join(f"{kind} {count}" for kind, count in rounded.most_common())
        training.say(
            f"bfloat16: CPUs have no kernels; computed in float32, rounded after {rounded.total()} operators: {kinds}"
        )


def _build_step(run: Run, engine: Engine, task: Task, net: nn.Cell, report: Report) -> Training:
    config = run.config
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
    )
    step.graph_key = {
        "family": run.family,
        "model": run.model.to_dict(),
        "optimizer": _state_of_optimizer(config),
        "accumulate": config.accumulate,
        "loss_scale": run.loss_scale is not None,
        "lora": _state_of_adapters(run),
        **task.graph_key(),
    }
    scale = None
    if run.loss_scale is not None:
        scale = LossScale(run.loss_scale, config.loss_scale_factor, config.loss_scale_window)
    batches = Prefetched(task.inputs, config.steps)
    guard = SpikeGuard(config.rewind_at_spike, config.spike_window) if config.rewind_at_spike else None
    return Training(run, engine, task, report, step.set_train(), optimizer, batches, scale, guard)


def _optimizer(run: Run, engine: Engine, net: nn.Cell, report: Report) -> AdamW | SGD | Adafactor:
    weights = net.trainable_params()
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
        )
    return AdamW(
        weights,
        beta1=run.config.adam_beta1,
        beta2=run.config.adam_beta2,
        epsilon=run.config.adam_epsilon,
        weight_decay=run.config.weight_decay,
        bias_correction=run.config.optimizer == "adamw",
        on_host=run.strategy.optimizer_on_host,
    )


def run_steps(
    training: Training, writer: MetricsWriter | None, saver: Saver, steps_done: int
) -> tuple[int, StepMetrics, StepMetrics]:
    """All steps still to do. Returns the steps done then and the first and the last one's metrics, as this rank knows
    them."""
    run, guard, first, last, step = training.run, training.guard, None, None, steps_done
    left_out, log_rank = parse_steps(run.config.skip_steps), run.strategy.mesh.first_rank_of_last_stage
    for step in range(steps_done + 1, run.config.steps + 1):
        if any(step in steps for steps in left_out):
            if writer:
                writer.pass_over()
        else:
            metrics = _one_step(training, step)
            is_spike = guard is not None and training.engine.share(guard.is_spike(metrics.loss), log_rank)
            with saver.saving_after_an_error(step):
                if writer and np.isfinite(metrics.loss):
                    writer.write(metrics)
                training.engine.backend.announce_step(step)
            if guard and is_spike:
                _rewind(training, guard, saver, step)
                continue
            first, last = first or metrics, metrics
        if saver.after_step(step):
            break
    assert first and last
    return step, first, last


def _one_step(training: Training, step: int) -> StepMetrics:
    """Step number `step`, counted from 1.

    Raises:
        FloatingPointError: loss or gradients are not finite; nothing was saved of that step.
    """
    _compile(training, step - 1)
    run, engine, start = training.run, training.engine, time.perf_counter()
    high, low = run.learning_rate, run.min_learning_rate
    rate = learning_rate(step, high, low, run.warmup_steps, run.decay_steps, run.config.schedule)
    training.optimizer.prepare(step, rate)
    scale = training.loss_scale
    if scale:
        set_number(training.step.loss_scale, scale.value)
    used_scale = scale.value if scale else None
    inputs = training.batch(step - 1)
    if run.config.rerun_every and step % run.config.rerun_every == 0:
        loss, norm, *counts = run_twice(engine, training.step, training.report, inputs, step)
    else:
        loss, norm, *counts = engine.run(training.step, *inputs)
    values = float(loss.asnumpy().reshape(())), float(norm.asnumpy().reshape(()))
    is_fine = bool(np.isfinite(values).all())
    may_go_on = scale.follow(bool(np.isfinite(values[1]))) if scale else False
    is_lost = not is_fine and not (may_go_on and np.isfinite(values[0]))  # the weights, too
    if is_lost and training.guard is None:
        raise FloatingPointError(_not_finite(engine, step, *values))
    seconds = time.perf_counter() - start
    batch_size, length = run.sizes.of_step(step - 1)
    more = training.task.metrics(step - 1, counts[0].asnumpy() if counts else None)
    norm_or_none = values[1] if is_fine else None
    tokens = batch_size * length / seconds
    told_loss = math.nan if is_lost else values[0]  # a spike, whatever the loss before the update was
    return StepMetrics(step, told_loss, rate, norm_or_none, seconds, tokens, used_scale, more)


def _not_finite(engine: Engine, step: int, loss: float, norm: float) -> str:
    told = f"step {step}: loss {loss}, gradient norm {norm}"
    found = engine.backend.first_not_finite()
    if found is None:
        more = ", or find the operator: --find-nan" if engine.partitions_itself else ""
        return f"{told}; lower --learning-rate{more}"
    return f"{told}; first not finite: {' and '.join(found) or 'no operator, so a weight was'}"


def _save(training: Training, token: int) -> None:
    """Write the whole model, or the adapters. `token` tells this run's parts from those of one that was killed here."""
    run, config = training.run, training.run.config
    shapes = run.lora.shapes(run.model) if run.lora else parameter_shapes(run.model)
    wanted = {f"model.{name}" for name in shapes}
    parts_folder = config.output_dir / f".checkpoint_parts-{token}"
    whole = gather_whole(training.step, training.engine, training.report, parts_folder, wanted.__contains__)
    if whole is None:
        return
    named = {name.removeprefix("model."): value for name, value in whole.items()}
    if run.lora:
        assert config.from_checkpoint
        adapter, base = Adapter(run.lora, named), config.from_checkpoint
        write_adapter(config.checkpoint_dir, adapter, *load_config(base), base, training.task.add_files)
    else:
        save_checkpoint(config.checkpoint_dir, named, run.family, run.model, training.task.add_files)


def _write_resolved(run: Run, report: Report) -> None:
    """What the run really used, beside its metrics."""
    values: dict[str, Any] = {
        # A run file that repeats it; what it was read from is all in it.
        "train": {
            k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(run.config).items() if k != "run"
        },
        "model": run.model.to_dict(),
        "strategy": {k: v for k, v in dataclasses.asdict(run.strategy).items() if k not in ("rules", "lines")},
        "resolved": {name: getattr(run, name) for name in ("seq_len", *SCHEDULE)},
        "versions": versions(),
        "parallel": report.to_dict(),
    }
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    write_text_atomically(run.config.output_dir / "config.json", text)
