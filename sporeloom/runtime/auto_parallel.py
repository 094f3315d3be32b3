# SPDX-License-Identifier: Apache-2.0
"""`auto_parallel`, the one line that makes a user's script parallel, and interception of calls of parallel networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.graph import api

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.call import Call
from sporeloom.parallel.cells import (
    FunctionCell,
    Gradients,
    ParallelNetwork,
)
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.report import Report
from sporeloom.runtime.calls import calling, nested
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.given_strategy import strategy_for
from sporeloom.runtime.inputs import arguments_of, is_first
from sporeloom.runtime.one_device import Comparison
from sporeloom.runtime.reached import cells_of, parameters_beside, reached_from, trains
from sporeloom.runtime.spmd.compilation_cache import strategy_key

_compile_and_run = nn.Cell.compile_and_run
_call_jit = api._JitExecutor.__call__


@dataclass(frozen=True)
class _Parallel:
    """State of a network that `auto_parallel` returned."""

    network: nn.Cell
    report: Report
    engine: Engine
    check: bool
    """Whether the first call of each kind is compared with one device."""


_engines: dict[str, Engine] = {}
"""Strategy -> engine; the engine of the latest network is last."""
_networks: dict[int, _Parallel] = {}  # by id, which is valid as long as the network is referenced here
_contents: dict[int, tuple[Any, _Parallel | None]] = {}
_steps: dict[Any, tuple[Any, nn.Cell]] = {}
_calls: dict[Any, Call] = {}
"""(id of the callee, source text of the arguments) -> call."""
_compared: dict[Any, Any] = {}
"""First calls whose results have been compared with those of one device."""


def auto_parallel(
    net: nn.Cell,
    strategy: str | Path | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    check: bool = False,
    **settings: Any,
) -> nn.Cell:
    """Make a network that is written for one device run under a strategy. Use the returned network in its place.

    Args:
        net: the network, or the network with its loss.
        strategy: a strategy file, or "auto". "auto" chooses a strategy from the network's matrix products and writes it to
            `auto_parallel.yaml`. Its settings are `devices` (default: those launched), `memory_gb` (memory of a device for
            parameters and training state) and `out` (another file). With `cluster`, a cluster file or the name of a built-in
            one, and `inputs`, the arrays of one batch, it simulates a step of every strategy instead and takes the fastest
            that fits; the network returns its loss. Give `strategy` or `mesh`, not both.
        mesh: degrees of the mesh axes, such as `{"dp": 2, "tp": 2}`. Without rules this is data parallelism.
        check: also compute the first call of each step, function or evaluation on one device, on every rank, and stop where
            the loss, a gradient or an updated parameter differs. On CPU processes, without dropout and bfloat16.
        settings: other keys of a strategy file: `rules`, `pipeline`, `recompute`, `optimizer_parallel`, ...
            `rules` may be the operators alone: `{"up.matmul": [["dp", None], ["tp", None]]}`.

    Dim 0 of every input that is as long as the first input's is the batch, and is sharded over dp. Layouts without a rule are
    derived from that and from the rules. Train with `nn.TrainOneStepCell`, `ms.train.Model`, `ms.value_and_grad` or a
    function under `ms.jit`, in graph mode, as on one device. Every process runs the same script with the same, full batches;
    its parameters hold its shards, in a pipeline those of its stage. The loss is that of the full batch.

    Returns:
        The parallel network. It has the parameters of `net`.

    Raises:
        ConfigError: the strategy, the launched processes or the network do not fit each other, here or at the first call.
            All ranks raise it.
    """
    loaded = strategy_for(net, strategy, mesh, settings)
    key = strategy_key(loaded)
    engine = _engines.pop(key) if key in _engines else Engine.start(loaded)
    _engines[key] = engine
    report = parallelize(net, loaded)
    network = ParallelNetwork(net) if loaded.mesh.size > 1 else net
    _networks[id(network)] = _Parallel(network, report, engine, check)
    _contents.clear()
    # An outer Cell or a compiled function that calls the network does not notify it: calls of both are inspected, and
    # those without a parallel network run unchanged.
    nn.Cell.compile_and_run = _run_cell
    api._JitExecutor.__call__ = _run_function
    return network


def is_log_rank() -> bool:
    """Return whether this is the logging rank, the one process of a job that prints. On one device it is."""
    return not _engines or list(_engines.values())[-1].is_log_rank


def own_rows(network: nn.Cell, output: Tensor) -> Tensor:
    """Return this process's rows of an output of a parallel network.

    Ranks that differ in tp or cp only have the same rows; without dp these are all rows.

    Args:
        network: a network that `auto_parallel` returned.
        output: one of its outputs, with the batch as dim 0.

    Raises:
        ConfigError: `auto_parallel` did not return the network, or dp does not divide the rows.
    """
    engine = parallel_of(network, "own_rows").engine
    mesh, rows = engine.strategy.mesh, output.shape[0] if output.ndim else 0
    if rows % mesh.dp:
        raise ConfigError(f"own_rows: {rows} rows are not divisible by dp {mesh.dp}")
    first = mesh.coordinate(engine.rank, "dp") * (rows // mesh.dp)
    return output if mesh.dp == 1 else output[first : first + rows // mesh.dp]


def parallel_of(network: nn.Cell, asked: str) -> _Parallel:
    """Return the state of a network that `auto_parallel` returned.

    Raises:
        ConfigError: `auto_parallel` did not return the network; `asked` names the caller in the message.
    """
    if id(network) not in _networks:
        raise ConfigError(f"{asked}: {type(network).__name__} is not a network that auto_parallel returned")
    return _networks[id(network)]


def _run_cell(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
    """Run a graph-mode call of a Cell."""
    parallel = _parallel_in(cell, cell.cells_and_names)
    if parallel is None or parallel.engine.strategy.mesh.size == 1:
        return _compile_and_run(cell, *args, **kwargs)
    return _run_call(cell, cell, args, kwargs, parallel, lambda c: _compile_and_run(c.alone, *args, **kwargs))


def _run_call(
    owner: Any,
    called: nn.Cell,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    parallel: _Parallel,
    alone: Callable[[Comparison], Any],
) -> Any:
    """Run a call of a Cell, or of a function that the Cell `called` represents, whose graph is compiled for one device
    and then sharded. `alone` makes the call on one device."""
    outside = not any(id(cell) in _networks for _, cell in called.cells_and_names())
    function = called.construct if owner is called else owner
    arguments = arguments_of(owner, function, args, kwargs, parallel.engine, has_batch=not outside)
    key = id(called), arguments.source
    if key not in _calls:
        report = _report_of_all(called, parallel) if outside else None
        _calls[key] = Call(called, calling(arguments), report, parameters_beside(called))
    call = _calls[key]
    call.training = called.training

    def together(call: Call) -> Any:
        given = parallel.engine.run(call, *arguments.tensors)  # the first call also sets the structure
        return nested(call.structure, given)

    if not parallel.check or not is_first(owner, arguments.tensors, _compared):
        return together(call)
    report, is_step = _report_of_all(called, parallel), isinstance(called, nn.TrainOneStepCell) and owner is called
    comparison = Comparison(called, called if owner is called else None, parallel.engine, report)
    weights = [parallel.network.trainable_params(), list(getattr(called, "weights", ()))]
    if is_step and not kwargs and _takes(called.network, args):
        probe, theirs = (
            Gradients(each.network, each.weights).set_train(called.training) for each in (called, comparison.alone)
        )
        of_probe = Call(probe, calling(arguments))
        comparison.of(lambda: _compile_and_run(theirs, *args), lambda: together(of_probe), weights, keeps=False)
    given = comparison.of(lambda: alone(comparison), lambda: together(call), weights, keeps=True)
    comparison.raise_if_different()
    return given


def _report_of_all(called: nn.Cell, parallel: _Parallel) -> Report:
    """Merge the reports of all parallel networks that a call uses, such as the two networks of a GAN."""
    used = {id(parameter) for parameter in called.get_parameters()}
    reports = [
        each.report
        for each in _networks.values()
        if each.engine is parallel.engine and not used.isdisjoint(map(id, each.network.get_parameters()))
    ]
    return replace(parallel.report, parameters=[each for report in reports for each in report.parameters])


def _takes(cell: nn.Cell, inputs: tuple[Any, ...]) -> bool:
    """Whether `cell` accepts these inputs."""
    try:
        inspect.signature(cell.construct).bind(*inputs)
    except TypeError:
        return False
    return True


def _run_function(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a function that `ms.jit` or a gradient of MindSpore compiles."""
    function = executor.fn
    parallel = None if executor.obj is not None else _parallel_in(function, lambda: cells_of(function))
    if parallel is None or parallel.engine.strategy.mesh.size == 1:
        return _call_jit(executor, *args, **kwargs)
    key = (id(function), parallel.network.training)
    if key not in _steps:
        reached = list(reached_from(function))
        cells = dict(cells_of(function))
        parallel.network.set_grad()  # as MindSpore's own steps do
        cell = FunctionCell(function, cells.values(), [v for _, v in reached if isinstance(v, Parameter)])
        cell.trained = {p.name for _, v in reached if isinstance(v, (list, tuple)) for p in v if trains(p)}
        _steps[key] = (function, cell)
    cell = _steps[key][1]
    return _run_call(function, cell, args, kwargs, parallel, lambda _: _call_jit(executor, *args, **kwargs))


