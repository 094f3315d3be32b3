# SPDX-License-Identifier: Apache-2.0
"""Trains as a user's tools/train.py does, saves at the middle, then goes on from what other meshes saved."""

import json
import shutil
from importlib import import_module
from pathlib import Path

from sporeloom.checkpoint.manifest import FOLDER
from sporeloom.runtime.environment import launched_processes
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig

STEPS, MIDDLE = 4, 2
MODULES = ("sporeloom.train.start", "sporeloom.train.trainer", "sporeloom.train.state")
DATA = Path(__file__).resolve().parents[2] / "examples" / "small_town.txt"


class Losses:
    """What a MetricsWriter is to a run."""

    def __init__(self):
        self.values = []

    def write(self, metrics):
        self.values.append(metrics.loss)


class Mesh:
    """A run under one mesh, its graph compiled once for everything it does."""

    def __init__(self, out, strategy, resume):
        self.out, self.name = out, Path(strategy).stem
        self.start, self.trainer, self.state = map(import_module, MODULES)  # which load MindSpore
        self.config = TrainConfig(
            data=DATA,
            strategy=None if strategy == "one_device" else Path(strategy),
            output_dir=out / self.name,
            config=out / "model.json",
            tokenizer=out / "tokenizer.model",
            steps=STEPS,
            seq_len=32,
            learning_rate=1e-3,
            # Adam divides by |gradient| + epsilon: with 1e-8 an element whose gradient happens to be as small as rounding
            # takes a step of arbitrary size, which says nothing of what is compared here.
            adam_epsilon=1e-5,
            save_every=MIDDLE,
            resume=resume,
        )
        self.training = self.start.start(check(self.config, launched_processes()))
        self.engine = self.training.engine

    def run(self, steps_done, kind):
        saver, losses = self.state.make_saver(self.training, steps_done), Losses()
        self.trainer.run_steps(self.training, losses, saver, steps_done)
        if self.engine.is_log_rank:
            (self.out / f"{self.name}.from_{kind}.json").write_text(json.dumps(losses.values))
        if self.engine.rank == 0:
            shutil.copytree(self.config.states_dir / FOLDER.format(STEPS), self.out / f"{self.name}_from_{kind}")

    def save(self):
        self.run(0, "the_start")
        if self.engine.rank == 0:
            shutil.copytree(self.config.states_dir / FOLDER.format(MIDDLE), self.out / "middle" / self.name)

    def resume(self):
        for source in sorted((self.out / "middle").iterdir()):
            if self.engine.rank == 0:
                shutil.rmtree(self.config.states_dir)
                shutil.copytree(source, self.config.states_dir / FOLDER.format(MIDDLE))
            self.engine.barrier()  # all wait for the copy
            self.run(self.state.resume(self.training), source.name)


def run(out, phases, strategies):
    """`phases`, in order: save (4 steps, the state saved after 2 and after 4), resume (go on from what all meshes saved).

    `strategies`: files, or one_device.
    """
    meshes = [Mesh(Path(out), strategy, phases == ["resume"]) for strategy in strategies]
    for phase in phases:
        for mesh in meshes:
            getattr(mesh, phase)()
            mesh.engine.barrier()  # what it wrote is there for the next
    for mesh in meshes:
        mesh.engine.close()
