# SPDX-License-Identifier: Apache-2.0
"""Search strategies beyond those of `plan`, simulate the best, and prove the fastest.

    sporeloom tune --model pangu --size 13b --cluster ascend910b --devices 64 --global-batch-size 128 --out tuned
    sporeloom tune --network net.py:Net --inputs 64x32:float32 64x10:float32 --cluster ascend910b --devices 8 --out tuned

Every strategy on the best meshes of `plan` (uneven stages, schedules, kinds of ZeRO, recomputation, context parallelism and
offloading, experts over tp) is scored in closed form. The best are partitioned and simulated, as `dry-run --memory --time`.
The Pareto front over step time and memory is certified, the fastest first, as `certify`.

The folder gets a strategy file and a certificate for each point, tune.json and tune.html. The same command continues a search
that was ended. Exit code 1: nothing that was simulated can run.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.certification.shrink import POSSIBLE_PROCESSES
from sporeloom.cli.plan import PlanConfig
from sporeloom.cli.plan import requested as planned
from sporeloom.cli.rules import defined, described_input, made
from sporeloom.core.command_line import option, parse_args
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import unwritable
from sporeloom.core.json_text import json_text
from sporeloom.core.locks import one_writer
from sporeloom.core.log import print_report
from sporeloom.core.numbers import Count, Natural, NotNegative, Positive, number_problems
from sporeloom.models.config import AttentionKernel
from sporeloom.models.config_file import NamedModel, model_folder, named_model, with_model_folder
from sporeloom.models.family import with_precision
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.search import Devices, PlanRequest
from sporeloom.runtime.environment import prepare_environment
from sporeloom.simulation.faults import HOUR_S, FaultRates, read_faults
from sporeloom.strategy.checks import POSSIBLE_SIZES, is_possible_size
from sporeloom.strategy_search.report import lines
from sporeloom.strategy_search.request import (
    FaultModel,
    NetworkJob,
    NetworkRequest,
    SearchRequest,
    TunedModel,
    TuneRequest,
)

OF_MODELS = ("model", "size", "global_batch_size", "seq_len", "compute_dtype", "meshes")
OF_FAULTS = ("steps", "checkpoint_pause_s", "restart_s")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Flags of `sporeloom tune`."""

    common: ClassVar[tuple[str, ...]] = (
        *("model", "size", "cluster", "devices", "global_batch_size", "out", "simulate", "certify", "faults", "json"),
    )
    model: str = option("pangu", "model family, or a model folder, also of Hugging Face")
    size: str = option("tiny", "built-in size of the family")
    cluster: Path = option(..., "cluster file, or name of a built-in cluster")
    devices: Devices = option(..., "number of devices of the job")
    global_batch_size: Count | None = option(
        None, "number of sequences in one step, over all devices; needed unless there is a `--network` (default: none)"
    )
    network: str | None = option(
        None,
        "FILE:NAME instead of a model: a class or function at the top of a Python file, called without arguments, that "
        "returns a Cell, which returns its loss. The file is run (default: none)",
    )
    inputs: tuple[str, ...] = option(
        (),
        "shape and element type of each input of the network, as in 64x32:float32; dim 0 of the first is the batch "
        "(default: none)",
    )
    seq_len: Count | None = option(None, "number of tokens in a sequence (default: the model's maximum context length)")
    compute_dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "number type of matrix products")
    out: Path = option(
        ..., "folder for strategies, certificates, tune.json and tune.html; a search with the same inputs continues"
    )
    meshes: Count = option(
        40, "number of meshes of the planner, with their microbatch sizes, on which all settings are scored"
    )
    simulate: Count = option(50, "number of strategies that are partitioned and simulated")
    certify: Natural = option(3, "number of points of the Pareto front that are certified, the fastest first; 0: none")
    processes: Count = option(4, "number of processes of a proof on this machine: 2, 4, 8 or 16")
    faults: Path | None = option(
        None,
        "faults as for `simulate`; with them goodput is an objective, too: a YAML file, or llama3_h100 (default: none)",
    )
    steps: Count | None = option(None, "number of steps of the job, with `--faults` (default: none)")
    checkpoint_pause_s: Positive | None = option(
        None, "time in seconds for which training waits for a checkpoint, with `--faults` (default: none)"
    )
    restart_s: NotNegative | None = option(
        None, "time in seconds from a failure until training continues, with `--faults` (default: none)"
    )
    repair_hours: NotNegative = option(
        0.0, "time in hours until a failed server is back, in which the other replicas continue, with `--faults`"
    )
    json: bool = option(False, "print tune.json instead of the table")
    overwrite: bool = option(
        False, "search with other inputs in a folder that has a search, and prove once more what was refused"
    )


def main(argv: Sequence[str]) -> int:
    config = parse_args(TuneConfig, __doc__, argv, check)
    request: SearchRequest
    if config.network:
        prepare_environment()
        request = check_network(config)
    else:
        request = check(config)
        prepare_environment()
    running = import_module("sporeloom.strategy_search.run")
    limits = running.Limits(
        meshes=config.meshes, simulate=config.simulate, certify=config.certify, processes=config.processes
    )
    with one_writer(config.out):
        values: dict[str, Any] = running.tune(request, limits, config.out, config.overwrite)
    print_report(json_text(values, indent=1) if config.json else "\n".join([*lines(values), _end(config)]))
    return 0 if values["front"] else 1


def _end(config: TuneConfig) -> str:
    return f"strategies and certificates in {config.out / 'points'}; read {config.out / 'tune.html'}"


