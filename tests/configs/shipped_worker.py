# SPDX-License-Identifier: Apache-2.0
"""Partitions strategy files at reduced width and depth, and reports a rank of each stage.

CodeGeeX 13B keeps its width; the others have the smallest that every parameter can be sharded at. Long pipelines get as many
microbatches as stages, two virtual stages at the most and, but for the longest, 4 stages: those in the midst are alike.
"""

import dataclasses
from pathlib import Path

from strategy_names import family_and_size

from sporeloom.dry_run.compile import compile_ranks
from sporeloom.models.family import size_config
from sporeloom.planner.closed_forms import collective_bytes, job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.runtime.environment import launched_processes, launched_rank
from sporeloom.strategy.loader import load_strategy

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
    full = size_config(family, size)
    grouped = full.kv_heads < full.num_heads
    experts = full.experts and dataclasses.replace(
        full.experts,
        ffn_hidden_size=16 * mesh.tp,
        shared_ffn_hidden_size=16 * mesh.tp if full.experts.shared_ffn_hidden_size else 0,
        layer_frequency=1,
    )
    return dataclasses.replace(
        full,
        vocab_size=max(64 * mesh.tp, mesh.tp * mesh.dp),
        hidden_size=width,
        num_heads=2 * mesh.tp if grouped else heads,
        num_kv_heads=min(full.kv_heads, mesh.tp) if grouped else None,
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
    strategy = load_strategy(path)
    if strategy.mesh.pp <= 4:
        return strategy
    stages, virtual = strategy.mesh.pp if Path(path).stem == LONGEST else 4, min(2, strategy.pipeline.virtual_stages)
    pipeline = dataclasses.replace(strategy.pipeline, num_microbatches=stages, virtual_stages=virtual)
    return dataclasses.replace(strategy, mesh=dataclasses.replace(strategy.mesh, pp=stages), pipeline=pipeline)


def reports(path):
    """What a rank of each stage holds and sends, beside what the closed formulas say."""
    strategy = shortened(path)
    (family, size), mesh, parts = family_and_size(Path(path).stem), strategy.mesh, strategy.num_parts()
    config = reduced(family, size, strategy)
    batch = mesh.dp * parts, max(SEQ_LEN, mesh.cp * mesh.tp)
    ranks = [mesh.ranks_of_stage(stage).start for stage in range(mesh.pp)]
    dims, job = of_decoder(config, batch[1]), job_of(strategy, config, batch[0])
    sizes = parameter_bytes(dims, job)
    return [
        {
            "stage": report.stage,
            "parameter_bytes": report.parameter_bytes,
            "implied_parameter_bytes": sizes[report.stage],
            "tied_bytes": 4 * config.vocab_size // mesh.tp * config.hidden_size if config.tied_embedding else 0,
            "optimizer_bytes": report.optimizer_bytes,
            "short_bytes": sum(p.num_bytes for p in report.parameters if p.optimizer_shards == 1),
            "sent": sum(c.bytes_per_step for c in report.collectives),
            "implied": sum(collective_bytes(dims, job, report.stage).values()),
            "counts": [[c.kind, c.phase, c.group, c.count, c.bytes_each] for c in report.collectives],
            "activation_bytes": 4 * batch[1] // mesh.cp * config.hidden_size,
            "layers": len(report.layers) or config.num_layers,
            "microbatches": parts,
            "virtual_stages": strategy.pipeline.virtual_stages,
        }
        for report in compile_ranks(family, config, strategy, ranks, batch)
    ]


def share_of_reports(paths):
    """Reports of this process's share of the strategies, by name."""
    return {Path(path).stem: reports(path) for path in paths[launched_rank() :: launched_processes()]}
