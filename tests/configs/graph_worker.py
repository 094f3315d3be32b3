# SPDX-License-Identifier: Apache-2.0
"""Graphs of single ranks, for the tests of dry runs, inference and recomputation: what is counted in them."""

import contextlib
import dataclasses
import re
import unittest.mock
from collections import Counter

import numpy as np
from mindspore import nn

from pangu.model import PanGuWithLoss
from sporeloom.cli import parse_args
from sporeloom.dry_run import compile as compilation_for_all
from sporeloom.dry_run.by_depth import full_depth, small_depths
from sporeloom.dry_run.by_mindspore import all_reduce_of, compile_rank
from sporeloom.dry_run.cells import model_cell
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.dry_run.summary import summarize
from sporeloom.inference.model import build_model
from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT
from sporeloom.runtime.cpu import partition as compilation
from sporeloom.runtime.cpu.lowering import attributes, collective_nodes
from sporeloom.runtime.cpu.partition import partition
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.optim import SGD


@contextlib.contextmanager
def written_out():
    """Microbatches are copied into the graph, as without functions, though a cell asks for one."""
    nn.Cell.cell_init_args = property(lambda cell: "", lambda cell, value: None)
    try:
        yield
    finally:
        del nn.Cell.cell_init_args


def dry_run(path, model, rank, as_function, accumulate=1):
    config = dataclasses.replace(size_config("pangu", "tiny"), **model)
    with contextlib.nullcontext() if as_function else written_out():
        report = compile_rank("pangu", config, load_strategy(path), rank, (4 * accumulate, 64), False, accumulate)
    found = Counter()
    for c in report.collectives:
        size = "" if c.kind in ("Send", "Receive") else len(report.groups[c.group])
        found[f"{c.kind} {size} {c.bytes_each}"] += c.count
    groups = sorted(map(sorted, report.groups.values()))
    return {"collectives": found, "flops": sum(report.flops.values()), "groups": groups}


def inference(path, size, rank, length, int8):
    strategy, config = load_strategy(path, for_inference=True).by_mindspore(), size_config("pangu", size)
    rows, slots = 2 * strategy.mesh.dp, 256
    net = build_model("pangu", config, strategy, (rows, slots), int8)
    shapes = [(rows, length), (rows, length), (rows,), (rows, config.kv_heads, length, 3)]
    graph = partition(net, strategy, rank, [(shape, np.int32) for shape in shapes])
    counts = Counter(primitive.op_type for _, primitive in collective_nodes(graph.model))
    return {"counts": counts, "parameters": graph.parameters}


def recompute(path):
    strategy = load_strategy(path).by_mindspore()
    net = PanGuWithLoss(dataclasses.replace(size_config("pangu", "tiny"), dropout_rate=0.1, num_layers=2))
    report = parallelize(net, strategy)
    step = TrainStep(net, SGD(net.trainable_params()), report, 0).set_train()
    graph = partition(step, strategy, 0, [((4, 16), np.int32)] * 3 + [((4, 16), np.float32), ((4, 16), np.int32)])
    kinds = {p.name: p.op_type for p in graph.model.primitives}
    nodes = [n for g in (graph.model.graph, *graph.model.functions) for n in g.node]
    names = [kinds.get(n.op_type.removeprefix("REF::")) for n in nodes if not n.domain.startswith("Gradients")]
    return {name: names.count(name) for name in ("BatchMatMul", "MatMul", "Softmax")}


def by_depth(path, model, rank):
    """A training step compiled whole, and derived from small depths."""
    config, strategy = dataclasses.replace(size_config("pangu", "tiny"), **model), load_strategy(path)
    batch = (strategy.mesh.dp * strategy.num_parts(1), config.seq_len)

    def compile_stage(model, strategy):
        if strategy.engine == "spmd":
            (report,) = compilation_for_all.compile_ranks("pangu", model, strategy, [rank], batch)
            return report
        return compile_rank("pangu", model, strategy, rank, batch)

    compiled = [compile_stage(*depth) for depth in small_depths(config, strategy, rank)]
    whole, fast = compile_stage(config, strategy), full_depth(config, strategy, rank, compiled)
    return [dataclasses.asdict(report) for report in (whole, fast)]


