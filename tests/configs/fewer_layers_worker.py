# SPDX-License-Identifier: Apache-2.0
"""Steps compiled at full depth, and derived from networks with fewer layers, for tests."""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import numpy as np

from sporeloom.core.command_line import parse_args
from sporeloom.dry_run import fewer_layers
from sporeloom.dry_run.compile import rank_report
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.memory.run import memory_timeline
from sporeloom.dry_run.partitioned import partition_model
from sporeloom.dry_run.time.run import step_times
from sporeloom.partition.depth.entries import read_entries
from sporeloom.partition.depth.units import Units
from sporeloom.partition.depth.unroll import unrolled
from sporeloom.planner.cluster import read_cluster

LITERAL = Units(10**9, 1)
"""No layer number is replaced."""


def compared(flags):
    """Number of graphs of a step that are derived, and what differs from the step that is compiled at full depth."""
    run = check(parse_args(DryRunConfig, "", flags, check))
    options = (run.batch_size, run.seq_len), run.config.inference, run.config.accumulate, run.task
    graphs = {"derived": [], "compiled": []}
    compile_in_full = fewer_layers.compiled_or_cached

    def derived(models, units, num_units, names, labels, written):
        graph = unrolled(models, units, num_units, names, labels, written)
        graphs["derived"].append(graph)
        return graph

    def compiled(cell, described):
        graph = compile_in_full(cell, described)
        graphs["compiled"].append(graph)
        return graph

    with patch.object(fewer_layers, "MAX_SHARE", 99), patch.object(fewer_layers, "unrolled", derived):
        few = partition_model(run.config.model, run.model, run.strategy, *options)
    if not graphs["derived"]:  # it was compiled at full depth, too
        return {"derived": 0, "differences": []}
    with (
        patch.object(fewer_layers, "MAX_SHARE", 0),
        patch.object(fewer_layers, "compiled_or_cached", compiled),
    ):
        full = partition_model(run.config.model, run.model, run.strategy, *options)
    differences = [
        f"graph {number}: {difference}"
        for number, pair in enumerate(zip(graphs["derived"], graphs["compiled"], strict=False))
        for difference in _differing(*pair)
    ]
    for rank in run.distinct_ranks:
        one, other = (_results(each, rank) for each in (few, full))
        differences += [
            f"rank {rank}: {name}{_first(one[name], other[name])}" for name in one if one[name] != other[name]
        ]
    if not run.config.inference:
        one, other = (_times(each) for each in (few, full))
        differences += [f"times of {rank}{_first(one[rank], other[rank])}" for rank in one if one[rank] != other[rank]]
    return {"derived": len(graphs["derived"]), "differences": differences}


def _differing(one, other):
    """Differences of two graphs, apart from names of values."""
    entries = [read_entries(graph, LITERAL, [""] * len(graph.graph.input), lambda _: None) for graph in (one, other)]
    if len(entries[0]) != len(entries[1]):
        yield f"{len(entries[0])} and {len(entries[1])} entries"
    for position, (a, b) in enumerate(zip(*entries, strict=False)):
        if (a.content, a.inputs, a.ids) != (b.content, b.inputs, b.ids):
            yield f"entry {position}: {a.content[0]} {a.texts} {a.refs} and {b.content[0]} {b.texts} {b.refs}"
            return


def _results(partitioned, rank):
    report = dataclasses.asdict(dataclasses.replace(rank_report(partitioned, rank), compile_s=0.0))
    timeline = memory_timeline(partitioned, rank)
    labels = [label._replace(operator="") if label.kind == "constant" else label for label in timeline.labels]
    arrays = {name: value.tolist() for name, value in vars(timeline).items() if isinstance(value, np.ndarray)}
    rest = [timeline.phases, timeline.pool_bytes, timeline.num_initial, timeline.live_as_written]
    return {**report, "labels": [labels[number] for number in arrays.pop("of_label")], **arrays, "rest": rest}


def _first(one, other):
    pairs = zip(one, other, strict=False) if isinstance(one, list) else ()
    return next((f": {a} and {b}" for a, b in pairs if a != b), "")


def _times(partitioned):
    def plain(of):
        return [
            (
                *(task.name, task.kind, task.stream, task.seconds, task.launch, task.needs, task.flops),
                *(task.num_bytes, task.group, task.pair, task.algorithm, task.meets is None),
                *(span.start, span.end, span.after),
                plain(task.inside) if task.inside else None,
            )
            for task, span in zip(of.tasks, of.spans, strict=True)
        ]

    return {rank: plain(of) for rank, of in step_times(partitioned, read_cluster(Path("cloudmatrix384"))).items()}
