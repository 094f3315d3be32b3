# SPDX-License-Identifier: Apache-2.0
"""`auto_parallel`, the one line that makes a user's script parallel, and interception of calls of parallel networks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.graph import api
from mindspore.ops.composite.base import GradOperation_

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import ClipByGlobalNorm
from sporeloom.parallel.call import Call
from sporeloom.parallel.cells import (
    FunctionCell,
    Gradients,
    ParallelNetwork,
    ShardBatch,
    average_over_all_rows,
    prepare_to_shard,
)
from sporeloom.parallel.parallelize import parallelize, shards_itself, wrap
from sporeloom.parallel.report import Report
from sporeloom.parallel.step import TrainStep
from sporeloom.parallel.sums import add_by_pairs_in
from sporeloom.runtime.calls import calling, nested
from sporeloom.runtime.compiler import set_auto_parallel_context
from sporeloom.runtime.cpu.compilation_cache import strategy_key
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.given_strategy import strategy_for
from sporeloom.runtime.inputs import arguments_of, inputs_of, is_first
from sporeloom.runtime.one_device import Comparison
from sporeloom.runtime.reached import cells_of, parameters_beside, reached_from, trains
from sporeloom.strategy.config import Strategy

_compile_and_run = nn.Cell.compile_and_run
_call_jit = api._JitExecutor.__call__


@dataclass(frozen=True)
class _Parallel:
    """State of a network that `auto_parallel` returned."""

    network: nn.Cell
    whole: nn.Cell
    """The network without microbatches, which evaluates and predicts."""
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
_looked_at: dict[Any, Any] = {}
"""First calls on devices whose graphs have been validated against the graph of one device."""
_compared: dict[Any, Any] = {}
"""First calls whose results have been compared with those of one device."""
_context_of: list[Engine] = []
"""The engine whose settings are in MindSpore's context, on a device."""


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
            parameters and training state) and `out` (another file). Give `strategy` or `mesh`, not both.
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
    if check and loaded.mesh.size > 1 and not engine.partitions_itself:
        raise ConfigError(
            "auto_parallel(..., check=True): only CPU processes can also run the graph of one device; use them to check"
        )
    if loaded.mesh.size > 1 and not shards_itself(loaded):
        prepare_to_shard(net)
    report, whole = parallelize(net, loaded), net
    if loaded.mesh.size > 1:
        whole = ParallelNetwork(net) if shards_itself(loaded) else ShardBatch(net, loaded.mesh)
    network = wrap(whole, loaded)
    _networks[id(network)] = _Parallel(network, whole, report, engine, check)
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


def report_of(network: nn.Cell) -> Report:
    """The report on a network that `auto_parallel` returned: the layouts of its parameters and operators."""
    return _networks[id(network)].report