def _parallel_in(owner: Any, cells: Any) -> _Parallel | None:
    """The parallel network inside a Cell or function, which is looked up once.

    Raises:
        ConfigError: there are two with different strategies.
    """
    if id(owner) not in _contents:
        inside = {id(cell): cell for _, top in cells() for _, cell in top.cells_and_names()}
        found = [_networks[key] for key in inside if key in _networks]
        if len({id(parallel.engine) for parallel in found}) > 1:
            raise ConfigError(f"{type(owner).__name__} holds networks under two strategies; one graph has one")
        if not found:
            found = list(_parallel_by_parameters(owner))
        _contents[id(owner)] = (owner, found[0] if found else None)
    return _contents[id(owner)][1]


def _parallel_by_parameters(owner: Any) -> Iterator[_Parallel]:
    """The network whose parameters `owner` (such as an optimizer) uses without the network itself: ranks hold their
    shards."""
    if isinstance(owner, nn.Cell):
        used = {id(parameter) for parameter in owner.get_parameters()}
    else:
        used = {id(value) for _, value in reached_from(owner) if isinstance(value, Parameter)}
    for parallel in _networks.values():
        if parallel.engine.strategy.mesh.size > 1 and not used.isdisjoint(map(id, parallel.network.get_parameters())):
            yield parallel
