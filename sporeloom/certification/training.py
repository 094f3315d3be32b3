# SPDX-License-Identifier: Apache-2.0
"""Train a few steps with two optimizers, and write losses, norms, gradients and weights to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from sporeloom.core.files import write_atomically, write_text_atomically
from sporeloom.data.batch import dropout_keys, make_batch, mtp_targets
from sporeloom.models.adapters import LORA_B
from sporeloom.models.config import ModelConfig
from sporeloom.parallel.call import Call
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.runtime.calls import Arguments, calling
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.gather import gather_whole
from sporeloom.runtime.spmd.backend import Alteration, SpmdBackend
from sporeloom.strategy.config import Strategy
from sporeloom.tasks.example import task_arrays, task_network
from sporeloom.train.optim import BothOptimizers

STEPS = 5
LORA_B_START = 0.01
START_SCALE = 4.0
"""Factor of a proof for the initial weights of matrices. With the usual ones, a model attends to all tokens alike, and the
gradients of queries and keys are too small to show that they are wrong."""
RATES = {"AdamW": (1e-3, 0.0), "SGD": (0.0, 0.1)}


def decoder_batches(config: ModelConfig, batch_size: int, task: str = "pretraining") -> Iterator[list[Tensor]]:
    """Yield batches: random tokens in documents of several lengths, some outside the loss, and the inputs of a task."""
    rng = np.random.RandomState(0)
    for step in range(STEPS):
        samples = rng.randint(10, config.vocab_size, (batch_size, config.seq_len + 1))
        samples[rng.rand(*samples.shape) < 0.08] = config.eod_id
        samples[:3, 20:] = config.loss_ignore_id  # unequal in the shards of the batch
        batch = make_batch(samples, config.eod_id, config.loss_ignore_id)
        if config.num_domains > 1:  # the domain of a text is encoded in its ids
            domains = rng.randint(0, config.num_domains, (batch_size, 1), np.int32)
            batch = batch._replace(tokens=batch.tokens + domains * np.int32(config.vocab_size))
        inputs = task_arrays(task, batch, config.vocab_size, step)
        if config.num_mtp_layers and task in ("pretraining", "sft"):
            inputs += mtp_targets(batch, config.num_mtp_layers)
        if config.dropout_rate:
            inputs.append(dropout_keys(3, step * batch_size * config.seq_len, (batch_size, config.seq_len)))
        yield [Tensor(array) for array in inputs]


def train_decoder(
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    out: Path,
    batch_size: int,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    task: TrainedTask = PLAIN_TEXT,
    start_scale: float = 1.0,
    alteration: Alteration | None = None,
) -> tuple[Engine, Any]:
    """Train a family's model by `train_steps`. Returns the open engine and the report.

    Args:
        start_scale: factor of the initial weights of matrices.
    """

    def build() -> nn.Cell:
        net = task_network(family, config, task)
        for parameter in net.get_parameters():
            if (start := _start_of(parameter, start_scale)) is not None:
                parameter.set_data(Tensor(start))
        return net

    return train_steps(
        build,
        lambda: decoder_batches(config, batch_size, task.name),
        strategy,
        out,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        alteration=alteration,
    )


def _start_of(parameter: Parameter, scale: float) -> NDArray[Any] | None:
    """Initial values in place of the usual ones; None: the usual ones."""
    if parameter.name.endswith(LORA_B):  # zeros, which hide a wrong A
        return np.full(parameter.shape, LORA_B_START, np.float32)
    if scale == 1 or len(parameter.shape) < 2 or not parameter.requires_grad:
        return None
    return parameter.asnumpy() * np.float32(scale)


def train_steps(
    build: Callable[[], nn.Cell],
    batches: Callable[[], Iterator[list[Tensor]]],
    strategy: Strategy,
    out: Path,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    is_custom: bool = False,
    alteration: Alteration | None = None,
) -> tuple[Engine, Any]:
    """Train five steps with each optimizer from the same weights. Writes OUT.OPTIMIZER.json (losses, norms) and .npz: the
    gradients of the first step of AdamW, the weights after the last step of SGD. One device also writes how far each
    weight moved.

    Args:
        build: makes the network, which returns its loss.
        is_custom: whether the step runs as `auto_parallel` runs it: of the full batch, which the engine divides.
        alteration: changes to the program of every rank.

    Returns:
        The open engine and the report.
    """
    engine, parts = Engine.start(strategy), out.with_name(f"{out.name}.parts")
    if isinstance(engine.backend, SpmdBackend):
        engine.backend.alteration = alteration
    ms.set_seed(3)
    net = build()
    report = parallelize(net, strategy)
    own = {parameter.name for parameter in net.get_parameters()}
    optimizer = BothOptimizers(net.trainable_params(), strategy.optimizer_on_host)
    step = TrainStep(
        wrap(net, strategy, accumulate),
        optimizer,
        report,
        engine.rank,
        engine.all_reduce(),
        max_grad_norm=max_grad_norm,
        accumulate=accumulate,
    ).set_train()
    first = next(iter(batches()))
    ran = Call(step, calling(Arguments.of(first, {}))) if is_custom and strategy.mesh.size > 1 else step
    engine.prepare(ran, *first)
    start = {parameter.name: parameter.asnumpy().copy() for parameter in step.get_parameters()}
    for name in RATES:
        for parameter in step.get_parameters():
            parameter.set_data(Tensor(start[parameter.name]))
        values, tensors = _steps_of(
            name, step, ran, batches(), engine, lambda of: gather_whole(step, engine, report, parts, of)
        )
        if name == "SGD":
            if strategy.mesh.size == 1:
                values["moved"] = {p.name: _moved(p, start) for p in step.get_parameters() if p.name in own}
            tensors = gather_whole(step, engine, report, parts, own.__contains__)
        _write_results(out.with_name(f"{out.name}.{name}"), tensors, values if engine.is_log_rank else None)
    return engine, report


def _write_results(start: Path, tensors: Any, values: dict[str, Any] | None) -> None:
    """Write START.npz and START.json, each where this rank has what belongs there."""
    if tensors is not None:
        write_atomically(start.with_name(f"{start.name}.npz"), partial(_save_tensors, tensors))
    if values is not None:
        write_text_atomically(start.with_name(f"{start.name}.json"), json.dumps(values))


def _steps_of(
    name: str,
    step: TrainStep,
    ran: nn.Cell,
    batches: Iterator[list[Tensor]],
    engine: Engine,
    gather: Callable[[Callable[[str], bool]], Any],
) -> tuple[dict[str, Any], Any]:
    """Run all steps of one optimizer. Returns losses, norms and counts of experts, and with AdamW the first gradients."""
    losses, norms, counts, tensors = [], [], [], None
    for index, batch in enumerate(batches):
        for optimizer, rate in zip((step.optimizer.adam, step.optimizer.sgd), RATES[name], strict=True):
            optimizer.prepare(index + 1, rate)
        loss, norm, *counted = engine.run(ran, *batch)
        ends = np.cumsum(step.count_lengths)[:-1]
        counts += [[row.tolist() for row in np.split(array.asnumpy(), ends)] for array in counted]  # a row a layer
        losses.append(float(loss.asnumpy().reshape(())))
        norms.append(float(norm.asnumpy().reshape(())))
        if index == 0 and name == "AdamW":  # m = (1 - beta1) g after the first step
            tensors = gather(lambda n: n.startswith("adam_m."))
    return {"losses": losses, "norms": norms, **({"counts": counts} if counts else {})}, tensors


def _moved(parameter: Parameter, start: Mapping[str, NDArray[Any]]) -> float:
    """Largest change of an entry."""
    return float(np.abs(parameter.asnumpy() - start[parameter.name]).max(initial=0))


def _save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # by its name NumPy would add a suffix
        np.savez(file, **tensors)
