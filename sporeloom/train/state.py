# SPDX-License-Identifier: Apache-2.0
"""The state of a run besides its tensors: saving and resuming it."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from sporeloom.checkpoint.contents import WEIGHTS_ALONE, model_of
from sporeloom.checkpoint.manifest import FOLDER, MANIFEST, Manifest, checkpoints
from sporeloom.checkpoint.model_folder import write_config
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import remove_folder
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import number_problem
from sporeloom.core.reader import is_a
from sporeloom.train.config import Run
from sporeloom.train.elastic_start import memory_dir
from sporeloom.train.loading import load_state, newest_complete
from sporeloom.train.saving import Saver, versions
from sporeloom.train.spikes import SpikeGuard
from sporeloom.train.start import Training, adapter_settings, compile_for, optimizer_settings

UNSAID = {
    **{"schedule": "cosine", "random_ltd": None, "packing": "stream", "curriculum": None},
    **{"advantage": "group", "reward_kl_coef": 0.0, "ema_decay": 0.0},
    **{"max_resamples": 0, "overlong_buffer": 0, "overlong_penalty": 1.0, "mask_truncated_completions": False},
    "lmbda": 0.0,
    "optimizer_state_dtype": "float32",
}
"""Values of settings that checkpoints of earlier releases do not name."""
SCHEDULE = ("learning_rate", "min_learning_rate", "warmup_steps", "decay_steps")


def make_saver(training: Training, steps_done: int) -> Saver:
    """Create the object that saves the run's state, as its configuration says. The state after `steps_done` is
    saved already."""
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
        last_step=_saved_step(config.states_dir, steps_done),
        memory=(folder, config.memory_save_every) if (folder := memory_dir()) else None,
    )


def _saved_step(root: Path, steps_done: int) -> int | None:
    """The step whose state `root` has, if it is that of the run; one in memory does not outlive the job."""
    return steps_done if steps_done and (root / FOLDER.format(steps_done)).exists() else None


def _state(training: Training) -> dict[str, Any]:
    """The state that a resumed run needs besides tensors. Sample order and learning rate are functions of these
    and the step."""
    run = training.run
    return {
        "data": training.task.data_state(),
        "optimizer": optimizer_settings(run),
        "schedule": {name: getattr(run, name) for name in SCHEDULE},
        "updates": training.updates,
        "loss_scale": training.loss_scale and training.loss_scale.state(),
        "validation": training.validation and training.validation.state(),
        "lora": adapter_settings(run),
        "beside": training.task.beside(),
        "frozen": run.groups.frozen_names if run.groups else [],
        "task": training.task.state(),
    }


def resume(training: Training) -> int:
    """Load the newest complete checkpoint. Returns the steps done; where that is all of them the final model is still to be
    written, as a run may have been killed before that.

    Raises:
        ConfigError: there is none, or it belongs to a run that differs in more than its mesh.
    """
    run, config = training.run, training.run.config
    folder, manifest = newest_complete(config.states_dir, training.engine, memory=memory_dir())
    if manifest.state.get(WEIGHTS_ALONE):
        raise ConfigError(
            f"{folder}: only weights, no training state to resume; start from them with --from-checkpoint"
        )
    mine = {"model": {"family": run.family, **run.model.to_dict()}, **_state(training)}
    family, model = model_of(manifest, folder)  # which adds what earlier releases did not write
    theirs = {"model": {"family": family, **model.to_dict()}, **manifest.state}
    given = {name for name in SCHEDULE if getattr(config, name) is not None}
    training.run = run = dataclasses.replace(
        run, **{name: value for name, value in _saved_schedule(folder, manifest).items() if name not in given}
    )
    if wrong := [*config.schedule_step_problems(*(getattr(run, name) for name in SCHEDULE))]:
        raise ConfigError(wrong)
    changed = [
        f"{folder}: {part} {difference}"
        for part in ("model", "data", "optimizer", "lora")
        for difference in differences(theirs.get(part) or {}, _plain(mine[part]), both_ways=part == "data")
    ]
    if manifest.step > config.steps:
        changed.append(f"{folder}: {manifest.step} steps are done, --steps {config.steps} leaves none")
    if changed:
        raise ConfigError(changed)
    compile_for(training, min(manifest.step, config.steps - 1))  # which determines what this rank holds
    _take_up(training, folder, manifest)
    training.say(f"resumed after step {manifest.step} from {folder}")
    return manifest.step


def differences(theirs: dict[str, Any], mine: dict[str, Any], both_ways: bool) -> Iterator[str]:
    """Settings that differ, with their values in a checkpoint and now.

    Args:
        both_ways: also of settings that only the checkpoint has.
    """
    for name in [*mine, *(name for name in theirs if both_ways and name not in mine)]:
        was, value = (each.get(name, UNSAID.get(name)) for each in (theirs, mine))
        if was != value and name != "attention":  # the kernel may be another, as the mesh may
            yield f"{name} was {was}, is {value}"


def _saved_schedule(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the learning rate schedule that a checkpoint was trained with.

    Raises:
        ConfigError: its values are not those of a schedule.
    """
    hints, found = get_type_hints(Run, include_extras=True), manifest.state["schedule"]
    wrong = [
        f"{folder / MANIFEST}: state.schedule.{name} is {value!r:.60}"
        for name, value in found.items()
        if name not in SCHEDULE or not is_a(value, hints[name]) or number_problem(value, hints[name])
    ]
    if wrong:
        raise ConfigError(wrong)
    return dict(found)


def _take_up(training: Training, folder: Path, manifest: Manifest) -> None:
    """Set everything that a step changes to the values of a checkpoint."""
    load_state(training.step, training.engine, training.report, folder, manifest)
    try:
        training.updates = int(manifest.state.get("updates", manifest.step))  # earlier releases counted every step
        if training.loss_scale and (saved := manifest.state.get("loss_scale")):
            training.loss_scale.restore(saved)
        validation, earlier = training.validation, manifest.state.get("validation")
        if validation and earlier and not validation.restore(earlier):
            training.say("other validation sets than before: the best validation loss starts anew")
        training.task.restore(manifest.state.get("task") or {})
    except (TypeError, ValueError, LookupError, AttributeError, OSError, zipfile.BadZipFile) as error:
        kind = type(error).__name__
        raise ConfigError(
            f"{folder / MANIFEST}: damaged: state.updates, loss_scale, validation or task cannot be read: {kind}: {error}"
        ) from None


def rewind(training: Training, guard: SpikeGuard, saver: Saver, step: int) -> None:
    """Return to the state of a checkpoint after a spike at `step`, and record it. All ranks take part.

    Raises:
        ConfigError: there is none to go back to.
    """
    engine, folder = training.engine, training.run.config.states_dir
    saver.wait()
    dropped = guard.to_drop(step, folder)
    engine.barrier()  # all have searched
    in_memory = checkpoints(memory) if (memory := memory_dir()) else []  # newer ones, which led to the spike
    for path in (*dropped, *in_memory) if engine.rank == 0 else ():
        remove_folder(path)
    engine.barrier()
    found, manifest = newest_complete(folder, engine)
    _take_up(training, found, manifest)
    if training.audit:
        training.audit.rewind(manifest.step, step)
    if training.history:
        training.history.rewind(training.run.config.output_dir, manifest.step + 1, step)
    training.say(f"step {step}: a spike of the loss; back to {found}, without steps {manifest.step + 1}-{step}")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a value to the types that JSON gives back."""
    plain: dict[str, Any] = json.loads(json_text(values))
    return plain
