# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, model, engine, one step after another, metrics, checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from sporeloom.checkpoint.manifest import FOLDER
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import recover_folder, remove
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import first_line
from sporeloom.core.locks import one_writer
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.environment import is_first_process
from sporeloom.train.audit_writer import AuditWriter
from sporeloom.train.config import FLOAT32_BYTES, Run
from sporeloom.train.elastic_start import ElasticStart
from sporeloom.train.evaluations import Evaluations
from sporeloom.train.export import write_model
from sporeloom.train.flags import ValidationFlags
from sporeloom.train.folder import clear, point_to
from sporeloom.train.history import History
from sporeloom.train.loading import averaged_weights, begin_averages, start_from
from sporeloom.train.metrics import MetricsWriter, StepMetrics
from sporeloom.train.optim import set_number
from sporeloom.train.rerun import run_twice
from sporeloom.train.resolved import settings_of, write_resolved
from sporeloom.train.run_summary import FILE as SUMMARY
from sporeloom.train.run_summary import PeakMemory, describe, write_summary
from sporeloom.train.samples import Samples
from sporeloom.train.saving import Saver
from sporeloom.train.spikes import SpikeGuard, parse_steps
from sporeloom.train.start import Training, compile_for, start
from sporeloom.train.state import make_saver, resume, rewind
from sporeloom.train.tensorboard import TensorBoard
from sporeloom.train.trackers import GuardedTracker, TrackedRun, Tracker, mark_failed, open_trackers, reporting_to
from sporeloom.train.utilization import uncounted
from sporeloom.train.validation import Validation

LEFTOVERS = (
    ".checkpoint_parts-*",
    ".profile_parts",
    ".*checkpoint.*.partial",
    ".*checkpoint.replaced",
    ".*.json.*.partial",
    "data/.*.partial",
)
"""Files of a killed run in its folder, besides unfinished states and tokens."""


def train(run: Run) -> Path | None:
    """Train as `run` says. Returns the checkpoint folder; None if the run was stopped before its end.

    Raises:
        ConfigError: another run writes to the same folder, or nothing can be written there.
    """
    if not is_first_process():
        return _train(run)
    with one_writer(run.config.output_dir):
        recover_folder(run.config.checkpoint_dir)
        recover_folder(run.config.best_dir)
        recover_folder(run.config.ema_dir)
        for pattern in LEFTOVERS:
            for path in run.config.output_dir.glob(pattern):
                remove(path)
        _check_room(run)
        return _train(run)


def _train(run: Run) -> Path | None:
    began = time.time()
    training = start(run)
    run, config = training.run, training.run.config
    steps_done = resume(training) if config.resume else 0
    compile_for(training, min(steps_done, config.steps - 1))
    if training.engine.rank == 0:  # now that all layouts are known
        if config.overwrite:
            clear(config.output_dir)
        point_to(config.output_dir)
        write_resolved(training.run, training.report)
    training.engine.barrier()  # another rank writes to the folder next
    if config.from_checkpoint and (run.lora or not config.resume):
        start_from(
            *(training.step, training.engine, training.report, config.from_checkpoint, training.task.new_weights),
            only_frozen=bool(config.resume),
            without=training.task.unused_weights,
        )
        training.say(f"weights from {config.from_checkpoint}")
    if config.ema_decay and not steps_done:
        begin_averages(training.step, training.engine, training.report)
    if steps_done < config.steps:
        training.task.begin(training.step, steps_done)
    if 0 < config.stop_after <= steps_done:
        raise ConfigError(f"--stop-after {config.stop_after}: {steps_done} steps are done; give a later one")
    saver = make_saver(training, steps_done)  # after the schedule of the resumed run is known
    if config.audit_every:
        task = training.task
        verb = "train" if config.task == "pretraining" else config.task
        settings = {"verb": verb, "folder": str(Path.cwd()), **settings_of(run), "data": task.data_state()}
        training.audit = AuditWriter(run, training.engine, settings, saver.snapshot, task.sample_ids, steps_done)
        saver.before_saving = training.audit.before_saving
    if config.chip and (what := uncounted(run)):
        training.say(f"--chip {config.chip}: no MFU and HFU, because the FLOPs of {what} are not counted")
    if not training.engine.is_log_rank:
        return _steps_and_model(training, [], saver, steps_done)
    elastic = ElasticStart.of_environment()
    earlier = elastic.earlier if elastic else ()
    training.history = History.begin(config.output_dir, began, steps_done, bool(config.resume), earlier)
    with reporting_to(_trackers(training, training.history, steps_done)) as trackers:
        found = _steps_and_model(training, trackers, saver, steps_done)
        if found is None:
            mark_failed(trackers)
    return found


