# SPDX-License-Identifier: Apache-2.0
"""Logits and loss of given token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from sporeloom.core import elementary
from sporeloom.data.batch import document_positions
from sporeloom.inference.model import load_model
from sporeloom.models.config import ModelConfig
from sporeloom.models.weight_formats import WeightName
from sporeloom.runtime.engine import Engine


@dataclass(frozen=True)
class Score:
    """Logits and loss of token ids (B, N)."""

    logits: NDArray[np.float32]
    """(B, T, V), T = N or, where N is one more than the model's context, N - 1."""
    loss: float
    """Mean of -log p over the N - 1 ids that follow another, without those after `loss_ignore_id`."""
    num_tokens: int
    """Number of ids in the mean."""


class Scorer:
    """A checkpoint's model, opened once, that computes the loss of token ids. All ranks make the same calls."""

    def __init__(self, engine: Engine, folder: Path, family: str, config: ModelConfig, weights: WeightName = "float32"):
        self.engine, self.config = engine, config
        self.net = load_model(folder, family, config, engine.strategy, weights=weights)

    def logits(self, ids: NDArray[np.integer[Any]], eod_id: int | None) -> NDArray[np.float32] | None:
        """Logits (B, T, V) of ids (B, T); None on ranks without logits: all but the last stage's first.

        `eod_id`: documents end there, attention and positions start anew; None: one a row.
        """
        tokens = ids.astype(np.int32)
        output = self.engine.run(self.net, Tensor(tokens), Tensor(document_positions(tokens, eod_id)))
        if not self.engine.is_log_rank:
            return None
        logits: NDArray[np.float32] = output.asnumpy().reshape(*tokens.shape, self.config.vocab_size)
        return logits

    def score(self, ids: NDArray[np.integer[Any]], eod_id: int | None) -> Score | None:
        """Logits and loss of ids (B, N); None where `logits` returns None."""
        logits = self.logits(ids[:, : self.config.seq_len], eod_id)
        if logits is None:
            return None
        total, num_tokens = _summed(logits, ids, self.config.loss_ignore_id)
        return Score(logits, total / max(1, num_tokens), num_tokens)

    def mean_loss(self, batches: Iterable[NDArray[np.integer[Any]]]) -> tuple[float, int]:
        """Loss of many token ids (B, T+1), batch after batch, and the number of ids in it; attention does not
        cross documents."""
        total, num_tokens = 0.0, 0
        for ids in batches:
            found = self.score(ids, self.config.eod_id)
            assert found is not None
            total, num_tokens = total + found.loss * found.num_tokens, num_tokens + found.num_tokens
        return total / max(1, num_tokens), num_tokens


def _summed(logits: NDArray[np.float32], ids: NDArray[np.integer[Any]], ignored: int | None) -> tuple[float, int]:
    """Sum of -log p of the ids that follow another, without those after `ignored`; and their number."""
    inputs, labels = ids[:, :-1], ids[:, 1:]
    counted = inputs != ignored
    nll = negative_log_likelihood(logits[:, : labels.shape[1]], labels)
    return float((nll * counted).sum()), int(counted.sum())


def negative_log_likelihood(logits: NDArray[np.float32], labels: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """-log softmax(logits)[label], (B, T), in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(shifted, labels[..., None].astype(np.int64), -1)[..., 0]
    return elementary.log(elementary.exp(shifted).sum(-1)) - picked
