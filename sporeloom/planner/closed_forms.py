# SPDX-License-Identifier: Apache-2.0
"""Strategies of this package in the cost model's terms: a Strategy as numbers, and the bytes that its graphs hold
and send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from sporeloom.models.config import ModelConfig
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.parallelism import Parallelism, PartLayers
from sporeloom.planner.parameters import (
    copied_parameters,
    expert_parameters,
    expert_shards,
    layer_parameters,
    stage_copies,
    stage_parameters,
)
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.stages import (
    layers_per_stage,
    offloaded_layers,
    part_of_layers,
    recomputed_layers,
    stage_of_layers,
)

Precision = Literal["fp16", "bf16", "fp32"]
PRECISIONS: dict[str, Precision] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def optimizer_sharding(cut: bool, gradients_add_up: bool, precision: Precision, again: bool = False) -> dict[str, Any]:
    """Optimizer parallel in the cost model's terms.

    Master weights and moments are sharded. The weights are gathered for the whole step in the type that is computed in;
    in float32 without sharding there is no such copy. Gradients of several microbatches add up whole, else they are
    sharded at once. `again`: weights are resharded after the forward pass, so that those of only two layers are gathered
    at once.
    """
    if again:
        return {"zero": 3, "weight_bytes": 0}
    return {
        "zero": 0 if not cut else 1 if gradients_add_up else 2,
        "weight_bytes": 2 if precision != "fp32" else 4 if cut else 0,
    }


def bytes_of_mask(flash: bool) -> int:
    """Bytes of an entry of the attention mask that the model families make: a number, or a byte for the kernel."""
    return 1 if flash else 4


def job_of(
    strategy: Strategy,
    config: ModelConfig,
    batch_size: int,
    accumulate: int = 1,
    optimizer_bytes: Mapping[str, Any] = MappingProxyType({}),
) -> Parallelism:
    """Convert a strategy for the cost model.

    Args:
        batch_size: sequences of a step, over all replicas.
        optimizer_bytes: `TrainedTask.optimizer_bytes`, where moments are not float32.
    """
    mesh, zero = strategy.mesh, strategy.optimizer_parallel
    microbatches, precision = strategy.num_microbatches(accumulate), PRECISIONS[config.compute_dtype]
    stages = stage_of_layers(config.num_layers, strategy)
    flash, kind = config.attention_on_ascend == "flash", strategy.recompute.kind if strategy.recompute else "none"
    return Parallelism(
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        order=mesh.order,
        ulysses=mesh.cp > 1 and strategy.context_parallel == "ulysses",
        ep=mesh.ep,
        expert_tp=mesh.tp * mesh.dp // mesh.ep if mesh.ep > mesh.dp else 0,
        sorts_rows=strategy.sorts_expert_rows,
        microbatch=max(1, batch_size // mesh.dp // microbatches),
        num_microbatches=microbatches,
        virtual_stages=strategy.pipeline.virtual_stages,
        schedule=strategy.pipeline.order,
        flash_attention=flash,
        mask_bytes=bytes_of_mask(flash),
        recompute="none" if flash and kind == "selective" else kind,  # of a kernel that makes no scores
        recomputed_layers=_of_stages(recomputed_layers(config.num_layers, strategy), stages, mesh.pp)
        if strategy.recompute
        else None,
        offloaded_layers=_of_stages(offloaded_layers(config.num_layers, strategy), stages, mesh.pp),
        optimizer_on_host=strategy.optimizer_on_host,
        layers_of_stages=tuple(layers_per_stage(config.num_layers, strategy)),
        layers_of_parts=_layers_of_parts(config.num_layers, strategy),
        expert_layers_of_stages=tuple(
            sum(config.has_experts(layer) for layer, of_stage in enumerate(stages) if of_stage == stage)
            for stage in range(mesh.pp)
        ),
        zero_shards=(zero.shard_size or 0) if zero else 0,
        sequence_parallel=strategy.sequence_parallel,
        precision=precision,
        own_graphs=True,
        **optimizer_bytes,
        **optimizer_sharding(
            bool(zero),
            microbatches > 1 and not (zero and zero.shard_accumulated_gradients),
            precision,
            strategy.gathers_twice,
        ),
    )


def _layers_of_parts(num_layers: int, strategy: Strategy) -> tuple[tuple[PartLayers, ...], ...]:
    """Layers of each stage's virtual stages, in their order."""
    chosen = (range(num_layers), recomputed_layers(num_layers, strategy), offloaded_layers(num_layers, strategy))
    part_of = part_of_layers(num_layers, strategy)
    counts = [Counter(part_of[layer] for layer in layers) for layers in chosen]
    found: list[list[PartLayers]] = [[] for _ in range(strategy.mesh.pp)]
    for part in range(strategy.num_virtual_stages):
        found[strategy.stage_of_part(part)].append(PartLayers(*(count[part] for count in counts)))
    return tuple(map(tuple, found))


