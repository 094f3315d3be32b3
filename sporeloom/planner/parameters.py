# SPDX-License-Identifier: Apache-2.0
"""Parameters of each pipeline stage on one of its devices."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism

Stages = tuple[Dimensions, int, tuple[int, ...], tuple[int, ...], int]
"""Key of everything that the parameters of stages depend on: model, tp, each stage's layers and layers of experts,
the last stage."""


def layer_parameters(dims: Dimensions, tp: int) -> int:
    """Parameters of one layer on one device."""
    return layer_copies(dims, tp).total()


def layer_copies(dims: Dimensions, tp: int) -> Counter[int]:
    """Parameters of one layer on one device, by how many tensor parallel ranks hold the same ones.

    Keys and values have a part for each of their heads at most.
    """
    kv_parts = math.gcd(tp, dims.kv_heads)
    found = Counter({1: (dims.layer_matrices + dims.layer_biases_cut - dims.layer_kv) // tp})
    found[tp // kv_parts] += dims.layer_kv // kv_parts
    found[tp] += dims.layer_vectors_whole
    return found


def stage_copies(dims: Dimensions, job: Parallelism) -> tuple[Counter[int], ...]:
    """Parameters of each stage on one of its devices, by how many tensor parallel ranks of it hold the same ones.

    The first stage has the tables of words and positions, the last one the last norm, the queries' table and the
    head's, which is a second copy of the words where they are tied and there is more than one stage. Not to be changed:
    who asks again gets the same ones.
    """
    return _stage_copies(_stages_of(dims, job))


def _stages_of(dims: Dimensions, job: Parallelism) -> Stages:
    return dims, job.tp, job.stages(dims.num_layers), job.expert_layers(dims), job.last_stage


@functools.lru_cache(maxsize=1024)  # a search needs the same for many jobs
def _stage_copies(stages: Stages) -> tuple[Counter[int], ...]:
    dims, tp, layers_of, expert_layers_of, last_stage = stages
    words, table = dims.vocab_size * dims.hidden_size // tp, dims.position_table
    dense, sparse = (layer_copies(kind, tp) for kind in dims.kinds)
    counts = tuple(
        Counter({copies: (layers - few) * dense[copies] + few * sparse[copies] for copies in {*dense, *sparse}})
        for layers, few in zip(layers_of, expert_layers_of, strict=True)
    )
    ends = [dims.further_entries * end // dims.num_layers for end in itertools.accumulate(layers_of, initial=0)]
    for stage, (start, end) in zip(counts, itertools.pairwise(ends), strict=True):
        stage[tp] += end - start
    first, last = counts[0], counts[last_stage]
    first[1] += words
    first[tp] += min(dims.position_tables, 1) * table
    for copies, entries in (sparse if dims.num_experts else dense).items():
        last[copies] += dims.mtp_layers * entries
    last[tp] += dims.mtp_layers * dims.mtp_vectors_and_projection
    last[tp] += dims.norm + max(dims.position_tables - 1, 0) * table
    if dims.value_head:
        last[tp] += dims.hidden_size
    elif not dims.tied_embedding or last_stage > 0:
        last[1] += words
    return counts


def stage_parameters(dims: Dimensions, job: Parallelism) -> tuple[int, ...]:
    """Parameters of each stage on one of its devices, before the optimizer's sharding."""
    return _stage_parameters(_stages_of(dims, job))


@functools.lru_cache(maxsize=1024)
def _stage_parameters(stages: Stages) -> tuple[int, ...]:
    return tuple(counts.total() for counts in _stage_copies(stages))


def head_columns(dims: Dimensions, job: Parallelism) -> float:
    """Number of values that a device computes for each token's output."""
    return 1 if dims.value_head else dims.vocab_size / job.tp


@functools.lru_cache(maxsize=1024)
def expert_parameters(dims: Dimensions, job: Parallelism) -> tuple[int, ...]:
    """Parameters of each stage's experts on one of its devices, before the optimizer's sharding; they are separate
    from the others."""
    whole = dims.mlp_bias * dims.hidden_size  # the bias of the sum over the parts
    part = (dims.expert_parameters - whole) // job.parts_of_expert + whole
    layers = list(job.expert_layers(dims))
    layers[job.last_stage] += dims.mtp_layers if dims.num_experts else 0
    return tuple(count * dims.num_experts * part // job.ep for count in layers)


def expert_shards(job: Parallelism) -> int:
    """Number of ranks over which the optimizer shards its state of experts: those that hold the same ones."""
    same = job.replicas * job.tp // (job.ep * job.parts_of_expert)
    return max(1, min(job.shards, same)) if job.zero else 1


def copied_parameters(dims: Dimensions, job: Parallelism) -> list[int]:
    """The part of `stage_parameters` that several tensor parallel ranks of the stage hold."""
    return [counts.total() - counts[1] for counts in stage_copies(dims, job)]


def cut_parameters(count: int, experts: int, shards: int, expert_shards: int, is_cut: bool) -> float:
    return count / shards + experts / expert_shards if is_cut else count + experts
