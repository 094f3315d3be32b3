# SPDX-License-Identifier: Apache-2.0
"""Pretraining on plain text: every token is predicted from those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom.data.examples import LineTokenizer
from sporeloom.data.loader import Loader
from sporeloom.data.megatron import MegatronLoader
from sporeloom.data.random_ltd import draw_kept
from sporeloom.data.streaming import StreamLoader
from sporeloom.tasks.samples import PromptSampler
from sporeloom.train.data import open_loader, tokenizer_path
from sporeloom.train.samples import Sampler
from sporeloom.train.task import Arrays, Task
from sporeloom.train.validation import HeldOut, TokenLosses, TokenSet
from sporeloom.train.validation_data import open_sets


class Pretraining(Task):
    """Batches of a blend of token files, or of Megatron-LM's files."""

    loader: Loader | MegatronLoader | StreamLoader
    step = 0
    """Number of steps done."""
    layer_tokens = 0
    """Number of tokens of all steps, counted once for each layer that processed them; with random-LTD."""

    def open_data(self) -> None:
        self.tokenizer, self.loader = open_loader(self.run, self.engine.rank)

    def validation_sets(self, net: nn.Cell) -> Mapping[str, HeldOut]:
        config: Any = self.run.config
        if not config.validation_data:
            return {}
        sets = open_sets(self.run, config, tokenizer_path(self.run), self.engine.rank)
        losses = TokenLosses(self.run, self.engine, net)
        return {
            name: TokenSet(losses, partial(windows.batches, config.batch_size), windows.tokens.info.content)
            for name, windows in sets.items()
        }

    def sampler(self, net: nn.Cell) -> Sampler | None:
        if self.run.config.sample_prompts is None:
            return None
        reading = LineTokenizer(self.tokenizer, False, self.run.model.stop_ids, {})
        return PromptSampler(self.run, self.engine, net, reading)

    def describe(self) -> str:
        told, dropping = self.loader.describe(self.run.config.steps), self.run.random_ltd
        return f"{told}\n{dropping.describe(self.run.sizes, self.run.config.steps)}" if dropping else told

    def data_state(self) -> dict[str, Any]:
        config: Any = self.run.config
        return {
            **self.loader.data_state(),
            "batch_size": config.batch_size,
            "batch_size_ramp": [*config.batch_size_ramp, config.ramp_unit] if config.batch_size_ramp else [],
            "seq_len": self.run.seq_len,
            "seq_len_growth": [*config.seq_len_growth],
            "seed": config.seed,
            "packing": config.packing,
            "random_ltd": self.run.random_ltd and dataclasses.asdict(self.run.random_ltd),
        }

    def sample_ids(self, step: int) -> Any:
        return self.loader.sample_ids(step)

    def batch(self, step: int) -> Sequence[NDArray[Any]]:
        return self.loader.batch(step)

    def inputs(self, step: int) -> Arrays:
        return self._with_kept(step, super().inputs(step))

    def shaped_inputs(self, step: int) -> Arrays:
        if not isinstance(self.loader, StreamLoader):
            return self.inputs(step)
        # Its text must not be read yet: the positions of a resumed run are restored later.
        arrays = self.with_mtp_targets([*self.loader.blank(step)])
        return self._with_kept(step, self.with_dropout_keys(step, arrays))

    def _with_kept(self, step: int, arrays: Arrays) -> Arrays:
        """Inputs of `step`, with the tokens that the layers keep where some are dropped."""
        dropping = self.run.random_ltd
        batch, length = self.run.sizes.of_step(step)
        if dropping and (kept := dropping.kept(step, length)) < length:
            rows, seed = self.loader.rows(batch), self.run.config.seed
            arrays += draw_kept(seed, step, dropping.layers, rows, (batch, length), kept)
        return arrays

    def shape(self, step: int) -> tuple[int, ...]:
        batch, length = self.run.sizes.of_step(step)
        kept = self.run.random_ltd.kept(step, length) if self.run.random_ltd else length
        return (batch, length) if kept == length else (batch, length, kept)

    def metrics(self, step: int, counts: NDArray[np.float32] | None) -> dict[str, Any]:
        dropping, sizes, self.step = self.run.random_ltd, self.run.sizes, step + 1
        if not dropping:
            return super().metrics(step, counts)
        self.layer_tokens += dropping.layer_tokens(step, sizes)
        return {"kept_tokens": dropping.kept(step, sizes.of_step(step)[1]), "consumed_layer_tokens": self.layer_tokens}

    def state(self) -> dict[str, Any]:
        streamed = self.loader.state(self.step) if isinstance(self.loader, StreamLoader) else {}
        return {"consumed_layer_tokens": self.layer_tokens} | streamed if self.run.random_ltd else streamed

    def restore(self, state: dict[str, Any]) -> None:
        self.layer_tokens = state.get("consumed_layer_tokens", 0)
        if isinstance(self.loader, StreamLoader):
            self.loader.restore(state)

    def first_token(self, step: int) -> int:
        return self.loader.first_token(step)


TASK = Pretraining
