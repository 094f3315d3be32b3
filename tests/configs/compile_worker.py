# SPDX-License-Identifier: Apache-2.0
"""Compiles strategy files for the virtual Ascend target, a rank of the first, middle and last stage, at reduced depth.

CodeGeeX 13B keeps its width; the others have the smallest that every parameter can be sharded at. Long pipelines get as many
microbatches as stages, two virtual stages at the most and, but for the longest, 4 stages: those in the midst are alike.
"""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.nn.utils import no_init_parameters

from sporeloom.models.family import family_and_size, family_module, size_config
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.cpu.lowering import attributes, collective_nodes
from sporeloom.runtime.cpu.partition import partition
from sporeloom.runtime.cpu.target import WORLD, virtual_ascend
from sporeloom.runtime.environment import launched_processes, launched_rank
from sporeloom.strategy.loader import load_rules, load_strategy
from sporeloom.strategy.stages import stage_of_layers
from sporeloom.train.optim import AdamW

SEQ_LEN = 16
LONGEST = "pangu_200b_dp16_tp8_pp16"


def reduced(family, size, strategy):
    """Small, yet every parameter can be sharded over all replicas, as at full size."""
    mesh = strategy.mesh
    if (family, size) == ("codegeex", "13b"):
        return dataclasses.replace(size_config(family, size), num_layers=2, dropout_rate=0.0)
    heads = mesh.tp * mesh.cp
    replicas = mesh.dp * heads
    width = max(16 * heads, replicas)
    whole = size_config(family, size)
    grouped = whole.kv_heads < whole.num_heads
    experts = whole.experts and dataclasses.replace(
        whole.experts,
        ffn_hidden_size=16 * mesh.tp,
        shared_ffn_hidden_size=16 * mesh.tp if whole.experts.shared_ffn_hidden_size else 0,
        layer_frequency=1,
    )
    return dataclasses.replace(
        whole,
        vocab_size=max(64 * mesh.tp, mesh.tp * mesh.dp),
        hidden_size=width,
        num_heads=2 * mesh.tp if grouped else heads,
        num_kv_heads=min(whole.kv_heads, mesh.tp) if grouped else None,
        head_dim=max(16, mesh.dp) if grouped else None,
        ffn_hidden_size=4 * width,
        rope_dim=None,
        num_layers=max(2, strategy.num_virtual_stages),
        seq_len=max(SEQ_LEN, replicas),
        dropout_rate=0.0,
        attention="flash" if mesh.cp > 1 else "auto",  # plain attention of grouped heads sends more
        eod_id=0,
        loss_ignore_id=0,
        stop_ids=(),
        experts=experts,
    )


def shortened(path):
    """The strategy of a file, with a shorter pipeline."""
    strategy = load_strategy(path).by_mindspore()
    if strategy.mesh.pp <= 4:
        return strategy
    stages, virtual = strategy.mesh.pp if Path(path).stem == LONGEST else 4, min(2, strategy.pipeline.virtual_stages)
    pipeline = dataclasses.replace(strategy.pipeline, num_microbatches=stages, virtual_stages=virtual)
    return dataclasses.replace(strategy, mesh=dataclasses.replace(strategy.mesh, pp=stages), pipeline=pipeline)


def compile_rank(path, rank, rules=None):
    """`rules`: a file to take instead of the strategy's own."""
    strategy = shortened(path)
    if rules:
        strategy = dataclasses.replace(strategy, rules=load_rules(Path(rules), strategy))
    mesh = strategy.mesh
    family, size = family_and_size(Path(path).stem)
    with virtual_ascend(rank, mesh.size):
        all_reduce = ms.ops.AllReduce(group=WORLD)
    with no_init_parameters():
        config = reduced(family, size, strategy)
        net = family_module(family, "model").ModelWithLoss(config)
        report = parallelize(net, strategy)
        step = TrainStep(wrap(net, strategy), AdamW(net.trainable_params()), report, rank, all_reduce, 1.0).set_train()
    parts = strategy.num_parts()
    shape = (mesh.dp * parts, max(SEQ_LEN, mesh.cp * mesh.tp))
    graph = partition(step, strategy, rank, [(shape, np.int32)] * 3 + [(shape, np.float32)])
    stage = mesh.coordinate(rank, "pp")
    counts = Counter()
    in_network = {node.output[0] for function in graph.model.functions for node in function.node}
    for node, primitive in collective_nodes(graph.model):
        values = attributes(primitive)
        part = "backward" if node.domain.startswith("Gradients") else "forward"
        layer = "layer" if re.search("(Layer|Block)/", node.domain) else "other"
        of_parameter = "mirror" in primitive.instance_name or "parallel_optimizer" in primitive.instance_name
        kind = "gradient" if of_parameter and part == "backward" else part
        times = parts if node.output[0] in in_network else 1
        counts[f"{primitive.op_type} {kind} {layer} {len(graph.groups[values['group']])}"] += times
    held = [p for p in report.parameters if p.stage == stage]
    return {
        "strategy": Path(path).name,
        "rank": rank,
        "microbatches": parts,
        "virtual_stages": strategy.pipeline.virtual_stages,
        "layers": sum(len(layers) for layers in report.layers_of_stages[stage : stage + 1]) or config.num_layers,
        "counts": counts,
        "block": config.block,
        "expert_layers": sum(
            config.has_experts(layer)
            for layer, of_stage in enumerate(stage_of_layers(config.num_layers, strategy))
            if of_stage == stage
        ),
        "tied": int(config.tied_embedding),
        "parameters": len(held),
        "cut_by_optimizer": sum(p.optimizer_shards > 1 for p in held),
        "predicted_wrong": [p.name for p in held if graph.parameters.get(p.name) != p.local_shape],
    }


def compile_share(paths, whole):
    """This process's share of the ranks: one of the first, middle and last stage; every rank of those in `whole`."""
    tasks = []
    for path in paths:
        mesh = shortened(path).mesh
        of_stage, last = mesh.size // mesh.pp, mesh.pp - 1
        ranks = [mesh.size - 1 if stage == last else stage * of_stage for stage in sorted({0, mesh.pp // 2, last})]
        tasks += [(path, rank) for rank in (range(mesh.size) if Path(path).stem in whole else ranks)]
    return [compile_rank(*task) for task in tasks[launched_rank() :: launched_processes()]]
