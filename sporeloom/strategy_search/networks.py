# SPDX-License-Identifier: Apache-2.0
"""Strategies of custom networks: enumerated from their layers and matrix products, and all simulated."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from mindspore import Tensor, nn

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import read_utf8
from sporeloom.core.json_text import json_text
from sporeloom.dry_run.compile import cost_of
from sporeloom.dry_run.partitioned import partition_custom
from sporeloom.dry_run.rank_report import StepCost
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.parallel.choose import MAX_TP, pairs, products, rules_of
from sporeloom.parallel.layers import layers_of
from sporeloom.parallel.operators import operators
from sporeloom.partition.graph import Graph
from sporeloom.partition.mindir import read_graph
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.step_graphs import types_of
from sporeloom.strategy.certificate import about_versions
from sporeloom.strategy.checks import divisors
from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Strategy
from sporeloom.strategy.layout import Shape
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.text import strategy_text
from sporeloom.strategy_search.candidates import Candidate

GB = 2**30
ROUNDS = (1, 2, 4)
"""Microbatches of a pipeline, in multiples of its stages."""
SCHEDULES = ("1f1b", "zero_bubble_h1")
SHARDINGS = (None, OptimizerParallel(), OptimizerParallel(reshard_after_forward=True))
RECOMPUTES = (None, Recompute())


class Network:
    """A custom network, which returns its loss, with the inputs of a step.

    Args:
        make: makes it, or returns it once more.
        inputs: global shape and NumPy dtype of each; dim 0 of the first one is the batch.
    """

    def __init__(self, make: Callable[[], nn.Cell], inputs: Sequence[tuple[Shape, Any]]):
        if not inputs or not inputs[0][0]:
            raise ConfigError("a search needs the inputs of a step, the first with the batch as dim 0")
        self.make, self.inputs = make, list(inputs)
        net = make()
        self.layers, self.pairs = layers_of(net, []), pairs(products(net))
        self.about = {
            "inputs": [[list(shape), np.dtype(dtype).str] for shape, dtype in inputs],
            "parameters": {p.name: [*map(int, p.shape)] for p in net.get_parameters()},
            "operators": [f"{each.path}: {each.primitive.name}" for each in operators(net)],
        }
        self._graphs: dict[str, bytes] = {}
        """Graphs of one device, which depend on nothing in a strategy but recomputation."""

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return int(self.inputs[0][0][0])

    def candidates(self, devices: int, recomputes: Sequence[Recompute | None] = RECOMPUTES) -> Iterator[Candidate]:
        """Strategies on so many devices: meshes of dp, tp over pairs of products, and pp over the layers; microbatches,
        schedules, kinds of ZeRO, recomputation. All meshes come first with what costs no time."""
        for recompute, zero, mesh in itertools.product(recomputes, SHARDINGS, list(self._meshes(devices))):
            if (zero is None or mesh.replicas > 1) and (recompute is None or self.layers):
                for pipeline in _pipelines(mesh.pp, self.rows // mesh.dp):
                    yield Candidate(
                        Strategy(mesh=mesh, pipeline=pipeline, optimizer_parallel=zero, recompute=recompute)
                    )

    def _meshes(self, devices: int) -> Iterator[Mesh]:
        widths = math.gcd(*(narrow.inner for _, narrow in self.pairs)) if self.pairs else 1
        for tp, pp in itertools.product(divisors(devices), divisors(devices)):
            dp, left = divmod(devices, tp * pp)
            if (
                not left
                and tp <= MAX_TP
                and widths % tp == 0
                and pp <= max(1, len(self.layers))
                and self.rows % dp == 0
            ):
                yield Mesh(pp=pp, dp=dp, tp=tp)

    def text(self, candidate: Candidate, head: Sequence[str] = ()) -> str:
        """The strategy file of a candidate."""
        rules = f"{{operators: {{{', '.join(rules_of(self.pairs))}}}}}" if candidate.strategy.mesh.tp > 1 else ""
        return strategy_text(candidate.strategy, rules, head)

    def check(self, devices: int, cluster: Cluster) -> None:
        """Check that a step can be compiled, before a search tries one strategy after another.

        Raises:
            ConfigError: it cannot, whatever the strategy; or the network returns no loss.
        """
        try:
            if first := next(self.candidates(devices), None):
                self.cost(first, cluster)
        except ConfigError:
            if not self._graphs:
                raise

    def cost(self, candidate: Candidate, cluster: Cluster) -> StepCost:
        """Partition a step of AdamW, and simulate its time and the memory of the first rank of each stage.

        Raises:
            ConfigError: it cannot be partitioned.
        """
        strategy = strategy_of(yaml.safe_load(self.text(candidate)), candidate.name)

        def compiled(cell: nn.Cell, described: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
            key = repr(strategy.recompute)
            if key not in self._graphs:
                model = compile_for_one_device(cell, described)
                _check_loss(read_graph(model))
                self._graphs[key] = model.SerializeToString()
            return mind_ir.ModelProto.FromString(self._graphs[key])

        partitioned = partition_custom(self.make, strategy, self.inputs, compiled)
        ranks = range(0, strategy.mesh.size, strategy.mesh.stage_size)
        return cost_of(partitioned, ranks, {}, cluster)


def _check_loss(graph: Graph) -> None:
    """Check that the first output of a step is a number.

    Raises:
        ConfigError: it is not: the network returns no loss.
    """
    loss = types_of(graph).get(graph.outputs[0])
    if loss is not None and loss.num_elements != 1:
        raise ConfigError(
            f"the network returns {list(loss.shape)} and no loss: wrap it into a Cell that also takes the labels and returns "
            "its loss, a number"
        )


def _pipelines(pp: int, rows: int) -> Iterator[Pipeline]:
    """Microbatches and schedules for so many rows of a replica."""
    if pp == 1:
        yield Pipeline()
        return
    for rounds, schedule in itertools.product(ROUNDS, SCHEDULES):
        if rows % (rounds * pp) == 0:
            yield Pipeline(num_microbatches=rounds * pp, schedule=schedule)


def described(inputs: Sequence[Any]) -> list[tuple[Shape, Any]]:
    """Shape and NumPy dtype of Tensors and arrays."""
    arrays = [each.asnumpy() if isinstance(each, Tensor) else np.asarray(each) for each in inputs]
    return [(array.shape, array.dtype) for array in arrays]


def _key_of(network: Network, devices: int, cluster: Cluster) -> str:
    """Hash of what a choice depends on: all but the code in `construct`."""
    values = {"network": network.about, "devices": devices, "cluster": repr(cluster), "versions": about_versions()}
    return hashlib.sha256(json_text(values, sort_keys=True).encode()).hexdigest()[:16]


def fastest(network: Network, devices: int, cluster: Cluster) -> tuple[Candidate, StepCost, int]:
    """The fastest strategy that fits, its cost, and the number of those that were simulated. Layers are recomputed only where
    nothing fits without.

    Raises:
        ConfigError: nothing fits, or nothing can be partitioned.
    """
    simulated: list[tuple[Candidate, StepCost]] = []
    problems: list[str] = []
    for recompute in (None, Recompute()):
        for candidate in network.candidates(devices, [recompute]):
            try:
                simulated.append((candidate, network.cost(candidate, cluster)))
            except ConfigError as error:
                problems.append(f"{candidate.name}: {error.problems[0]}")
        fitting = [(one, cost) for one, cost in simulated if cost.peak_bytes <= cluster.usable_bytes]
        if fitting:
            best, cost = min(fitting, key=lambda each: (each[1].seconds, each[1].peak_bytes, each[0].name))
            return best, cost, len(simulated)
    if not simulated:
        raise ConfigError(problems[:3] or [f"no mesh of {devices} devices divides a batch of {network.rows} rows"])
    nearest, cost = min(simulated, key=lambda each: (each[1].peak_bytes, each[0].name))
    raise ConfigError(
        f"nothing fits: the nearest ({nearest.name}) needs {cost.peak_bytes / GB:.2f} GB on a device that has "
        f"{cluster.usable_bytes / GB:.1f} GB to use; give more devices or a smaller batch"
    )


def choice(
    net: nn.Cell, inputs: Sequence[Any], devices: int, cluster: str | Path, memory_gb: float | None, out: Path
) -> str:
    """The file of the fastest strategy of a network on a cluster; that of `out` if it was chosen for the same.

    Args:
        inputs: Tensors or arrays of one batch, as the network takes them.
        memory_gb: usable memory of a device; None: the cluster's.

    Raises:
        ConfigError: an argument cannot be used; or nothing fits.
    """
    if not inputs:
        raise ConfigError(
            'auto_parallel(net, "auto", cluster=...) simulates a step: give inputs=[...], the arrays of a batch'
        )
    chips = read_cluster(Path(cluster)).with_running(devices)
    if memory_gb is not None:
        chips = dataclasses.replace(chips, memory_gb=memory_gb + chips.reserved_gb)
    was_training = net.training
    network = Network(lambda: net, described(inputs))
    key = f"# {_key_of(network, devices, chips)}"
    if out.is_file() and key in (text := read_utf8(out)).split("\n"):
        return text
    network.check(devices, chips)
    best, cost, number = fastest(network, devices, chips)
    net.set_train(was_training)
    head = [
        f"# Chosen by auto_parallel, devices={devices}, cluster={chips.chip}: simulated step {cost.seconds:.4g} s, "
        f"{cost.peak_bytes / GB:.2f} GB of the {chips.usable_bytes / GB:.1f} GB that a device has to use;",
        f"# the fastest of {number} strategies that were simulated. Remove this file to choose once more.",
        key,
    ]
    return network.text(best, head)
