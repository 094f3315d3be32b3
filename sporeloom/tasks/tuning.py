# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tasks that tune a base model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from sporeloom.data.batch import Batch
from sporeloom.data.examples import Line, LineTokenizer, identity, read_lines
from sporeloom.data.sample_order import epoch_samples
from sporeloom.tasks.samples import PromptSampler
from sporeloom.train.flags import ValidationFlags
from sporeloom.train.samples import Sampler
from sporeloom.train.task import Task
from sporeloom.train.tuning import open_reading, open_tokenizer
from sporeloom.train.validation_data import named_paths


class Tuning(Task):
    """Reads lines of examples. Subclasses set `num_samples` in `open_data`."""

    num_samples: int
    """The data that `samples` draws from."""
    text: str
    """Text for `describe`."""
    net: nn.Cell
    """Model and loss, as `network` made them."""

    @property
    def config(self) -> Any:
        return self.run.config

    def network(self) -> nn.Cell:
        self.net = super().network()
        return self.net

    def reading(self, learn_all: bool = False) -> LineTokenizer:
        """Open the tokenizer, and read the data with it."""
        self.tokenizer = open_tokenizer(self.run)
        return open_reading(self.run, self.tokenizer, learn_all)

    def describe(self) -> str:
        steps, size = self.config.steps, self.config.batch_size
        return f"{self.config.data}: {self.text}; {steps * size / self.num_samples:.2f} epochs"

    def data_state(self) -> dict[str, Any]:
        return {
            "lines": lines_hash(self.run.data),
            "batch_size": self.config.batch_size,
            "seq_len": self.run.seq_len,
            "seed": self.config.seed,
            **({"chat_template_kwargs": variables} if (variables := self.config.template_variables()) else {}),
        }

    def samples(self, step: int, count: int | None = None) -> NDArray[np.int64]:
        """Numbers of the samples of a step: all once an epoch, in an order of its own."""
        count = self.config.batch_size if count is None else count
        key = int.from_bytes(hashlib.sha256(f"{self.config.seed} samples".encode()).digest()[:8], "big")
        return epoch_samples(step * count, count, self.num_samples, key)

    def sample_ids(self, step: int) -> Any:
        return self.samples(step).tolist()

    def held_out_lines(self) -> dict[str, tuple[Path, list[Line]]]:
        """Names of the validation sets -> path and lines; none where the run has none."""
        config = self.config
        sets = named_paths(config.validation_data) if isinstance(config, ValidationFlags) else {}
        return {name: (path, read_lines(path, config.wanted)) for name, path in sets.items()}

    def sampler(self, net: nn.Cell) -> Sampler | None:
        if self.config.sample_prompts is None:
            return None
        return PromptSampler(self.run, self.engine, net, open_reading(self.run, self.tokenizer))

    def evaluated(self, net: nn.Cell, batch: Batch, parts: int = 1) -> NDArray[np.float32]:
        """Output of a network with an objective for each token, by its present weights, on all ranks: (B, parts *
        T)."""
        was_training = net.training
        net.set_train(False)
        try:
            output = self.engine.run(net, *map(Tensor, batch))
        finally:
            net.set_train(was_training)
        source = self.run.strategy.mesh.first_rank_of_last_stage
        shape = (batch.tokens.shape[0], parts * batch.tokens.shape[1])
        values = output.asnumpy().reshape(shape) if self.engine.rank == source else np.zeros(shape, np.float32)
        return self.engine.broadcast(values.astype(np.float32), source)


def lines_hash(lines: Sequence[Line]) -> str:
    """Identity of lines."""
    return hashlib.sha256(identity(lines).encode()).hexdigest()[:16]


def batches_of(items: Sequence[Any], size: int, make: Callable[[Sequence[Any]], Batch]) -> Iterator[tuple[int, Batch]]:
    """Iterate over all items in batches, the last one filled up with the first item: (number of real items,
    batch)."""
    for start in range(0, len(items), size):
        part = list(items[start : start + size])
        yield len(part), make(part + [items[0]] * (size - len(part)))
