# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, model, engine, one step after another, metrics, checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from mindloom.checkpoint.io import save_checkpoint
from mindloom.data.batch import make_batch
from mindloom.data.documents import SampleOrder, pack
from mindloom.data.tokenizer import Tokenizer, content_hash, load_tokenizer
from mindloom.errors import ConfigError
from mindloom.family import family_module
from mindloom.files import made_once, write_atomically
from mindloom.log import milestone
from mindloom.parallel.parallelize import parallelize, wrap
from mindloom.parallel.report import Report
from mindloom.parallel.step import TrainStep
from mindloom.runtime.engine import Engine
from mindloom.runtime.gather import gather_whole
from mindloom.train.config import Run
from mindloom.train.metrics import MetricsWriter, StepMetrics
from mindloom.train.optim import SGD, AdamW
from mindloom.train.schedules import learning_rate


@dataclass
class Training:
    """Everything that one run holds while it goes on."""

    run: Run
    engine: Engine
    report: Report
    step: TrainStep
    optimizer: AdamW | SGD
    samples: NDArray[np.int32]
    order: SampleOrder

    def batch(self, index: int) -> list[Tensor]:
        """Inputs of step `index`, counted from 0: the whole batch, on every rank."""
        samples = self.samples[self.order.batch(index)]
        return [Tensor(a) for a in make_batch(samples, self.run.model.eod_id, self.run.model.loss_ignore_id)]


def train(run: Run) -> Path:
    """Train as `run` says. Returns the checkpoint folder."""
    config = run.config
    engine = Engine(run.strategy)
    net = _build_network(run)
    report = parallelize(net, run.strategy)  # before the data: it may find mistakes, and nothing is written yet
    tokenizer, samples = _prepare_data(run, engine)
    training = _build_step(run, engine, net, report, samples)
    say = milestone if engine.speaks else lambda _: None
    if engine.rank == 0:
        _write_resolved(run, training.report)
    say(f"{config.model} {config.size}: {run.model.num_parameters:,} parameters on {run.strategy.mesh}")
    start = time.perf_counter()
    engine.prepare(training.step, *training.batch(0))
    say(f"compiled in {time.perf_counter() - start:.1f} s")
    if engine.speaks:
        with MetricsWriter(config.output_dir, config.steps) as writer:
            first, last = _loop(training, writer)
        say(f"loss {first.loss:.4f} -> {last.loss:.4f} in {config.steps} steps")
    else:
        _loop(training, None)
    _save(training, tokenizer)
    say(f"checkpoint in {config.checkpoint_dir}")
    return config.checkpoint_dir


def _prepare_data(run: Run, engine: Engine) -> tuple[Tokenizer, NDArray[np.int32]]:
    """Tokenizer and packed samples, made by rank 0 under names that say what they were made of."""
    config, module = run.config, family_module(run.config.model, "tokenizer")
    folder = config.output_dir / "data"
    content = hashlib.sha256("\x00".join(run.documents).encode())
    first = engine.rank == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    path = config.tokenizer
    if path is None:
        name = Path(module.Tokenizer.file_name)
        path = folder / f"{name.stem}-{content.hexdigest()[:16]}-{run.model.vocab_size}{name.suffix}"

        def train_tokenizer(partial: Path) -> None:
            partial.write_bytes(module.train_tokenizer(run.documents, run.model.vocab_size))

        made_once(path, first, train_tokenizer)
    tokenizer = load_tokenizer(config.model, path, run.model)
    if tokenizer.eod_id != run.model.eod_id:
        raise ConfigError(
            f"{path}: this tokenizer ends documents with token {tokenizer.eod_id}, the model with eod_id "
            f"{run.model.eod_id}; set eod_id and loss_ignore_id in --config"
        )
    content.update(content_hash(path).encode())
    samples_path = folder / f"samples-{content.hexdigest()[:16]}-{run.seq_len}.npy"

    def tokenize(partial: Path) -> None:
        with partial.open("wb") as file:
            np.save(file, pack(run.documents, tokenizer, run.seq_len))

    samples: NDArray[np.int32] = np.load(made_once(samples_path, first, tokenize), mmap_mode="r")
    if len(samples) < config.batch_size:
        raise ConfigError(
            f"{config.data}: {len(samples)} sequences of {run.seq_len} tokens are fewer than --batch-size "
            f"{config.batch_size}; give more text, a smaller batch or a smaller --seq-len"
        )
    return tokenizer, samples


