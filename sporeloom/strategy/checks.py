# SPDX-License-Identifier: Apache-2.0
"""Check a strategy by itself, and against the launched processes, a model's dimensions and a batch; all problems
at once."""

from __future__ import annotations

import math

from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.core.numbers import Count, Positive, number_problem
from sporeloom.models.config import ModelConfig
from sporeloom.strategy.axes import AXES, PART_NAMES, ROWS
from sporeloom.strategy.config import V_SHAPED, Stages, Strategy
from sporeloom.strategy.listed_schedule import ListedSchedule
from sporeloom.strategy.stages import offloaded_layers, recomputed_layers

MAX_DEVICES = 1 << 24
RESHARD = "optimizer_parallel.reshard_after_forward"
OWN_GRAPHS = "remove `engine: mindspore`"
POSSIBLE_SIZES = "1, 2, 4 or a multiple of 8"
"""Possible numbers of devices of a job. Source: CheckDeviceConfig of MindSpore's device_manager.cc."""


def is_possible_size(devices: int) -> bool:
    return devices in (1, 2, 4) or devices % 8 == 0


def spans_tensor_parallel(strategy: Strategy) -> str:
    """Say why experts sharded over ranks of tp, too, are refused."""
    mesh = strategy.mesh
    return (
        f"{strategy.at('mesh.ep')} = {mesh.ep} reaches beyond mesh.dp = {mesh.dp} over tensor parallel ranks, which "
        "neither pipelines nor `engine: mindspore` support; use at most "
        f"{mesh.dp} (possible: {', '.join(map(str, divisors(mesh.dp)))})"
    )


