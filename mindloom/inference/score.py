# SPDX-License-Identifier: Apache-2.0
"""Logits and loss of given token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from mindloom.data.batch import document_positions
from mindloom.inference.model import load_model
from mindloom.models.config import ModelConfig
from mindloom.runtime.engine import Engine
from mindloom.strategy.config import SINGLE_DEVICE, Strategy


@dataclass(frozen=True)
class Score:
    """What a model says of token ids (B, N)."""

    logits: NDArray[np.float32]
    """(B, T, V), T = N or, where N is one more than the model's context, N - 1."""
    loss: float
    """Mean of -log p over the N - 1 ids that follow another, those after `loss_ignore_id` aside."""
    num_tokens: int
    """Ids the loss is taken over."""


def score(
    folder: Path,
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    ids: NDArray[np.integer[Any]],
    eod_id: int | None,
) -> Score | None:
    """Run the model over whole rows. `eod_id`: documents end there, attention and positions start anew; None: one a row.

    None on the ranks that do not hold the logits: all but the last stage's first.
    """
    engine = Engine(strategy)
    net = load_model(folder, family, config, strategy)
    logits = compute_logits(engine, net, ids[:, : config.seq_len], config.vocab_size, eod_id)
    if logits is None:
        return None
    total, num_tokens = _summed(logits, ids, config.loss_ignore_id)
    return Score(logits, total / max(1, num_tokens), num_tokens)


def mean_loss(
    folder: Path, family: str, config: ModelConfig, batches: Iterable[NDArray[np.integer[Any]]]
) -> tuple[float, int]:
    """Loss of many token ids (B, T+1), batch after batch on one device, and how many it is taken over; documents are
    told apart."""
    engine, net = Engine(SINGLE_DEVICE), load_model(folder, family, config, SINGLE_DEVICE)
    total, num_tokens = 0.0, 0
    for ids in batches:
        logits = compute_logits(engine, net, ids[:, :-1], config.vocab_size, config.eod_id)
        assert logits is not None
        summed, counted = _summed(logits, ids, config.loss_ignore_id)
        total, num_tokens = total + summed, num_tokens + counted
    return total / max(1, num_tokens), num_tokens


def _summed(logits: NDArray[np.float32], ids: NDArray[np.integer[Any]], ignored: int | None) -> tuple[float, int]:
    """-log p of the ids that follow another, those after `ignored` aside, added up; and how many."""
    inputs, labels = ids[:, :-1], ids[:, 1:]
    counted = inputs != ignored
    nll = negative_log_likelihood(logits[:, : labels.shape[1]], labels)
    return float((nll * counted).sum()), int(counted.sum())


def compute_logits(
    engine: Engine, net: nn.Cell, ids: NDArray[np.integer[Any]], vocab_size: int, eod_id: int | None
) -> NDArray[np.float32] | None:
    """Logits (B, T, V) of ids (B, T); None on the ranks that do not hold them."""
    tokens = ids.astype(np.int32)
    output = engine.run(net, Tensor(tokens), Tensor(document_positions(tokens, eod_id)))
    if not engine.is_log_rank:
        return None
    logits: NDArray[np.float32] = output.asnumpy().reshape(*tokens.shape, vocab_size)
    return logits


def negative_log_likelihood(logits: NDArray[np.float32], labels: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """-log softmax(logits)[label], (B, T), in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(shifted, labels[..., None].astype(np.int64), -1)[..., 0]
    return np.log(np.exp(shifted).sum(-1)) - picked