def _steps_and_model(training: Training, trackers: list[Tracker], saver: Saver, steps_done: int) -> Path | None:
    """Train, and write the model. Returns its folder; None if the run was stopped before its end."""
    config = training.run.config
    if training.engine.is_log_rank:
        with MetricsWriter(config.output_dir, config.steps, steps_done, trackers) as writer:
            done, first, last = run_steps(training, writer, saver, steps_done)
    else:
        done, first, last = run_steps(training, None, saver, steps_done)
    is_done = _is_over(training, done)
    with training.times.measure("checkpoint"):
        if is_done and (config.save_every or config.save_minutes):
            saver.save(done)
        saver.wait()
    training.engine.barrier()  # nobody leaves before all is written: msrun ends the others with the first
    if not is_done:
        training.say(f"stopped after step {done}; --resume continues from there")
        training.engine.barrier()  # likewise: before it is reported
        return None
    if first and last:
        training.say(f"loss {first.loss:.4f} -> {last.loss:.4f} in {done - steps_done} steps")
    if training.validation and done < config.steps:
        training.say(f"stopped early after step {done}: {training.validation.best.describe()}")
    with training.times.measure("checkpoint"):
        _write(training, config.checkpoint_dir, saver)
        if config.ema_decay:
            _write(training, config.ema_dir, saver, averaged=True)
    _summarize(training)
    training.say(f"checkpoint in {config.checkpoint_dir}")
    return config.checkpoint_dir


def _trackers(training: Training, history: History, steps_done: int) -> list[Tracker]:
    """Begin the run in TensorBoard and at the trackers of its configuration."""
    run, config = training.run, training.run.config
    tracked = TrackedRun(
        project=config.project or "sporeloom",
        name=config.run_name or config.output_dir.resolve().name or "run",
        id=history.id,
        folder=config.output_dir,
        settings=json.loads(json_text(settings_of(run))),
        steps_done=steps_done,
    )
    return [GuardedTracker("TensorBoard", lambda: TensorBoard(tracked)), *open_trackers(config.tracker, tracked)]


def _summarize(training: Training) -> None:
    """Log the time, throughput and memory of the run, and write them to its folder."""
    memory = PeakMemory.of_process().over_ranks(training.engine)
    history, folder = training.history, training.run.config.output_dir
    if history and (training.times.steps or not (folder / SUMMARY).exists()):
        goodput = history.goodput(folder)
        summary = {
            **training.times.summary(training.utilization),
            "starts": len(history.starts),
            "goodput": None if goodput is None else round(goodput, 4),
            **memory,
            **(training.measured.summary() if training.measured else {}),
        }
        write_summary(folder, summary)
        training.say(describe(summary))
        if training.measured and (line := training.measured.last_words()):
            training.say(line)
    elif history:  # no step was left: it is that of the run, and newer than metrics.jsonl, which is not
        (folder / SUMMARY).touch()