def both_ways(path):
    """Every node of a training step, as MindSpore compiles it by itself and by our faster way."""
    strategy, found = load_strategy(path).by_mindspore(), []
    for context in (contextlib.nullcontext, compilation.faster_compilation):
        config = dataclasses.replace(size_config("pangu", "tiny"), num_layers=2)
        net = family_module("pangu", "model").ModelWithLoss(config)
        report = parallelize(net, strategy)
        step = TrainStep(wrap(net, strategy), SGD(net.trainable_params()), report, 0, None, 1.0).set_train()
        shapes = [((8, 16), np.int32)] * 3 + [((8, 16), np.float32), ((8, 16), np.int32)]
        with unittest.mock.patch.object(compilation, "faster_compilation", context):
            graph = partition(step, strategy, 0, shapes)
        found.append(_nodes(graph.model))
    return found


def _nodes(model):
    """Kind, place, and attributes but MindSpore's own numbering of each node, and how many there are."""
    primitives = {p.name: p for p in model.primitives}
    nodes = Counter()
    for graph in (model.graph, *model.functions):
        for node in graph.node:
            primitive = primitives.get(node.op_type.removeprefix("REF::"))
            values = attributes(primitive) if primitive else {}
            shown = {k: v for k, v in values.items() if k in ("group", "op", "fusion", "mean_flag", "rank_size")}
            kind = primitive.op_type if primitive else "call" if node.op_type.startswith("REF::") else node.op_type
            nodes[f"{kind} {re.sub(r'[0-9]+', '', node.domain)} {sorted(shown.items())}"] += 1
    return nodes


def dry_run_values(arguments):
    """What tools/dry_run.py --json prints, compiled in this process."""
    run = check(parse_args(DryRunConfig, "", arguments))
    family, batch = run.config.model, (run.batch_size, run.seq_len)
    options = (run.config.inference, run.config.accumulate, run.task)
    ranks = run.distinct_ranks
    if run.strategy.engine == "spmd":
        found = compilation_for_all.compile_ranks(family, run.model, run.strategy, ranks, batch, *options)
    else:
        found = [compile_rank(family, run.model, run.strategy, rank, batch, *options) for rank in ranks]
    return summarize(run, found)


def order_of_passes(path):
    """[kind, part, microbatch] of every stage, in the order that a training graph chains them, of a layer a part."""
    strategy, found = load_strategy(path).by_mindspore(), []
    config = dataclasses.replace(size_config("pangu", "tiny"), num_layers=strategy.num_virtual_stages)
    for stage in range(strategy.mesh.pp):
        rank, batch = strategy.mesh.ranks_of_stage(stage)[0], (strategy.pipeline.num_microbatches, 16)
        of_rank = rank, all_reduce_of(rank, strategy)
        built = model_cell("pangu", config, strategy, batch, False, 1, PLAIN_TEXT, *of_rank)
        found.append(_chained_calls(partition(built.cell, strategy, rank, built.inputs).model))
    return found


def _chained_calls(model):
    forward, parts = {function.name for function in model.functions if "▸" in function.name}, {}
    nodes, calls, seen = {node.output[0]: node for node in model.graph.node}, {}, Counter()
    for name, node in nodes.items():
        target = node.op_type.removeprefix("REF::")
        if target in forward:
            calls[name] = ["forward", parts.setdefault(target, len(parts)), seen[target]]
            seen[target] += 1
        elif target in nodes:  # the backward function that a forward call gave
            calls[name] = ["backward", *calls[nodes[target].input[0]][1:]]
    before = {}
    for name, node in nodes.items():  # in topological order
        needed = [*node.input, node.op_type.removeprefix("REF::")]
        before[name] = set().union(*(before.get(i, set()) | ({i} & calls.keys()) for i in needed))
    chained = sorted(calls, key=lambda name: len(before[name]))
    assert [len(before[name]) for name in chained] == list(range(len(chained)))  # one order is possible
    order: list[list] = []
    for name in chained:  # a second backward function is of the gradients of weights
        kind, part, microbatch = calls[name]
        order.append(["weights" if calls[name] in order else kind, part, microbatch])
    return order
