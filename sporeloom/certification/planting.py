# SPDX-License-Identifier: Apache-2.0
"""Plant faults in the program under proof, one at a time, and train each faulty program as the right one is trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.lines import first_line
from sporeloom.partition.faults import (
    KIND_NAMES,
    REPEATED_MICROBATCH,
    SWAPPED_MICROBATCHES,
    Program,
    Site,
    kind_of,
    sites_in,
    with_fault,
)
from sporeloom.partition.graph import Graph
from sporeloom.partition.grid import DeviceGrid
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.spmd.backend import Alteration

Train = Callable[[Path, Alteration | None], Engine]
"""Trains the subject with an altered program, and writes its results to files of that name."""


class SiteList(Alteration):
    """Leaves the program as it is, and lists the operators in which faults can be planted."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def graph(self, part: str, graph: Graph, grid: DeviceGrid, rank: int) -> Graph:
        self.sites += sites_in(part, Program(graph, grid, rank))
        return graph

    def order(self, stage: int, num_microbatches: int) -> Sequence[int]:
        if num_microbatches > 1:
            every = f"all of {num_microbatches} microbatches"
            self.sites.append(Site(REPEATED_MICROBATCH, "schedule", every, every))
        if num_microbatches > 1 and stage:
            self.sites.append(Site(SWAPPED_MICROBATCHES, "schedule", f"stage {stage}", f"the inputs of stage {stage}"))
        return range(num_microbatches)


class PlantedFault(Alteration):
    """Plants one fault."""

    def __init__(self, site: Site) -> None:
        self.site, self.is_planted = site, False

    def graph(self, part: str, graph: Graph, grid: DeviceGrid, rank: int) -> Graph:
        if part != self.site.part or not any(node.outputs[:1] == (self.site.operator,) for node in graph.nodes):
            return graph
        self.is_planted = True
        return with_fault(Program(graph, grid, rank), kind_of(self.site.kind), [self.site.operator])

    def order(self, stage: int, num_microbatches: int) -> Sequence[int]:
        if self.site.kind == REPEATED_MICROBATCH:
            self.is_planted = True
            return [*range(num_microbatches - 1), 0]
        if self.site.kind != SWAPPED_MICROBATCHES or self.site.operator != f"stage {stage}":
            return range(num_microbatches)
        self.is_planted = True
        return [1, 0, *range(2, num_microbatches)]


def train_with_faults(train: Train, out: Path, faults_per_kind: int, kinds: Sequence[str] = ()) -> None:
    """Train the right program, then the faulty ones. Writes OUT-0, OUT-1, ... and OUT.faults.json, their list.

    Args:
        kinds: kinds of faults that are planted; default: all.
    """
    listed = SiteList()
    engine = train(out, listed)
    sites = choose_sites(_of_all_ranks(engine, listed.sites), faults_per_kind, kinds)
    is_log_rank, planted = engine.is_log_rank, list[dict[str, Any]]()
    engine.close()
    for number, site in enumerate(sites):
        error = _train_one(train, out.with_name(f"{out.name}-{number}"), site)
        planted.append({**dataclasses.asdict(site), "error": error})
        if is_log_rank:
            write_text_atomically(out.with_name(f"{out.name}.faults.json"), json.dumps(planted))


def choose_sites(sites: Sequence[Site], faults_per_kind: int, kinds: Sequence[str] = ()) -> list[Site]:
    """Choose as many sites of each kind as requested, at equal distances in the program."""
    chosen: list[Site] = []
    for kind in kinds or KIND_NAMES:
        of_kind = [site for site in sites if site.kind == kind]
        count = min(faults_per_kind, len(of_kind))
        chosen += [of_kind[(2 * i + 1) * len(of_kind) // (2 * count)] for i in range(count)]
    return chosen


def _of_all_ranks(engine: Engine, sites: Sequence[Site]) -> list[Site]:
    """The sites in the programs of all ranks, each once."""
    values = [dataclasses.asdict(site) for site in sites]
    ranks = [engine.broadcast_value(values, rank) for rank in range(engine.strategy.mesh.size)]
    return list({(s["kind"], s["part"], s["operator"]): Site(**s) for values in ranks for s in values}.values())


def _train_one(train: Train, out: Path, site: Site) -> str:
    """Train a faulty program. Returns the error that ended it, or ''.

    Raises:
        ConfigError: no rank has the operator.
    """
    fault = PlantedFault(site)
    try:
        engine = train(out, fault)
    except Exception as error:  # whatever a fault leads to
        return f"{type(error).__name__}: {first_line(error)}"[:200]
    is_planted = engine.max_over_ranks(int(fault.is_planted))
    engine.close()
    if not is_planted:
        raise ConfigError(f"{site.operator}: no rank has this operator any more, in which a fault was to be planted")
    return ""
