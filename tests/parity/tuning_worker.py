# SPDX-License-Identifier: Apache-2.0
"""Runs tasks of fine-tuning as their tools do, under several strategies, for test_tuning."""

import json
import math
from importlib import import_module
from pathlib import Path

from sporeloom.runtime.environment import launched_processes
from sporeloom.train import distill, policy, preferences, tuning
from sporeloom.train.checks import check

PATHS = ("data", "from_checkpoint", "strategy", "output_dir", "chat_template", "reward_model", "teacher")


def run(out, strategies, tasks):
    """Each task {name: (configuration's class, flags)} under each strategy, to OUT/STRATEGY/NAME."""
    train = import_module("sporeloom.train.trainer").train  # loads MindSpore
    tell_what_is_held()
    for strategy in strategies:
        for name, (kind, flags) in tasks.items():
            flags = {
                **flags,
                "output_dir": str(Path(out) / Path(strategy or "one_device").stem / name),
                "strategy": strategy,
            }
            given = {flag: Path(value) if flag in PATHS and value else value for flag, value in flags.items()}
            given = {flag: tuple(value) if isinstance(value, list) else value for flag, value in given.items()}
            made = next(getattr(part, kind) for part in (tuning, policy, preferences, distill) if hasattr(part, kind))
            train(check(made(**given), launched_processes()))


def tell_what_is_held():
    """Tasks that sample write beside their metrics what one rank holds beside the model: held.json."""
    task = import_module("sporeloom.tasks.policy").PolicyTask
    metrics = task.metrics

    def told(self, step, counts):
        if self.run.strategy.mesh.size == 1:
            return metrics(self, step, counts)
        own = {id(parameter) for parameter in self.net.get_parameters()}
        # What this rank's graphs do not use is there, too, whole, in a process without a device.
        used = {
            name
            for program in self.engine.backend.programs.values()
            for graph in program.graphs
            for name in graph.parameters
        }
        nets = {
            "reference": self.reference and self.reference.net,
            "reward model": self.judge and self.judge.net,
            "KV cache": self.rollouts.decoding.net,
        }
        held = {
            what: sum(4 * math.prod(p.shape) for p in net.get_parameters() if p.name in used and id(p) not in own)
            for what, net in nets.items()
            if net
        }
        (self.config.output_dir / "held.json").write_text(json.dumps(held))
        return metrics(self, step, counts)

    task.metrics = told