def check(config: TuneConfig) -> TuneRequest:
    """Build the request from the flags.

    Raises:
        ConfigError: all problems of the flags, and of the files that they name.
    """
    problems = Problems([*number_problems(config), *_problems(config)])
    cluster = problems.of(read_cluster, config.cluster)
    faults = problems.of(_faults, config, cluster) if cluster else None
    problems.raise_if_any()
    named = with_model_folder(NamedModel(config.model, config.size))
    plan = _plan(config)
    attention: AttentionKernel | None = None if plan.flash_attention or config.compute_dtype == "float32" else "plain"
    model = with_precision(named_model(named.model, named.size, named.config), config.compute_dtype, attention)
    model = dataclasses.replace(model, attention=model.attention_on_ascend)
    tuned = TunedModel(named.model, named.size, named.config, config.compute_dtype, attention, model)
    return TuneRequest(plan, tuned, config.cluster, faults)


def check_network(config: TuneConfig) -> NetworkRequest:
    """Build the request for a custom network from the flags. The file is run.

    Raises:
        ConfigError: all problems of the flags and of the cluster; or of the network.
    """
    problems = Problems([*number_problems(config), *_problems(config)])
    cluster = problems.of(read_cluster, config.cluster)
    faults = problems.of(_faults, config, cluster) if cluster else None
    shapes = [problems.of(described_input, text) for text in config.inputs]
    problems.raise_if_any()
    assert cluster and config.network
    networks = import_module("sporeloom.strategy_search.networks")  # loads MindSpore
    import_module("sporeloom.dry_run.partitioned").begin()
    import_module("mindspore").set_context(mode=0)  # graphs
    file, name, make = defined(config.network)
    if not (inspect.isclass(make) or inspect.isfunction(make)):
        raise ConfigError(
            f"--network {config.network}: name a class or a function, of which each proof makes its own network"
        )
    drawn = np.random.default_rng(0)
    inputs = [_drawn(drawn, *shape) for shape in shapes if shape]
    network = networks.Network(lambda: made(f"--network {config.network}", make), shapes)
    network.check(config.devices, cluster)
    job = NetworkJob(cluster.with_running(config.devices), config.devices, inputs, file.resolve(), name)
    return NetworkRequest(network, job, config.cluster, faults)


def _drawn(drawn: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values of an input for a proof: 0 and 1 where they are whole numbers, as these may be indices."""
    if dtype.kind in "iub":
        return np.asarray(drawn.integers(0, 2, shape)).astype(dtype)
    return drawn.standard_normal(shape).astype(dtype)


def _plan(config: TuneConfig) -> PlanRequest:
    flags = {name: getattr(config, name) for name in ("model", "cluster", "devices", "global_batch_size", "seq_len")}
    size = None if model_folder(config.model) else config.size
    return planned(PlanConfig(**flags, size=size, compute_dtype=config.compute_dtype))


def _problems(config: TuneConfig) -> list[str]:
    problems = []
    problems += _network_problems(config)
    if config.processes not in POSSIBLE_PROCESSES:
        problems.append(f"--processes {config.processes}: give one of {', '.join(map(str, POSSIBLE_PROCESSES))}")
    if config.devices == 1 or not is_possible_size(config.devices):
        several = POSSIBLE_SIZES.removeprefix("1, ")
        problems.append(f"--devices {config.devices}: strategies are for several devices; give {several}")
    if problem := unwritable(config.out):
        problems.append(f"--out {problem}")
    given = [name for name in OF_FAULTS if getattr(config, name) is not None]
    given += ["repair_hours"] if config.repair_hours else []
    if not config.faults and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        problems.append(
            f"{flags} {'has' if len(given) == 1 else 'have'} no effect without --faults; give it, or leave them out"
        )
    if config.faults and (missing := [name for name in OF_FAULTS if getattr(config, name) is None]):
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        problems.append(f"--faults {config.faults}: goodput needs {flags}, too")
    return problems


def _network_problems(config: TuneConfig) -> list[str]:
    if not config.network:
        problems = (
            [] if config.global_batch_size else ["--global-batch-size is needed: sequences of a step over all devices"]
        )
        return problems + (["--inputs are those of a --network: give it, or leave them out"] if config.inputs else [])
    usual = TuneConfig(cluster=config.cluster, devices=config.devices, out=config.out)
    given = [name for name in OF_MODELS if getattr(config, name) != getattr(usual, name)]
    problems = [f"--{name.replace('_', '-')} is for a model, not for a --network: leave it out" for name in given]
    return problems + (
        [] if config.inputs else ["--network needs --inputs, as in --inputs 64x32:float32 64x10:float32"]
    )


def _faults(config: TuneConfig, cluster: Cluster) -> FaultModel | None:
    if not config.faults or None in (config.steps, config.checkpoint_pause_s, config.restart_s):
        return None
    assert config.steps and config.checkpoint_pause_s and config.restart_s is not None
    faults = read_faults(config.faults)
    about = {
        "faults": dataclasses.asdict(faults),
        **{name: getattr(config, name) for name in (*OF_FAULTS, "repair_hours")},
    }
    return FaultModel(
        rates=FaultRates.of(faults, cluster.devices_per_node),
        about=about,
        steps=config.steps,
        checkpoint_pause_s=config.checkpoint_pause_s,
        restart_s=config.restart_s,
        repair_s=config.repair_hours * HOUR_S,
    )
