# SPDX-License-Identifier: Apache-2.0
"""Graphs of single ranks, for the tests of dry runs, inference and recomputation: what is counted in them."""

import dataclasses
from collections import Counter

import numpy as np

from pangu.model import PanGuWithLoss
from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.by_depth import full_depth, reduced_depths
from sporeloom.dry_run.compile import compile_ranks
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.summary import summarize
from sporeloom.dry_run.work import COLLECTIVES
from sporeloom.inference.model import build_model
from sporeloom.models.family import size_config
from sporeloom.models.weight_formats import WEIGHT_FORMATS
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.step_graphs import cut_cell, whole_cell
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.optim import SGD


def inference(path, size, num_layers, rank, length, weights):
    """Collectives and local parameters of a cached forward pass."""
    strategy = load_strategy(path, for_inference=True)
    config = size_config("pangu", size).with_layers(num_layers)
    rows, slots = 2 * strategy.mesh.dp, 256
    net = build_model("pangu", config, strategy, (rows, slots), WEIGHT_FORMATS[weights])
    shapes = [(rows, length), (rows, length), (rows,), (rows, config.kv_heads, length, 3)]
    graph = compile_for_one_device(net, [(shape, np.int32) for shape in shapes])
    cut = (
        cut_cell(graph, net, strategy, is_training=False) if strategy.mesh.pp > 1 else whole_cell(graph, net, strategy)
    )
    stage = strategy.mesh.coordinate(rank, "pp")
    passes = cut.stages.passes.items()
    graphs = [made.graph for one, made in passes if strategy.stage_of_part(one.part) == stage]
    counts = Counter(node.kind for graph in graphs for node in graph.nodes if node.kind in COLLECTIVES)
    for name, takers in cut.stages.takers.items():
        source = strategy.stage_of_part(cut.stages.givers[name].part)
        targets = {strategy.stage_of_part(taker.part) for taker in takers} - {source}
        counts["Send"] += len(targets) if source == stage else 0
        counts["Receive"] += stage in targets
    parameters = {name.rpartition(":")[2]: t.shape for graph in graphs for name, t in graph.parameters.items()}
    return {"counts": +counts, "parameters": parameters}


def recompute(path):
    """Number of products and softmaxes outside the backward pass."""
    strategy = load_strategy(path)
    net = PanGuWithLoss(dataclasses.replace(size_config("pangu", "tiny"), dropout_rate=0.1, num_layers=2))
    report = parallelize(net, strategy)
    step = TrainStep(net, SGD(net.trainable_params()), report, 0).set_train()
    inputs = [((4, 16), np.int32)] * 3 + [((4, 16), np.float32), ((4, 16), np.int32)]
    graph = whole_cell(compile_for_one_device(step, inputs), step, strategy).sharded.result.graph
    names = [node.kind for node in graph.nodes if not (node.scope and node.scope.is_backward and not node.scope.again)]
    return {name: names.count(name) for name in ("BatchMatMul", "MatMul", "Softmax")}


def by_depth(path, model, rank):
    """A training step at full depth, and extrapolated from reduced depths."""
    config, strategy = dataclasses.replace(size_config("pangu", "tiny"), **model), load_strategy(path)
    batch = (strategy.mesh.dp * strategy.num_parts(1), config.seq_len)

    def compile_stage(model, strategy):
        (report,) = compile_ranks("pangu", model, strategy, [rank], batch)
        return report

    compiled = [compile_stage(*depth) for depth in reduced_depths(config, strategy, rank)]
    whole, fast = compile_stage(config, strategy), full_depth(config, strategy, rank, compiled)
    return [dataclasses.asdict(report) for report in (whole, fast)]


def dry_run_values(arguments):
    """What tools/dry_run.py --json prints, compiled in this process."""
    run = check(parse_args(DryRunConfig, "", arguments))
    options = (run.batch_size, run.seq_len), run.config.inference, run.config.accumulate, run.task
    return summarize(run, compile_ranks(run.config.model, run.model, run.strategy, run.distinct_ranks, *options))


def every_rank(path, model, batch):
    """The groups and collectives of every rank, none of them derived from another's."""
    config, strategy = dataclasses.replace(size_config("pangu", "tiny"), **model), load_strategy(path)
    found = compile_ranks("pangu", config, strategy, range(strategy.mesh.size), batch)
    return [{"groups": r.groups, "collectives": [dataclasses.asdict(c) for c in r.collectives]} for r in found]