def _of_stages(layers: Sequence[int], stages: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Number of these layers on each stage."""
    counts = Counter(stages[layer] for layer in layers)
    return tuple(counts[stage] for stage in range(num_stages))


def parameter_bytes(dims: Dimensions, job: Parallelism) -> list[int]:
    """Bytes of float32 parameters on a device of each stage, optimizer parallel included.

    Words may stay whole, see `_whole_words`.
    """
    sizes = []
    for stage, whole in enumerate(stage_copies(dims, job)):
        words = _whole_words(dims, job, stage)
        head = dims.hidden_size if dims.value_head and stage == job.last_stage else 0  # one row, which no axis shards
        counts = whole.copy()  # `stage_copies` gives the same ones again
        counts[1] -= words
        counts[job.tp] -= head
        # Parameters that several tensor parallel ranks hold have more replicas to be sharded over.
        more = not job.zero_shards and bool(job.zero)
        cut = sum(size // (job.shards * (copies if more else 1)) for copies, size in counts.items())
        cut += expert_parameters(dims, job)[stage] // expert_shards(job)
        sizes.append(4 * (cut + words + head))
    return sizes


def tied_words(dims: Dimensions, job: Parallelism, stage: int) -> int:
    """Entries of the embedding on a stage that shares it with another."""
    shared = job.last_stage > 0 and stage in (0, job.last_stage) and dims.tied_embedding
    return dims.vocab_size * dims.hidden_size // job.tp if shared else 0


def _whole_words(dims: Dimensions, job: Parallelism, stage: int) -> int:
    """Entries of the embeddings on a stage that optimizer parallel leaves unsharded: those that a pipeline sends,
    which MindSpore cannot shard, and rows that the shards do not divide."""
    if not dims.vocab_size // job.tp % job.shards:
        return tied_words(dims, job, stage)
    has_own_head = stage == job.last_stage and not dims.value_head and (job.last_stage > 0 or not dims.tied_embedding)
    tables = (stage == 0) + has_own_head
    return tables * dims.vocab_size * dims.hidden_size // job.tp


def collective_bytes(dims: Dimensions, job: Parallelism, stage: int) -> dict[str, float]:
    """Bytes of collectives that a device of a stage takes part in, by kind and phase, for one step."""
    layers = job.stages(dims.num_layers)[stage]
    again = 0 if job.recompute != "full" else layers if job.recomputed_layers is None else job.recomputed_layers[stage]
    found: Counter[str] = Counter()
    found.update(_layer_traffic(dims, job, stage, again))
    found.update(_expert_traffic(dims, job, stage, again))
    found.update(_context_traffic(dims, job, layers, again))
    found.update(_loss_traffic(dims, job, stage))
    found.update(_stage_traffic(dims, job, stage))
    found.update(_parameter_traffic(dims, job, stage))
    found["AllReduce optimizer"] += 4 if job.devices > 1 else 0  # the square sum of all gradients
    found["AllReduce optimizer"] += 4 if job.last_stage < job.pp - 1 else 0  # the loss, for the last stage to know
    return {name: size for name, size in found.items() if size}


def _layer_traffic(dims: Dimensions, job: Parallelism, stage: int, again: int) -> dict[str, float]:
    """Collectives of tensor parallelism. A layer has two reductions forward, and one where attention and MLP are parallel and
    nothing is computed with either result. Backward it has two, and one where they are parallel; when it is fully recomputed
    one more, in a sandwich block, whose norms need both results, two, in a parallel one none. The embedding adds one, of the
    float32 rows it looked up. With sequence parallel each of a layer's is a reduce-scatter and an all-gather instead, and the
    head gathers, too."""
    if job.tp == 1:
        return {}
    inputs = 1 if dims.block == "parallel" else 2  # of products that are sharded by columns
    results = {"sequential": 1, "parallel": 0, "sandwich": 2}[dims.block]  # that computing again needs
    tokens, m = job.microbatch * dims.seq_len // job.cp, job.num_microbatches
    x, layers = tokens * dims.hidden_size * job.activation_bytes, job.stages(dims.num_layers)[stage]
    sparse = job.expert_layers(dims)[stage]
    unshared = 0 if dims.shared_ffn_size else sparse  # layers without an MLP for every token
    forward = 2 * layers - unshared - (layers - sparse if dims.sums_both_results else 0)
    looked_up = m * int(stage == 0) * tokens * dims.hidden_size * 4
    if not job.sequence_parallel:
        return {
            "AllReduce forward": m * forward * x + looked_up,
            "AllReduce recompute": m * x * results * again,
            "AllReduce backward": m * (inputs * layers - unshared) * x + looked_up,
        }
    last_stage = int(stage == job.last_stage)
    return {
        "AllReduce forward": looked_up,
        "AllReduce backward": looked_up,
        "ReduceScatter forward": m * x * forward,
        "AllGather forward": m * x * (inputs * layers + last_stage),
        "ReduceScatter recompute": m * x * results * again,
        "AllGather recompute": m * x * inputs * again,
        "AllGather backward": m * x * inputs * layers,
        "ReduceScatter backward": m * x * (inputs * layers + last_stage),
    }


def _loss_traffic(dims: Dimensions, job: Parallelism, stage: int) -> Counter[str]:
    """Collectives of the last stage: over tp the maximum, sum and label's entry of each token, over replicas the
    loss itself."""
    found, m = Counter[str](), job.num_microbatches
    tokens = job.microbatch * dims.seq_len // job.cp
    if stage != job.last_stage:
        return found
    if job.tp > 1:
        found["AllReduce forward"] += 3 * m * tokens * 4
        found["AllReduce backward"] += 2 * m * tokens * 4
    if job.replicas > 1:
        found["AllReduce forward"] += 4 * m
        found["AllReduce backward"] += 4 * m if m > 1 else 0
    return found


def _stage_traffic(dims: Dimensions, job: Parallelism, stage: int) -> dict[str, float]:
    """Activations and their gradients between stages, and the embedding where the head is tied to it."""
    if job.pp == 1:
        return {}
    m, first_stage, last_stage = job.num_microbatches, int(stage == 0), int(stage == job.last_stage)
    x = job.microbatch * dims.seq_len // job.cp * dims.stream_width * job.activation_bytes
    sent, tied = m * x // (job.tp if job.sequence_parallel else 1), 4 * tied_words(dims, job, stage)
    sent += 4 * m * bool(dims.num_experts)  # what the routers up to there add to the loss
    forth = job.neighbours(stage)
    back = forth + last_stage - first_stage  # what comes from parts before
    return {
        "Send forward": forth * sent + tied * first_stage,
        "Receive backward": forth * sent + tied * first_stage,
        "Receive forward": back * sent + tied * last_stage,
        "Send backward": back * sent + tied * last_stage,
    }


def _context_traffic(dims: Dimensions, job: Parallelism, layers: int, again: int) -> dict[str, float]:
    """Collectives of context parallelism for one sequence a microbatch and replica: keys and values gathered, and
    their gradients added up; or all-to-alls for queries, keys, values and their results."""
    if job.cp == 1:
        return {}
    m, width, tokens = job.num_microbatches, job.activation_bytes, job.microbatch * dims.seq_len
    keys, queries = dims.kv_size // math.gcd(job.tp, dims.kv_heads), dims.query_size // job.tp
    if job.ulysses:
        moved = m * width * tokens // job.cp * 2 * (queries + keys)
        return {
            "AlltoAll forward": layers * moved,
            "AlltoAll backward": layers * moved,
            "AlltoAll recompute": again * moved,
        }
    moved = m * width * tokens * 2 * keys
    return {
        "AllGather forward": layers * moved,
        "ReduceScatter backward": layers * moved,
        "AllGather recompute": again * moved,
    }


def _of_equal_parts(dims: Dimensions, job: Parallelism) -> dict[str, int]:
    """Bytes of the collectives of a layer of experts with a capacity: an all-to-all there and one back, and a reduction of
    what tensor parallel ranks have of each row."""
    computed = dims.experts_per_token * dims.seq_len * job.expert_rows(dims)
    room = min(dims.seq_len, math.ceil(computed / dims.num_experts))
    rows = job.num_microbatches * dims.num_experts * room * job.microbatch
    moved = rows * dims.hidden_size * job.activation_bytes
    return {"AlltoAll": 2 * (job.ep > 1) * moved, "AllReduce": (job.tp > 1) * moved}


def _of_sorted_rows(dims: Dimensions, job: Parallelism) -> dict[str, int]:
    """Bytes of the collectives of a layer whose experts compute their own rows alone: an all-gather of the tokens, with
    experts and weights of their choices, a reduce-scatter of their results, and a reduction over tensor parallel ranks, of
    each row where experts have biases."""
    ranks, tokens = job.gathers_tokens_of, job.num_microbatches * job.microbatch * dims.seq_len // job.cp
    features = dims.hidden_size * job.activation_bytes
    found: dict[str, int] = {}
    if job.ep > 1 and ranks > 1:
        found["AllGather"] = ranks * tokens * (features + 8 * dims.experts_per_token)
        found["ReduceScatter"] = ranks * tokens * (features + 4 * dims.experts_per_token)
        found["AlltoAll"] = 8 * dims.num_experts * job.num_microbatches * job.microbatch  # numbers of rows
    if job.tp > 1:
        added_up = tokens * job.sorted_rows(dims) if dims.mlp_bias else tokens
        found["AllReduce"] = added_up * features + tokens * job.sorted_rows(dims) * job.activation_bytes  # and weights
    return found


def _of_biases(dims: Dimensions, job: Parallelism, with_experts: int) -> int:
    """Bytes of the biases of the sorted rows, which tensor parallel ranks exchange forward where experts are sharded over
    them, too: the table of biases is sharded by features, the rows by experts."""
    if not (dims.mlp_bias and job.computes_own_rows(dims) and job.parts_of_expert < job.tp):
        return 0
    rows = job.num_microbatches * job.microbatch * dims.seq_len // job.cp * job.sorted_rows(dims)
    return with_experts * (dims.mlp_matrices - 1) * rows * dims.expert_ffn_size * job.activation_bytes


def _expert_traffic(dims: Dimensions, job: Parallelism, stage: int, again: int) -> Counter[str]:
    """Collectives of experts: there, back, and over tensor parallel ranks; all of it mirrored backward, and once more where
    layers are recomputed. And the few values that the routers' losses and counters sum."""
    found: Counter[str] = Counter()
    layers, with_experts = job.stages(dims.num_layers)[stage], job.expert_layers(dims)[stage]
    if not dims.num_experts:
        return found
    for kind, moved in (_of_sorted_rows if job.computes_own_rows(dims) else _of_equal_parts)(dims, job).items():
        found[f"{kind} forward"] = with_experts * moved
        found[f"{kind} backward"] = with_experts * moved
        found[f"{kind} recompute"] = with_experts * moved * again // layers
    biases = _of_biases(dims, job, with_experts)
    for kind in ("AlltoAll", "AllGather")[: 1 + (job.parts_of_expert > 1)]:
        found[f"{kind} forward"] += biases
        found[f"{kind} recompute"] += biases * again // layers
    counted, m = 4 * (dims.num_experts + 2), job.num_microbatches
    if job.dp > 1:
        found["AllReduce forward"] += 4 * m * with_experts * dims.router_sums
        # Outside a pipeline the sum of the tokens' loss is there once more: gradients are added by Add
        # (`runtime/by_mindspore/sums.py`).
        found["AllReduce backward"] += 4 * m * (dims.router_losses + (job.pp == 1)) * bool(with_experts)
    found["AllReduce optimizer"] += counted * with_experts * (job.dp * job.tp > 1)
    found["AllReduce optimizer"] += counted * dims.expert_layers * (job.devices > 1)
    return found


def _parameter_traffic(dims: Dimensions, job: Parallelism, stage: int) -> dict[str, float]:
    """Gradients reduced and sharded weights gathered: once a step, from ZeRO-2 gradients of each microbatch, with ZeRO-3
    weights for each, too.

    Of a batch taken at once MindSpore reduces the tied table's gradient once for each of its two uses, and with optimizer
    parallel over groups the whole gradients before they are sharded; of microbatches they add up and are sharded first, and
    so are all but a tied table's in float32 where weights are gathered again.
    """
    whole, tied = 4 * stage_parameters(dims, job)[stage], 4 * tied_words(dims, job, stage)
    uncut = 4 * _whole_words(dims, job, stage)
    at_once = job.num_microbatches == 1
    twice = 4 * dims.vocab_size * dims.hidden_size // job.tp if at_once and dims.tied_embedding else 0
    experts = 4 * expert_parameters(dims, job)[stage] if job.dp > job.ep else 0
    if not job.zero:
        copied = 4 * copied_parameters(dims, job)[stage] if job.tp > 1 else 0
        others = tied if stage > 0 else 0  # the first stage reduces the tied table for both
        return {"AllReduce optimizer": (whole + twice - others if job.replicas > 1 else copied) + experts}
    reduced: float = uncut + (twice if uncut > tied else 0)
    scatters, gathers = (job.num_microbatches if job.zero >= level else 1 for level in (2, 3))
    scattered = whole - uncut
    if scatters > 1 and uncut == tied:  # each of both stages scatters its gradient of the tied table
        scattered, reduced = whole, reduced - tied
    if job.shards < job.replicas:
        first = 0 if not at_once else whole if job.zero < 3 else twice * (job.activation_bytes == 4)
        reduced = max(first, uncut) + (whole - max(first, uncut)) // job.shards + twice * (first > 0)
    gathered = whole - uncut
    if job.activation_bytes < 4 and (job.zero == 3 or not at_once):  # what is cast for every microbatch is gathered so
        gathered = 2 * (gathered // 4 + _float32_parameters(dims, job, stage))
    if job.zero == 3:
        gathered += _gathered_again(dims, job, stage)
    return {
        "AllGather optimizer": (gathered + experts) * gathers,
        "ReduceScatter optimizer": (scattered + experts) * scatters,
        "AllReduce optimizer": reduced,
    }


def _gathered_again(dims: Dimensions, job: Parallelism, stage: int) -> int:
    """Bytes of weights that the backward pass gathers: those of layers but the biases of results that nobody needs again, and
    the head."""
    layers, norms = job.stages(dims.num_layers)[stage], dims.num_norms * dims.norm
    mlp = dims.mlp_bias and dims.always_used_ffn > 0
    unneeded = {"sequential": mlp, "parallel": mlp + dims.output_bias, "sandwich": 0}[dims.block] * dims.hidden_size
    others = layer_parameters(dims, job.tp) - norms - unneeded
    head = 0 if dims.value_head or stage != job.last_stage else dims.vocab_size * dims.hidden_size // job.tp
    return layers * (4 * norms + job.activation_bytes * others) + job.activation_bytes * head


def _float32_parameters(dims: Dimensions, job: Parallelism, stage: int) -> int:
    """Number of parameters that optimizer parallel shards on a stage and that are used in float32: norms and
    embedding tables."""
    layers = job.stages(dims.num_layers)[stage]
    table = dims.vocab_size * dims.hidden_size // job.tp
    words = table if stage == 0 and not _whole_words(dims, job, stage) else 0
    norms = layers * dims.num_norms * dims.norm + (dims.norm if stage == job.last_stage else 0)
    tables = dims.position_table * ((stage == 0) * min(dims.position_tables, 1))
    tables += dims.position_table * ((stage == job.last_stage) * max(dims.position_tables - 1, 0))
    return norms + tables + words
