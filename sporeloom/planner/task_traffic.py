# SPDX-License-Identifier: Apache-2.0
"""Communication of tasks that differs from pretraining."""

from __future__ import annotations

from sporeloom.planner.closed_forms import collective_bytes, tied_words
from sporeloom.planner.dimensions import Dimensions, Parallelism
from sporeloom.planner.task import TrainedTask, adapter_parameters

NUMBERS_OF_TOKEN = 16
"""Maximum number of values that objectives sum over ranks: log-probabilities, masks, reported metrics; each 4
bytes."""


def objective_bytes(task: TrainedTask, dims: Dimensions, job: Parallelism) -> float:
    """Bytes of a step that an objective may add to each kind of collective: a few numbers of each token."""
    if task.name in ("pretraining", "sft"):
        return 0.0
    return 4 * NUMBERS_OF_TOKEN * job.num_microbatches * job.microbatch * dims.seq_len


def task_traffic(
    task: TrainedTask, dims: Dimensions, job: Parallelism, stage: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Minimum and maximum bytes of collectives that a device of a stage takes part in, by kind and phase, for one
    step.

    Without adapters both are `collective_bytes`, but for PPO's second head. Of frozen weights no gradients are reduced, and
    what lies below the first adapter of all need not be known: backward, the first layer and the embedding may send nothing.
    Each adapter may reduce what lies between its matrices, r numbers of a token, once forward and once backward.
    """
    whole = collective_bytes(dims, job, stage)
    tokens = job.num_microbatches * job.microbatch * dims.seq_len // job.cp
    if task.name == "ppo" and job.tp > 1 and job.sequence_parallel and stage == job.last_stage:
        for kind in ("AllGather forward", "ReduceScatter backward"):  # the critic's head gathers, too, in float32
            whole[kind] += 4 * tokens * dims.hidden_size
    if task.lora is None or task.model is None:
        return whole, whole
    adapters, layers = 4.0 * adapter_parameters(task, dims, job)[stage], job.stages(dims.num_layers)
    per_layer = task.lora.r * len(task.lora.targets(task.model)) / sum(layers)
    narrow = tokens * job.activation_bytes * per_layer * layers[stage] if job.tp > 1 else 0.0
    unknown = (2 * job.activation_bytes + 4) * tokens * dims.hidden_size if stage == 0 else 0
    for kind in ("Send backward", "Receive backward"):  # a frozen embedding table has no gradient
        if kind in whole:
            whole[kind] -= 4 * tied_words(dims, job, stage)
    least, most = dict(whole), dict(whole)
    for kind, size in whole.items():
        if kind in ("AllReduce backward", "AllGather backward", "ReduceScatter backward"):
            least[kind] = max(0.0, size - unknown)
        elif kind in ("AllReduce optimizer", "ReduceScatter optimizer"):
            least[kind], most[kind] = 0.0, adapters + NUMBERS_OF_TOKEN
        elif kind == "AllGather optimizer":
            most[kind] = size + adapters
    for phase in ("forward", "backward", "recompute"):
        kind = f"AllReduce {phase}"
        if phase != "recompute" or kind in whole:
            most[kind] = most.get(kind, 0.0) + narrow
    return least, most