def run_steps(
    training: Training, writer: MetricsWriter | None, saver: Saver, steps_done: int
) -> tuple[int, StepMetrics | None, StepMetrics | None]:
    """All steps still to do. Returns the steps done then and the first and the last one's metrics, as this rank knows
    them; None where none was left or all were skipped."""
    run, guard, first, last, step = training.run, training.guard, None, None, steps_done
    left_out, log_rank = parse_steps(run.config.skip_steps), run.strategy.mesh.first_rank_of_last_stage
    for number in range(steps_done + 1, run.config.steps + 1):
        if training.validation and training.validation.best.is_over:
            break
        step = number
        if any(step in steps for steps in left_out):
            if writer:
                writer.pass_over()
            if training.audit:
                training.audit.skip(step)
        else:
            if training.profile:
                training.profile.begin_step(step)
            metrics = _one_step(training, step)
            if training.profile:
                training.profile.end_step(step)
            is_spike = guard is not None and training.engine.broadcast_value(guard.is_spike(metrics.loss), log_rank)
            if training.audit:
                training.audit.begin(metrics)
            if training.validation and not is_spike and training.validation.is_due(step, run.config.steps):
                metrics = _validated(training, training.validation, metrics, saver)
            last_step = step if _is_over(training, step) else run.config.steps
            if training.samples and not is_spike and training.samples.is_due(step, last_step):
                _sample(training, training.samples, step)
            if guard and is_spike:
                _lose_step(training, guard, saver, writer, metrics)
                continue
            with saver.saving_after_an_error(step):
                try:
                    if training.evaluations and training.evaluations.is_due(step, last_step):
                        metrics = _evaluated(training, training.evaluations, metrics)
                finally:  # the step is done, whatever became of its evaluation
                    if writer:
                        writer.write(metrics)
                training.engine.backend.announce_step(step)
            first, last = first or metrics, metrics
        if 0 < run.config.stop_after <= step:
            saver.request_stop()
        with training.times.measure("checkpoint"):
            is_stopped = saver.after_step(step)
            if training.audit:
                training.audit.end(_is_over(training, step))
        if is_stopped:
            break
    if training.profile:
        training.profile.finish()
    if training.samples and steps_done < step == run.config.steps and training.samples.last_step != step:
        _sample(training, training.samples, step)  # the last step was skipped, or lost at a spike
    return step, first, last


def _lose_step(
    training: Training, guard: SpikeGuard, saver: Saver, writer: MetricsWriter | None, metrics: StepMetrics
) -> None:
    """Return to a checkpoint after a spike. After the last step its weights are those of the run, which are evaluated."""
    training.engine.backend.announce_step(metrics.step)
    try:
        rewind(training, guard, saver, metrics.step)
        if training.evaluations and metrics.step == training.run.config.steps:
            with saver.saving_after_an_error(metrics.step):
                metrics = _evaluated(training, training.evaluations, metrics)
    finally:
        if writer:
            writer.write(metrics)


def _is_over(training: Training, step: int) -> bool:
    """Whether the run ends after `step`, also early."""
    return step == training.run.config.steps or (training.validation is not None and training.validation.best.is_over)


def _sample(training: Training, samples: Samples, step: int) -> None:
    with training.times.measure("evaluation"):
        samples.write(step)


def _evaluated(training: Training, evaluations: Evaluations, metrics: StepMetrics) -> StepMetrics:
    """Metrics of a step with the scores on benchmarks after it."""
    with training.times.measure("evaluation"):
        scores = evaluations.metrics()
    told = ", ".join(
        f"{name.removeprefix('evaluation/')} {value:.4f}"
        for name, value in scores.items()
        if not name.endswith("_stderr")
    )
    training.say(f"step {metrics.step}: evaluation {told}")
    return dataclasses.replace(metrics, more={**metrics.more, **scores})


def _one_step(training: Training, step: int) -> StepMetrics:
    """Step number `step`, counted from 1.

    Raises:
        FloatingPointError: loss or gradients are not finite; nothing was saved of that step.
    """
    compile_for(training, step - 1)
    run, engine, start = training.run, training.engine, time.perf_counter()
    update = training.updates + 1
    rate = run.rate_of(update)
    training.prepare(update, rate)
    scale = training.loss_scale
    if scale:
        set_number(training.step.loss_scale, scale.value)
    used_scale, earlier = scale.value if scale else None, dict(training.times.seconds)
    with training.times.measure("data"):
        inputs = training.batch(step - 1)
    engine.backend.begin_step(step)
    with training.times.measure_step(engine.backend.seconds_of_communication):
        if run.config.rerun_every and step % run.config.rerun_every == 0:
            loss, norm, *counts = run_twice(engine, training.step, training.report, inputs, step)
        else:
            loss, norm, *counts = engine.run(training.step, *inputs)
        values = float(loss.asnumpy().reshape(())), float(norm.asnumpy().reshape(()))
    is_fine = bool(np.isfinite(values).all())
    training.updates += bool(np.isfinite(values[1]))  # as the step itself decides, on every rank
    may_go_on = scale.follow(bool(np.isfinite(values[1]))) if scale else False
    # Without a finite loss the weights are lost, too, unless the step is one of a few with bad data.
    is_lost = not is_fine and not (may_go_on and (np.isfinite(values[0]) or run.config.max_skipped_steps))
    if is_lost and training.guard is None:
        raise FloatingPointError(_not_finite(engine, step, *values, max(scale.num_skipped - 1, 0) if scale else 0))
    seconds = time.perf_counter() - start
    batch_size, length = run.sizes.of_step(step - 1)
    more = training.task.metrics(step - 1, counts[0].asnumpy() if counts else None)
    norm_or_none = values[1] if is_fine else None
    tokens, flops = batch_size * length, training.utilization.of_step(batch_size, length)
    training.times.add_step(tokens, flops)
    told_loss = math.nan if is_lost else values[0]  # a spike, whatever the loss before the update was
    rates = training.utilization.rates(tokens, flops, seconds)
    rates |= training.times.since(earlier)
    if training.measured:
        rates["predicted_step_time_s"] = training.measured.prediction.step_time_s
        sampling = 0.0 if run.config.has_data_ids else rates["data_s"]  # which no dry run predicts
        if note := training.measured.add(seconds - sampling):
            training.say(note)
    return StepMetrics(step, told_loss, rate, norm_or_none, seconds, tokens / seconds, used_scale, **rates, more=more)


