# SPDX-License-Identifier: Apache-2.0
"""Train the subject of a proof: a scaled-down model of a family, or a custom network."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from sporeloom.certification.planting import train_with_faults
from sporeloom.certification.shrink import BATCH, rows_on_full_mesh, small_strategies
from sporeloom.certification.training import START_SCALE, STEPS, train_decoder, train_steps
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.reader import fields_from, read_json
from sporeloom.dry_run.compile import rank_report
from sporeloom.dry_run.partitioned import partition_custom
from sporeloom.models.config import ModelConfig
from sporeloom.planner.task import task_from
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.backend import Alteration
from sporeloom.strategy.config import SINGLE_DEVICE, Strategy
from sporeloom.strategy.loader import load_strategy, strategy_of

ONE_DEVICE = "one_device"
MAX_GRAD_NORM = 1e6
"""Larger than any norm of gradients: norms are compared, and clipping by a wrong norm does not change all gradients."""


def train(subject: dict[str, Any], which: str, folder: Path) -> None:
    """Train a subject on one device, or under its scaled-down strategies of the given numbers. Writes files to `folder`."""
    chosen = {ONE_DEVICE: SINGLE_DEVICE}
    if which != ONE_DEVICE:
        small = small_strategies(_large(subject), subject.get("num_layers"), subject["processes"])
        chosen = {number: small[int(number)] for number in which.split(",")}
    for name, strategy in chosen.items():
        if subject.get("faults") and which != ONE_DEVICE:
            train_with_faults(
                partial(_train_decoder, subject, strategy), folder / name, subject["faults"], subject.get("kinds", ())
            )
        else:
            (_train_custom if "file" in subject else _train_decoder)(subject, strategy, folder / name).close()


def compile_ranks(subject: dict[str, Any], ranks: Sequence[int], folder: Path) -> None:
    """Partition a custom network under the full strategy, and write the reports of `ranks` to RANK.json in `folder`."""
    strategy, make = _large(subject), load_network(Path(subject["file"]), subject["name"])
    inputs = _inputs(folder)
    rows = rows_on_full_mesh(strategy, len(inputs[0]))
    shapes = [((rows, *a.shape[1:]) if a.ndim and len(a) == len(inputs[0]) else a.shape, a.dtype) for a in inputs]
    partitioned = partition_custom(make, strategy, shapes)
    for rank in ranks:
        write_text_atomically(folder / f"{rank}.json", json.dumps(asdict(rank_report(partitioned, rank))))


def _large(subject: dict[str, Any]) -> Strategy:
    given = subject.get("strategy")
    return load_strategy(given) if given else strategy_of(subject["settings"])


def _inputs(folder: Path) -> list[NDArray[Any]]:
    with np.load(folder / "inputs.npz") as archive:
        return [archive[name] for name in archive.files]


def _train_decoder(
    subject: dict[str, Any], strategy: Strategy, out: Path, alteration: Alteration | None = None
) -> Engine:
    # A pipeline accumulates microbatches; one device, with which it is compared, takes the batch at once.
    accumulate = 2 if subject["accumulate"] > 1 and strategy.mesh.pp == 1 and strategy.mesh.size > 1 else 1
    config = fields_from(ModelConfig, read_json(out.parent / "model.json"))
    task = task_from(subject.get("task"), config)
    family = subject["family"]
    return train_decoder(
        family, config, strategy, out, BATCH, accumulate, MAX_GRAD_NORM, task, START_SCALE, alteration
    )[0]


def _train_custom(subject: dict[str, Any], strategy: Strategy, out: Path) -> Engine:
    make, inputs = load_network(Path(subject["file"]), subject["name"]), _inputs(out.parent)
    batches = lambda: ([Tensor(array) for array in inputs] for _ in range(STEPS))  # noqa: E731
    return train_steps(make, batches, strategy, out, is_custom=True)[0]


def load_network(file: Path, name: str) -> Callable[[], nn.Cell]:
    """Load the class or function `name` of a Python file, which makes a custom network.

    Raises:
        ConfigError: the file does not have it.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    if not callable(make := getattr(module, name, None)):
        raise ConfigError(f"{file}: has no class or function {name}, which makes the network")
    return make