def _run_cell(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
    """Run a graph-mode call of a Cell."""
    if isinstance(cell, ClipByGlobalNorm) and (sharded := [p for p in _networks.values() if _gives_parts(p)]):
        return _clipped(args[0], float(cell.clip_norm.asnumpy()[0]), sharded)
    parallel = _parallel_in(cell, cell.cells_and_names)
    if parallel is None or parallel.engine.strategy.mesh.size == 1:
        return _compile_and_run(cell, *args, **kwargs)
    if parallel.report.is_spmd:
        return _run_call(cell, cell, args, kwargs, parallel, lambda c: _compile_and_run(c.alone, *args, **kwargs))
    inputs = inputs_of(cell, cell.construct, args, kwargs, parallel.engine)
    run = _run_in_pipeline if parallel.engine.strategy.mesh.pp > 1 else _run_whole
    if not parallel.check or not is_first(cell, inputs, _compared):
        return run(cell, inputs, parallel)
    return _compared_with_one_device(cell, inputs, parallel, run)


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
    comparison.tell()
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


def _compared_with_one_device(cell: nn.Cell, inputs: tuple[Tensor, ...], parallel: _Parallel, run: Any) -> Any:
    """The result of `run`, if it equals the result of one device."""
    comparison = Comparison(cell, _without_microbatches(cell, parallel), parallel.engine, parallel.report)
    alone, weights = comparison.alone, [parallel.network.trainable_params(), list(getattr(cell, "weights", ()))]
    if run is _run_whole and isinstance(cell, nn.TrainOneStepCell) and _takes(cell.network, inputs):
        probes = [Gradients(each.network, each.weights).set_train(cell.training) for each in (alone, cell)]
        comparison.of(
            lambda: _compile_and_run(probes[0], *inputs), lambda: run(probes[1], inputs, parallel), weights, keeps=False
        )
    given = comparison.of(
        lambda: _compile_and_run(alone, *inputs), lambda: run(cell, inputs, parallel), weights, keeps=True
    )
    comparison.tell()
    return given


def _run_whole(cell: nn.Cell, inputs: tuple[Tensor, ...], parallel: _Parallel) -> Any:
    return _run(cell, inputs, parallel.engine)


def _without_microbatches(cell: nn.Cell, parallel: _Parallel) -> nn.Cell:
    """The equivalent of `cell` for one device."""
    if parallel.engine.strategy.mesh.pp == 1:
        return cell
    if cell is parallel.network:
        return parallel.whole
    return nn.TrainOneStepCell(parallel.whole, cell.optimizer).set_train(cell.training)


def _takes(cell: nn.Cell, inputs: tuple[Any, ...]) -> bool:
    """Whether `cell` accepts these inputs."""
    try:
        inspect.signature((cell.network if isinstance(cell, ShardBatch) else cell).construct).bind(*inputs)
    except TypeError:
        return False
    return True


def _clipped(gradients: Sequence[Tensor], clip_norm: float, sharded: Sequence[_Parallel]) -> tuple[Tensor, ...]:
    """`ops.clip_by_global_norm` outside a graph, on sharded gradients: by the norm of the full gradients, as inside a
    graph.

    Raises:
        ConfigError: the shapes are not those of all gradients of one of the networks `sharded`, so it is not known how many
            ranks replicate each gradient.
    """
    shapes = [each.shape for each in gradients]
    matching = [p for p in sharded if [weight.shape for weight in p.network.trainable_params()] == shapes]
    if len({id(parallel.engine) for parallel in matching}) != 1:
        raise ConfigError(
            f"clip_by_global_norm: these {len(shapes)} Tensors are not the gradients of all trainable parameters, in their "
            "order, and ranks hold parts of some: call it inside the function that ms.jit compiles, or in a step's construct"
        )
    parallel = matching[0]
    weights = parallel.network.trainable_params()
    arrays, size = [each.asnumpy() for each in gradients], parallel.engine.strategy.mesh.stage_size
    # Several ranks replicate each shard; each adds its share of the square.
    shares = [_num_parts(weight, parallel.report) / size for weight in weights]
    square = sum(share * float(np.square(g, dtype=np.float64).sum()) for share, g in zip(shares, arrays, strict=True))
    scale = clip_norm / max(math.sqrt(parallel.engine.total(square)), clip_norm)
    return tuple(Tensor(g * np.asarray(scale, g.dtype)) for g in arrays)


def _gives_parts(parallel: _Parallel) -> bool:
    """Whether ranks receive shards of the gradients of a network."""
    report, weights = parallel.report, parallel.network.trainable_params()
    return not report.is_spmd and any(_num_parts(weight, report) > 1 for weight in weights)


def _num_parts(weight: Parameter, report: Report) -> int:
    return math.prod(report.of(weight.name).global_shape) // math.prod(weight.shape)


def _run_in_pipeline(cell: nn.Cell, inputs: tuple[Tensor, ...], parallel: _Parallel) -> Any:
    """Run a training step, or a call of the network alone, in a pipeline.

    Raises:
        ConfigError: the call is of another kind, for which MindSpore would sum the microbatches.
    """
    engine = parallel.engine
    if type(cell) is nn.TrainOneStepCell and cell.network is parallel.network:
        return _known_to_all(_run(_pipeline_step(cell, parallel), inputs, engine)[0], engine)
    if cell is not parallel.network:
        raise ConfigError(
            f"{engine.strategy.at('mesh.pp')}: a pipeline trains with nn.TrainOneStepCell(net, optimizer), the loss inside "
            f"net, and is evaluated by calling net; not inside {type(cell).__name__}"
        )
    engine.refresh(parallel.whole, parallel.report)
    told = _run(parallel.whole, inputs, engine)
    return (
        tuple(_known_to_all(each, engine) for each in told) if isinstance(told, tuple) else _known_to_all(told, engine)
    )


def _run_function(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a function that `ms.jit` or a gradient of MindSpore compiles."""
    function = executor.fn
    parallel = None if executor.obj is not None else _parallel_in(function, lambda: cells_of(function))
    if parallel is None or parallel.engine.strategy.mesh.size == 1 or not parallel.engine.partitions_itself:
        return _call_jit(executor, *args, **kwargs)
    if parallel.engine.strategy.mesh.pp > 1 and not parallel.report.is_spmd:
        raise ConfigError(
            f"{parallel.engine.strategy.at('mesh.pp')}: a pipeline trains with nn.TrainOneStepCell(net, optimizer), not in "
            f"a function of your own ({getattr(function, '__name__', function)})"
        )
    key = (id(function), parallel.network.training)
    if key not in _steps:
        if not parallel.report.is_spmd:
            for _, value in reached_from(function):
                _check_gradient(value, parallel.engine.strategy)
        reached = list(reached_from(function))
        cells = dict(cells_of(function))
        parallel.network.set_grad()  # as MindSpore's own steps do
        cell = FunctionCell(function, cells.values(), [v for _, v in reached if isinstance(v, Parameter)])
        cell.trained = {p.name for _, v in reached if isinstance(v, (list, tuple)) for p in v if trains(p)}
        _steps[key] = (function, cell)
    cell = _steps[key][1]
    if parallel.report.is_spmd:
        return _run_call(function, cell, args, kwargs, parallel, lambda _: _call_jit(executor, *args, **kwargs))
    inputs = inputs_of(function, function, args, kwargs, parallel.engine)
    if not parallel.check or not is_first(cell, inputs, _compared):
        return _run(cell, inputs, parallel.engine)
    comparison = Comparison(cell, None, parallel.engine, parallel.report)
    lists = [v for _, v in reached_from(function) if isinstance(v, (list, tuple)) and v and all(map(trains, v))]
    given = comparison.of(
        lambda: _call_jit(executor, *args, **kwargs), lambda: _run(cell, inputs, parallel.engine), lists, keeps=True
    )
    comparison.tell()
    return given


def _check_gradient(value: Any, strategy: Strategy) -> None:
    """Refuse gradients that MindSpore does not compute correctly in a sharded network.

    Raises:
        ConfigError: `value` is such a gradient.
    """
    if getattr(value, "has_aux", False) is True:
        raise ConfigError(
            "value_and_grad with has_aux=True: MindSpore does not find the loss among several outputs and sums the "
            "gradients of the replicas instead of averaging them; return the loss alone, and call the network again "
            "for what else you need"
        )
    of_inputs = ("get_all", "get_by_position")
    if isinstance(value, GradOperation_) and (
        not value.get_by_list or any(getattr(value, n, False) for n in of_inputs)
    ):
        raise ConfigError(
            f"{strategy.at('mesh')}: gradients with respect to inputs: a rank would get those of its own rows alone; request "
            "gradients of weights only, or take these on one device"
        )


def _run(cell: nn.Cell, inputs: tuple[Tensor, ...], engine: Engine) -> Any:
    if engine.partitions_itself:
        return engine.run(cell, *inputs)
    if _context_of != [engine]:  # MindSpore has one for the process, read when it compiles
        set_auto_parallel_context(engine.strategy, engine.rank)
        _context_of[:] = [engine]
    if is_first(cell, inputs, _looked_at):
        engine.backend.look_at(cell, inputs)
    return _compile_and_run(cell, *inputs)


def _known_to_all(output: Tensor, engine: Engine) -> Tensor:
    """Broadcast an output of the last pipeline stage to every rank."""
    source, array = engine.strategy.mesh.first_rank_of_last_stage, output.asnumpy()
    shape, dtype = engine.share([array.shape, array.dtype.name], source)
    mine = array if engine.rank == source else np.zeros(shape, dtype)
    return Tensor(engine.broadcast(mine, source))


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
        if found and found[0].engine.strategy.mesh.size > 1 and not found[0].report.is_spmd:
            for cell in inside.values():
                average_over_all_rows(cell)
                add_by_pairs_in(cell)
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
        if parallel.report.is_spmd and not used.isdisjoint(map(id, parallel.network.get_parameters())):
            yield parallel


def _pipeline_step(cell: nn.Cell, parallel: _Parallel) -> TrainStep:
    """A training step that supports pipelines, in place of nn.TrainOneStepCell."""
    if id(cell) not in _steps:
        engine, microbatches = parallel.engine, parallel.engine.strategy.pipeline.num_microbatches
        all_reduce, scale = engine.all_reduce(), 1 / microbatches
        step = TrainStep(parallel.network, cell.optimizer, parallel.report, engine.rank, all_reduce, scale=scale)
        _steps[id(cell)] = (cell, step.set_train(cell.training))
    return _steps[id(cell)][1]
