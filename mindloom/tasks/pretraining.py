# SPDX-License-Identifier: Apache-2.0
"""Plain text: every token is learned from those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mindloom.data.loader import Loader
from mindloom.train.data import describe, prepare_data
from mindloom.train.task import Task


class Pretraining(Task):
    """Batches of a blend of token files."""

    loader: Loader

    def open_data(self) -> None:
        self.tokenizer, self.loader = prepare_data(self.run, self.engine.rank)

    def describe(self) -> str:
        return describe(self.loader, self.run.config.steps)

    def data_state(self) -> dict[str, Any]:
        config: Any = self.run.config
        return {
            "datasets": [f"{d.tokens.info.content[:16]} x {d.weight:.6g}" for d in self.loader.datasets],
            "batch_size": config.batch_size,
            "batch_size_ramp": [*config.batch_size_ramp, config.ramp_unit] if config.batch_size_ramp else [],
            "seq_len": self.run.seq_len,
            "seq_len_growth": [*config.seq_len_growth],
            "seed": config.seed,
        }

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        return self.loader.batch(step)

    def first_token(self, step: int) -> int:
        return self.loader.first_token(step)


TASK = Pretraining