def _validated(training: Training, validation: Validation, metrics: StepMetrics, saver: Saver) -> StepMetrics:
    """Metrics of a step with those of a validation after it; the model is written where it is the best so far."""
    config: Any = training.run.config
    with training.times.measure("validation"):
        losses = validation.metrics()
        if config.validate_ema:
            with averaged_weights(training.step, training.engine, training.report):
                losses |= validation.metrics("ema_")
    told = ", ".join(f"{name} {losses[f'validation/{name}/loss']:.4f}" for name in validation.sets)
    of_averages = f"; of averages {losses['validation/ema_loss']:.4f}" if config.validate_ema else ""
    training.say(f"step {metrics.step}: validation loss {told}{of_averages}")
    if validation.best.follow(metrics.step, losses["validation/loss"]) and config.keep_best:
        _write(training, config.best_dir, saver)
        training.engine.barrier()  # a rank that went on would wait in a step for the one that writes
    return dataclasses.replace(metrics, more={**metrics.more, **losses})


def _not_finite(engine: Engine, step: int, loss: float, norm: float, num_skipped: int) -> str:
    told = f"step {step}: loss {loss}, gradient norm {norm}"
    told += f", after {num_skipped} skipped steps" if num_skipped else ""
    found = engine.backend.first_not_finite()
    if found is None:
        more = ", or find the operator: --find-nan" if engine.backend.finds_nan else ""
        return f"{told}; lower --learning-rate{more}"
    return f"{told}; first not finite: {' and '.join(found) or 'no operator, so a weight was'}"


def _check_room(run: Run) -> None:
    """Raises:
    ConfigError: the disk has not even room for what is written in the end, and for one state if there are any.
    """
    config, numbers = run.config, sum(map(math.prod, run.trained_shapes().values()))
    copies = (
        1
        + (isinstance(config, ValidationFlags) and config.keep_best)
        + (config.ema_decay > 0)
        + (config.save_every > 0 or config.save_minutes > 0) * (1 if config.optimizer == "sgd" else 2)
    )
    free, needed = shutil.disk_usage(config.output_dir).free, FLOAT32_BYTES * numbers * copies
    if free < needed:
        raise ConfigError(
            f"{config.output_dir}: {free / 1e6:,.1f} MB are free, the run writes at least {needed / 1e6:,.1f} MB of weights "
            "and states there; make room, or give another --output-dir"
        )


def _write(training: Training, folder: Path, saver: Saver, averaged: bool = False) -> None:
    """Write the model to `folder`.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_model(training, folder, saver.token, averaged)
    except (OSError, SafetensorError) as error:
        raise ConfigError(_not_written(folder, error, saver)) from None


def _not_written(folder: Path, error: OSError | SafetensorError, saver: Saver) -> str:
    """Describe why a model cannot be written, and what to do."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    told = f"{folder}: the model cannot be written: {why}; "
    if saver.last_step is None:
        return f"{told}no state was saved, so it has to be trained again, with --save-every after room was made"
    state = saver.root / FOLDER.format(saver.last_step)
    return f"{told}{state} has its state: make room, then give the same command with --resume to write it"