def strategy_problems(strategy: Strategy) -> list[str]:
    """List the problems that do not depend on the model."""
    mesh, pipeline, problems = strategy.mesh, strategy.pipeline, []
    for axis in (*AXES, *PART_NAMES):
        if problem := number_problem(mesh.degree(axis), Count):
            problems.append(f"{strategy.at('mesh.' + axis)} {problem}, got {mesh.degree(axis)}")
    if not problems and mesh.ep > mesh.dp and mesh.dp * mesh.tp % mesh.ep == 0 == mesh.ep % mesh.dp:
        if not strategy.is_spmd or mesh.pp > 1:
            problems.append(spans_tensor_parallel(strategy))
    elif not problems and mesh.dp % mesh.ep:
        problems.append(
            f"{strategy.at('mesh.ep')} = {mesh.ep} does not divide mesh.dp = {mesh.dp}: experts are sharded "
            f"over a part of the replicas; possible: {', '.join(map(str, divisors(mesh.dp)))}"
        )
    if mesh.pp > 1 and mesh.order[0] != "pp":
        problems.append(f"{strategy.at('mesh.pp')} must be the outermost axis: write pp first")
    if mesh.size > MAX_DEVICES:
        problems.append(f"{strategy.at('mesh')}: {mesh} processes; there are at most {MAX_DEVICES:,}")
    elif not problems and not is_possible_size(mesh.size):
        problems.append(f"{strategy.at('mesh')}: {mesh} processes; MindSpore takes {POSSIBLE_SIZES}")
    if mesh.pp > 1 and pipeline.num_microbatches < mesh.pp:
        problems.append(
            f"{strategy.at('pipeline.num_microbatches')} = {pipeline.num_microbatches} is fewer than the "
            f"{mesh.pp} stages; use at least {mesh.pp} (4 x the stages keeps the idle share low)"
        )
    if mesh.pp == 1 and "pipeline" in strategy.lines:
        problems.append(f"{strategy.at('pipeline')} has no effect at mesh.pp = 1; remove it or raise mesh.pp")
    if isinstance(pipeline.stages, Stages):
        given = [("weights", pipeline.stages.weights), ("num_layers", pipeline.stages.num_layers)]
        given = [(name, values) for name, values in given if values is not None]
        if len(given) != 1:
            problems.append(f"{strategy.at('pipeline.stages')} takes either weights or num_layers")
        for name, values in given:
            if len(values or ()) != strategy.num_virtual_stages:
                parts = f"{mesh.pp} stages" + (f" x {pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else "")
                problems.append(f"{strategy.at('pipeline.stages.' + name)} has {len(values or ())} entries for {parts}")
            if problem := number_problem(values, list[Positive]):
                problems.append(f"{strategy.at('pipeline.stages.' + name)} {problem}, got {values}")
    return problems + _option_problems(strategy)


def _listed_problems(strategy: Strategy, listed: ListedSchedule) -> list[str]:
    """List where a schedule file and the strategy differ."""
    pipeline, name = strategy.pipeline, strategy.pipeline.schedule
    compared = [
        ("mesh.pp", strategy.mesh.pp, len(listed.orders), "rows, one for each stage"),
        ("pipeline.num_microbatches", pipeline.num_microbatches, listed.num_microbatches, "microbatches"),
        ("pipeline.virtual_stages", pipeline.virtual_stages, listed.virtual_stages, "parts of the model a row"),
    ]
    return [
        f"{strategy.at(key)} is {given}, and {name} has {found} {what}; both must be the same"
        for key, given, found, what in compared
        if given != found
    ]


def _option_problems(strategy: Strategy) -> list[str]:
    mesh, recompute, zero, problems = strategy.mesh, strategy.recompute, strategy.optimizer_parallel, []
    pipeline = strategy.pipeline
    if strategy.offload and not (strategy.offload.optimizer or strategy.offload.layers):
        problems.append(f"{strategy.at('offload')} moves nothing; give optimizer: true, or layers")
    if pipeline.listed:
        problems += _listed_problems(strategy, pipeline.listed)
    if pipeline.schedule in ("seqpipe", *V_SHAPED) and pipeline.virtual_stages == 1:
        problems.append(
            f"{strategy.at('pipeline.schedule')}: {pipeline.schedule} is for pipelines with virtual_stages; without them "
            "take 1f1b, gpipe or zero_bubble_h1"
        )
    if pipeline.schedule == "zero_bubble_h1" and pipeline.virtual_stages > 1:
        problems.append(
            f"{strategy.at('pipeline.virtual_stages')}: zero_bubble_h1 has no virtual stages; leave them out, or take "
            "zero_bubble_v or dualpipe_v"
        )
    if strategy.engine == "mindspore":
        problems += strategy.mindspore_problems()
    if pipeline.schedule in V_SHAPED and pipeline.virtual_stages > 1:
        if pipeline.virtual_stages != 2:
            problems.append(
                f"{strategy.at('pipeline.virtual_stages')}: {pipeline.schedule} has 2, got {pipeline.virtual_stages}"
            )
        if pipeline.num_microbatches < 2 * mesh.pp:
            problems.append(
                f"{strategy.at('pipeline.num_microbatches')} = {pipeline.num_microbatches}: {pipeline.schedule} "
                f"needs at least twice as many as the {mesh.pp} stages"
            )
    if pipeline.virtual_stages > 1 and strategy.micro_batch_interleave > 1:
        problems.append(
            f"{strategy.at('micro_batch_interleave')}: interleaved microbatches and pipeline.virtual_stages "
            "cannot be combined; leave out one"
        )
    if recompute and recompute.per_stage is not None:
        if len(recompute.per_stage) != mesh.pp:
            problems.append(
                f"{strategy.at('recompute.per_stage')} has {len(recompute.per_stage)} entries for {mesh.pp} stages"
            )
        if "recompute.layers" in strategy.lines:
            problems.append(f"{strategy.at('recompute')} takes either layers or per_stage")
    replicas, name = mesh.replicas, "mesh.dp x cp" if mesh.cp > 1 else "mesh.dp"
    if zero and replicas == 1:
        problems.append(f"{strategy.at('optimizer_parallel')} has no effect at mesh.dp = 1; remove it or raise mesh.dp")
    if zero and zero.shard_size is not None and (zero.shard_size < 2 or replicas % zero.shard_size):
        problems.append(
            f"{strategy.at('optimizer_parallel.shard_size')} = {zero.shard_size} must be at least 2 and divide "
            f"{name} = {replicas}; possible: {', '.join(str(d) for d in divisors(replicas) if d > 1)}"
        )
    if _reshards_by_mindspore(strategy):
        problems += _reshard_problems(strategy)
    if "context_parallel" in strategy.lines and mesh.cp == 1:
        problems.append(f"{strategy.at('context_parallel')} has no effect at mesh.cp = 1; remove it or raise mesh.cp")
    if strategy.sequence_parallel and mesh.tp == 1:
        problems.append(f"{strategy.at('sequence_parallel')} has no effect at mesh.tp = 1; remove it or raise mesh.tp")
    return problems


def _reshards_by_mindspore(strategy: Strategy) -> bool:
    return strategy.gathers_twice and strategy.engine == "mindspore"


def _reshard_problems(strategy: Strategy) -> list[str]:
    """List what MindSpore 2.9 cannot do with weights that are resharded after the forward pass."""
    at, recompute, problems = strategy.at(RESHARD), strategy.recompute, []
    if not recompute or recompute.kind != "full" or recompute.layers != "all" or recompute.per_stage is not None:
        problems.append(
            f"{at}: weights are gathered again for layers that are recomputed; write `recompute: {{layers: all}}`"
        )
    if strategy.mesh.pp > 1:
        problems.append(f"{at}: MindSpore does not compile it in a pipeline; leave it out, or mesh.pp")
    if strategy.micro_batch_interleave > 1:
        problems.append(f"{at}: it is not implemented for micro_batch_interleave; leave out one")
    if strategy.optimizer_parallel and strategy.optimizer_parallel.shard_accumulated_gradients:
        problems.append(f"{at} and shard_accumulated_gradients cannot be combined; leave out one")
    return problems


def launch_problems(strategy: Strategy, num_processes: int) -> list[str]:
    """Check the mesh against the number of launched processes."""
    if strategy.mesh.size == num_processes:
        return []
    started = counted(num_processes, "process was", "processes were")
    noun = "process" if strategy.mesh.size == 1 else "processes"
    return [
        f"{strategy.at('mesh')}: {strategy.mesh} {noun}, but {started} launched; change a degree or launch "
        f"{strategy.mesh.size}: msrun --worker_num={strategy.mesh.size} --local_worker_num={strategy.mesh.size} ..."
    ]


def model_problems(strategy: Strategy, config: ModelConfig) -> list[str]:
    """Check the mesh against the dimensions of a decoder."""
    problems = _size_problems(strategy, config)
    return problems + _layer_problems(strategy, config, bool(problems))


def _size_problems(strategy: Strategy, config: ModelConfig) -> list[str]:
    """Check heads, widths, vocabulary and experts against the axes that shard them."""
    mesh, sizes = strategy.mesh, sizes_of(config)
    problems = [
        f"{strategy.at(f'mesh.{axis.name}')} = {degree} does not divide {name} = {size}; {_nearest(size, degree)}"
        + f"; or give the model rows that no token uses: vocab_size {_padded(size, degree)}" * (name == "vocab_size")
        for axis in ROWS
        for name, size in sizes.items()
        if name in axis.divides and size % (degree := mesh.degree(axis.name))
    ]
    if config.num_heads % mesh.tp == 0 and config.kv_heads % mesh.tp and mesh.tp % config.kv_heads:
        problems.append(
            f"{strategy.at('mesh.tp')} = {mesh.tp} neither divides num_kv_heads = {config.kv_heads} nor is a multiple of it; "
            f"{_nearest(config.num_heads, mesh.tp, config.kv_heads)}"
        )
    heads = mesh.head_shards
    name, count = ("num_heads", config.num_heads) if config.latent else ("num_kv_heads", config.kv_heads)
    if mesh.cp > 1 and strategy.context_parallel == "ulysses" and count % heads:
        problems.append(
            f"{strategy.at('context_parallel')}: ulysses shards heads of keys and values over tp x cp = {heads}, which does "
            f"not divide {name} = {count}; use gather"
        )
    if mesh.cp > 1 and config.experts and not strategy.is_spmd:
        problems.append(
            f"{strategy.at('engine')}: MindSpore's partitioner does not shard experts over mesh.cp = {mesh.cp}; remove the "
            "line, or leave cp out"
        )
    if config.experts and _reshards_by_mindspore(strategy):
        problems.append(
            f"{strategy.at(RESHARD)}: MindSpore does not implement it for models with experts; {OWN_GRAPHS}"
        )
    if mesh.ep > 1 and not config.experts:
        problems.append(f"{strategy.at('mesh.ep')} = {mesh.ep}, but the model has no experts; leave it out")
    return problems


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """The sizes of a model that axes shard, by their names in its configuration (`Axis.divides`)."""
    sizes = {"num_heads": config.num_heads, "ffn_hidden_size": config.ffn_size, "vocab_size": config.vocab_size}
    if config.experts:
        sizes |= {
            "experts.ffn_hidden_size": config.expert_size,
            "experts.shared_ffn_hidden_size": config.experts.shared_ffn_hidden_size,
            "experts.num_experts": config.experts.num_experts,
        }
    return sizes


def _layer_problems(strategy: Strategy, config: ModelConfig, has_others: bool) -> list[str]:
    """Check layers against stages, recomputation and offloading. `has_others`: problems to be solved first."""
    mesh, problems = strategy.mesh, list[str]()
    if strategy.num_virtual_stages > config.num_layers:
        virtual = strategy.pipeline.virtual_stages
        problems.append(
            f"{strategy.at('mesh.pp')} = {mesh.pp} stages{f' x {virtual} virtual ones' if virtual > 1 else ''} are more than "
            f"the {config.num_layers} layers; use at most {config.num_layers}"
        )
    if mesh.pp > 1 and config.num_mtp_layers and not strategy.is_spmd:
        problems.append(
            f"{strategy.at('engine')}: multi-token prediction (num_mtp_layers {config.num_mtp_layers}) in the last of "
            f"mesh.pp = {mesh.pp} stages uses the embedding of the first, which MindSpore does not compile; remove the line, "
            "leave pp out, or give num_mtp_layers 0"
        )
    stages = strategy.pipeline.stages
    if isinstance(stages, Stages) and stages.num_layers and sum(stages.num_layers) != config.num_layers:
        problems.append(
            f"{strategy.at('pipeline.stages.num_layers')} adds up to {sum(stages.num_layers)}, "
            f"but the model has {config.num_layers} layers"
        )
    for key, part in (("recompute", strategy.recompute), ("offload", strategy.offload)):
        for layer in part.layers if part and isinstance(part.layers, list) else []:
            if layer >= config.num_layers:
                problems.append(
                    f"{strategy.at(f'{key}.layers')}: layer {layer} does not exist; the last is {config.num_layers - 1}"
                )
    both = {*offloaded_layers(config.num_layers, strategy)} & {*recomputed_layers(config.num_layers, strategy)}
    if not (has_others or problems) and both and strategy.recompute and strategy.recompute.kind == "full":
        problems.append(
            f"{strategy.at('offload.layers')}: layer {min(both)} is recomputed, so none of its activations are "
            "kept to be moved; leave it out of offload or of recompute"
        )
    return problems


def batch_problems(
    strategy: Strategy, batch_size: int, seq_len: int, accumulate: int = 1, training: bool = True
) -> list[str]:
    """Check the mesh against the number and the length of the sequences in a step. Inference has no microbatches."""
    mesh = strategy.mesh
    microbatches, copies = strategy.num_microbatches(accumulate), strategy.micro_batch_interleave
    if not training:
        microbatches, copies = accumulate, 1
    parts = microbatches * copies * mesh.dp
    problems = []
    if mesh.pp > 1 and accumulate > 1:
        problems.append(
            f"{strategy.at('pipeline')}: a pipeline accumulates over its num_microbatches = {microbatches}; "
            f"raise that instead of accumulating {accumulate} times more"
        )
    if accumulate > 1 and _reshards_by_mindspore(strategy):
        problems.append(
            f"{strategy.at(RESHARD)}: MindSpore takes one microbatch a step with it, not {accumulate}; {OWN_GRAPHS}"
        )
    if batch_size % parts:
        lower = batch_size // parts * parts
        nearest = " or ".join(str(size) for size in (lower, lower + parts) if size)
        problems.append(
            f"{strategy.at('mesh.dp')}: a batch of {batch_size} sequences is not divisible by dp {mesh.dp}"
            + (f" x {microbatches} microbatches" if microbatches > 1 else "")
            + (f" x {copies} interleaved microbatches (micro_batch_interleave)" if copies > 1 else "")
            + (f" = {parts}" if parts > mesh.dp else "")
            + f"; use {nearest}"
        )
    elif strategy.sequence_parallel and batch_size // parts * seq_len // mesh.cp % mesh.tp:
        problems.append(
            f"{strategy.at('sequence_parallel')}: {batch_size // parts} sequences of {seq_len // mesh.cp} tokens are not "
            f"divisible by tp {mesh.tp}"
        )
    if seq_len % mesh.cp:
        problems.append(f"{strategy.at('mesh.cp')}: sequences of {seq_len} tokens are not divisible by cp {mesh.cp}")
    return problems


def adapter_problems(strategy: Strategy) -> list[str]:
    """List the settings that need the training of all weights."""
    problem = f"{strategy.at(RESHARD)}: MindSpore does not implement it for adapters (LoRA); {OWN_GRAPHS}"
    return [problem] if _reshards_by_mindspore(strategy) else []


def state_problems(strategy: Strategy) -> list[str]:
    """List the settings that need optimizer states in float32."""
    flag, problems = "--optimizer-state-dtype bfloat16", []
    if strategy.mesh.size > 1 and not strategy.is_spmd:
        problems.append(
            f"{strategy.at('engine')}: {flag} is for engine: spmd, not for MindSpore's partitioner; change either"
        )
    if strategy.optimizer_on_host:
        problems.append(
            f"{strategy.at('offload.optimizer')}: moments in the host's memory are float32; leave out {flag} or it"
        )
    return problems


def check_own_network(strategy: Strategy) -> None:
    """Refuse settings that work for the model families only.

    Raises:
        ConfigError: the strategy has it.
    """
    if strategy.engine == "mindspore":
        raise ConfigError(
            f"{strategy.at('engine')}: MindSpore's partitioner is for the model families only: it computes wrong gradients "
            "of some custom networks without a message; remove the line"
        )
    if strategy.optimizer_on_host:
        raise ConfigError(
            f"{strategy.at('offload.optimizer')}: the optimizer of a custom training script cannot be moved; "
            'leave it out, and see its own `target = "CPU"` in MindSpore'
        )
    if strategy.micro_batch_interleave > 1:
        raise ConfigError(
            f"{strategy.at('micro_batch_interleave')}: interleaved microbatches are for tools/train.py, whose "
            "losses add up; remove it for a custom network, whose loss may be a mean"
        )


def group_problems(
    strategy: Strategy, config: ModelConfig, batch_size: int, seq_len: int, accumulate: int = 1
) -> list[str]:
    """Check the groups of tokens in which expert capacity is counted against a rank's tokens of a microbatch."""
    if not config.experts:
        return []
    group, parts, cp = config.experts.capacity_group or seq_len, strategy.num_parts(accumulate), strategy.mesh.cp
    tokens = batch_size // (parts * strategy.mesh.dp) * seq_len
    if cp > 1 and tokens % (group * cp):
        return [
            f"{strategy.at('mesh.cp')} = {cp}: expert capacity is counted in groups of {group} tokens, which do not divide "
            f"the {tokens / cp:g} that a rank has of a microbatch; write experts.capacity_group "
            f"{math.gcd(tokens // cp, group)}, or leave cp out"
        ]
    if tokens % group == 0:
        return []
    return [
        f"{strategy.at('mesh.dp')}: experts.capacity_group = {group} tokens do not divide the {tokens} that a "
        f"rank has of a microbatch ({batch_size} sequences of {seq_len} over dp {strategy.mesh.dp} x {parts}); "
        "leave capacity_group out to count in sequences"
    ]


def divisors(number: int) -> list[int]:
    """Divisors of `number`, from 1 to the number itself."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts


def _nearest(size: int, wanted: int, kv_heads: int | None = None) -> str:
    possible = [d for d in divisors(size) if not kv_heads or d % kv_heads == 0 or kv_heads % d == 0]
    lower = max((d for d in possible if d < wanted), default=None)
    upper = min((d for d in possible if d > wanted), default=None)
    return "nearest that do: " + " and ".join(str(d) for d in (lower, upper) if d is not None)
