# SPDX-License-Identifier: Apache-2.0
"""The one line in a user's script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspore import nn

from mindloom.parallel.parallelize import parallelize, wrap
from mindloom.parallel.report import Report
from mindloom.parallel.step import TrainStep
from mindloom.runtime.engine import Engine
from mindloom.strategy.loader import load_strategy

_engine: Engine | None = None
_networks: dict[int, tuple[nn.Cell, Report]] = {}  # by id; the Cell is kept so that the id stays its own
_contents: dict[int, tuple[nn.Cell, nn.Cell | None]] = {}
_steps: dict[int, tuple[nn.Cell, TrainStep]] = {}
_original_compile_and_run = nn.Cell.compile_and_run


def auto_parallel(net: nn.Cell, strategy_file: str | Path) -> nn.Cell:
    """Make a network, written for one device, run as the strategy file says; use what is returned in its place.

    Build the optimizer on the result's `trainable_params()` and train with `nn.TrainOneStepCell` as on one device. Every
    process of the job runs the same script with the same, whole batches; the parameters of each hold its part.
    In a pipeline the loss is the mean over the microbatches, known to the last stage; the others return 0.

    Raises:
        ConfigError: the file, the launched processes or the network do not fit each other.
    """
    global _engine
    strategy = load_strategy(strategy_file)
    _engine = Engine(strategy)
    report = parallelize(net, strategy)
    network = wrap(net, strategy)
    _networks[id(network)] = (network, report)
    nn.Cell.compile_and_run = _compile_and_run
    return network


def is_log_rank() -> bool:
    """Whether this is the one process of the job that knows the loss and tells it; always, on one device."""
    return _engine is None or _engine.speaks


def report_of(network: nn.Cell) -> Report:
    """What `auto_parallel` did to the network it returned."""
    return _networks[id(network)][1]


def _compile_and_run(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
    """Graph-mode calls of Cells around a parallel network go to the engine; all others stay as they are."""
    assert _engine is not None
    network = _network_in(cell)
    if network is None or (_engine.strategy.mesh.pp == 1 and not _engine.partitions_itself):
        return _original_compile_and_run(cell, *args, **kwargs)
    if _engine.strategy.mesh.pp > 1 and type(cell) is nn.TrainOneStepCell:
        return _run_on_engine(_pipeline_step(cell, network), *args)[0]
    return _run_on_engine(cell, *args)


def _network_in(cell: nn.Cell) -> nn.Cell | None:
    """The parallel network inside a Cell, found once."""
    if id(cell) not in _contents:
        network = next((part for _, part in cell.cells_and_names() if id(part) in _networks), None)
        _contents[id(cell)] = (cell, network)
    return _contents[id(cell)][1]


def _run_on_engine(cell: nn.Cell, *args: Any) -> Any:
    assert _engine is not None
    if _engine.partitions_itself:
        return _engine.program(cell, args).run(args)
    return _original_compile_and_run(cell, *args)


def _pipeline_step(cell: nn.Cell, network: nn.Cell) -> TrainStep:
    """A step that can run a pipeline, in place of nn.TrainOneStepCell, which cannot."""
    assert _engine is not None
    if id(cell) not in _steps:
        report, mesh = _networks[id(network)][1], _engine.strategy.mesh
        microbatches = _engine.strategy.pipeline.num_microbatches if mesh.pp > 1 else 1
        step = TrainStep(network, cell.optimizer, report, _engine.rank, _engine.all_reduce(), scale=1 / microbatches)
        _steps[id(cell)] = (cell, step.set_train(cell.training))
    return _steps[id(cell)][1]
