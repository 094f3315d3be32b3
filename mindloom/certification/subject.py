# SPDX-License-Identifier: Apache-2.0
"""What a proof trains: a family's model made small, or a network of the user's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from mindloom.certification.shrink import BATCH, small_strategies
from mindloom.certification.training import STEPS, train_decoder, train_steps
from mindloom.errors import ConfigError
from mindloom.models.config import ModelConfig
from mindloom.parallel.cells import CutBatch, average_over_all_rows, prepare_to_cut
from mindloom.planner.task import task_from
from mindloom.reader import fields_from, read_json
from mindloom.runtime.engine import Engine
from mindloom.strategy.config import SINGLE_DEVICE, Strategy
from mindloom.strategy.loader import load_strategy, strategy_of

ONE_DEVICE = "one_device"
MAX_GRAD_NORM = 1e6
"""Above what gradients have: their norm is compared, and a wrong one does not hide which gradient is wrong."""


def train(subject: dict[str, Any], which: str, folder: Path) -> None:
    """Train a subject on one device, or under its small strategies of the given numbers, into files in `folder`."""
    chosen = {ONE_DEVICE: SINGLE_DEVICE}
    if which != ONE_DEVICE:
        given = subject.get("strategy")
        large = load_strategy(given) if given else strategy_of(subject["settings"])
        small = small_strategies(large, subject.get("num_layers"), subject["processes"])
        chosen = {number: small[int(number)] for number in which.split(",")}
    for name, strategy in chosen.items():
        engine = (_own if "file" in subject else _decoder)(subject, strategy, folder / name)
        engine.close()


def _decoder(subject: dict[str, Any], strategy: Strategy, out: Path) -> Engine:
    # A pipeline adds up its microbatches; one device, which it is held against, takes the batch at once.
    accumulate = 2 if subject["accumulate"] > 1 and strategy.mesh.pp == 1 and strategy.mesh.size > 1 else 1
    config = fields_from(ModelConfig, read_json(out.parent / "model.json"))
    task = task_from(subject.get("task"), config)
    return train_decoder(subject["family"], config, strategy, out, BATCH, accumulate, MAX_GRAD_NORM, task)[0]


def _own(subject: dict[str, Any], strategy: Strategy, out: Path) -> Engine:
    make, is_parallel = own_network(Path(subject["file"]), subject["name"]), strategy.mesh.size > 1
    with np.load(out.parent / "inputs.npz") as archive:
        inputs = [archive[name] for name in archive.files]

    def build() -> nn.Cell:
        net = make()
        if is_parallel:  # as auto_parallel does
            prepare_to_cut(net)
            for _, cell in net.cells_and_names():
                average_over_all_rows(cell)
        return net

    return train_steps(
        build,
        lambda: ([Tensor(array) for array in inputs] for _ in range(STEPS)),
        strategy,
        out,
        around=lambda net: CutBatch(net, strategy.mesh) if is_parallel else net,
        scale=1 / strategy.num_parts(),
    )[0]


def own_network(file: Path, name: str) -> Callable[[], nn.Cell]:
    """What makes the user's network: `name` of a Python file.

    Raises:
        ConfigError: the file has none.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    if not callable(made := getattr(module, name, None)):
        raise ConfigError(f"{file}: has no {name} to make the network")
    return made