def _build_network(run: Run) -> nn.Cell:
    ms.set_seed(run.config.seed)
    return family_module(run.config.model, "model").ModelWithLoss(run.model)


def _build_step(run: Run, engine: Engine, net: nn.Cell, report: Report, samples: NDArray[np.int32]) -> Training:
    config = run.config
    optimizer = _optimizer(run, net)
    step = TrainStep(
        wrap(net, run.strategy, config.accumulate),
        optimizer,
        report,
        engine.rank,
        engine.all_reduce(),
        max_grad_norm=config.max_grad_norm or None,
        accumulate=config.accumulate,
    )
    order = SampleOrder(len(samples), config.batch_size, config.seed)
    return Training(run, engine, report, step.set_train(), optimizer, samples, order)


def _optimizer(run: Run, net: nn.Cell) -> AdamW | SGD:
    if run.config.optimizer == "sgd":
        return SGD(net.trainable_params())
    return AdamW(
        net.trainable_params(),
        weight_decay=run.config.weight_decay,
        bias_correction=run.config.optimizer == "adamw",
    )


def _loop(training: Training, writer: MetricsWriter | None) -> tuple[StepMetrics, StepMetrics]:
    """All steps. Returns the first and the last one's metrics, as this rank knows them."""
    run, engine, first, last = training.run, training.engine, None, None
    for index in range(run.config.steps):
        start = time.perf_counter()
        rate = learning_rate(index + 1, run.learning_rate, run.min_learning_rate, run.warmup_steps, run.decay_steps)
        training.optimizer.prepare(index + 1, rate)
        loss, norm = engine.run(training.step, *training.batch(index))
        values = float(loss.asnumpy().reshape(())), float(norm.asnumpy().reshape(()))
        seconds = time.perf_counter() - start
        tokens = run.config.batch_size * run.seq_len
        last = StepMetrics(index + 1, values[0], rate, values[1], seconds, tokens / seconds)
        first = first or last
        if writer:
            writer.write(last)
        engine.announce_step(index + 1)
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"step {index + 1}: loss {values[0]}, gradient norm {values[1]}; lower --learning-rate"
            )
    assert first and last
    return first, last


def _save(training: Training, tokenizer: Tokenizer) -> None:
    run = training.run
    weights = {parameter.name for parameter in training.report.parameters}
    parts_folder = run.config.output_dir / ".checkpoint_parts"
    whole = gather_whole(training.step, training.engine, training.report, parts_folder, weights.__contains__)
    if whole is not None:
        named = {name.removeprefix("model."): value for name, value in whole.items()}
        save_checkpoint(run.config.checkpoint_dir, named, run.config.model, run.model, tokenizer)


def _write_resolved(run: Run, report: Report) -> None:
    """What the run really used, beside its metrics."""
    values: dict[str, Any] = {
        "train": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(run.config).items()},
        "model": run.model.to_dict(),
        "strategy": {k: v for k, v in dataclasses.asdict(run.strategy).items() if k not in ("rules", "lines")},
        "resolved": {
            name: getattr(run, name)
            for name in ("seq_len", "learning_rate", "min_learning_rate", "warmup_steps", "decay_steps")
        },
        "versions": {"mindspore": ms.__version__, "numpy": np.__version__},
        "parallel": report.to_dict(),
    }
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    write_atomically(run.config.output_dir / "config.json", lambda path: _write(path, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
