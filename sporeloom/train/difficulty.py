# SPDX-License-Identifier: Apache-2.0
"""Difficulty of each sample of a dataset, for a curriculum: `sporeloom preprocess difficulty`."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import document_positions
from sporeloom.data.curriculum import AT_ONCE, DifficultyIndex, Metric, loss_by, sample_lengths, vocabulary_rarity
from sporeloom.data.packing import Arrangement, BestFit, Stream, save_packing
from sporeloom.data.token_file import TokenFile
from sporeloom.runtime.environment import prepare_environment


def write_difficulty(
    folder: Path,
    out: Path,
    metric: Metric,
    seq_len: int,
    packing: Literal["stream", "best-fit"],
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Write the index of all samples of a folder of token files. Returns a line to print about it.

    Args:
        checkpoint: of the reference model of the metric `loss`.

    Raises:
        ConfigError: no token files, too few tokens, a metric that says nothing of such samples, a model that does not fit.
    """
    if out.exists():
        raise ConfigError(f"{out}: is there already; remove it or give another name")
    if (metric == "loss") != (checkpoint is not None):
        raise ConfigError("--checkpoint is for --metric loss only")
    if metric == "seqlen" and packing == "stream":
        raise ConfigError(
            "--metric seqlen: all samples of a stream are of one length; --packing best-fit, or --seq-len-growth"
        )
    tokens = TokenFile(folder)
    with tempfile.TemporaryDirectory() as scratch:
        arrangement: Arrangement = Stream(tokens, seq_len)
        if packing == "best-fit":
            save_packing(tokens, seq_len, Path(scratch) / "packing.npz")
            arrangement = BestFit(tokens, seq_len, Path(scratch) / "packing.npz")
    if not arrangement.num_samples:
        raise ConfigError(f"{folder}: {tokens.info.num_tokens} tokens are fewer than one sample of {seq_len}")
    if metric == "seqlen":
        values = sample_lengths(arrangement)
    elif metric == "vocabularyrarity":
        values = vocabulary_rarity(tokens, arrangement)
    else:
        assert checkpoint
        values = _losses(tokens, arrangement, seq_len, checkpoint)
    DifficultyIndex(metric, seq_len, packing, tokens.info.content, values).save(out)
    quartiles = dict(zip(("least", "quarter", "half", "most"), np.quantile(values, (0, 0.25, 0.5, 1)), strict=True))
    return {"samples": len(values), **{name: round(float(value), 4) for name, value in quartiles.items()}}


def _losses(tokens: TokenFile, arrangement: Arrangement, seq_len: int, checkpoint: Path) -> NDArray[np.float64]:
    family, config = load_config(checkpoint)
    if problems := [
        f"{checkpoint}: {what}"
        for what, is_wrong in (
            (f"a model of {family}; the tokens are of {tokens.info.family}", family != tokens.info.family),
            (f"its context of {config.seq_len} is shorter than --seq-len {seq_len}", config.seq_len < seq_len),
            (
                f"{tokens.info.vocab_size} tokens are more than its {config.vocab_size}",
                config.vocab_size < tokens.info.vocab_size,
            ),
        )
        if is_wrong
    ]:
        raise ConfigError(problems)
    prepare_environment()
    ms, score = import_module("mindspore"), import_module("sporeloom.inference.score")
    alone = import_module("sporeloom.strategy.config").SINGLE_DEVICE
    engine = import_module("sporeloom.runtime.engine").Engine.start(alone)
    net = import_module("sporeloom.inference.model").load_model(checkpoint, family, config, engine.strategy)

    def losses(ids: NDArray[Any]) -> NDArray[Any]:
        inputs = np.zeros((AT_ONCE, seq_len), np.int32)  # one shape, one graph
        inputs[: len(ids)] = ids[:, :-1]
        positions = document_positions(inputs, config.eod_id)
        logits = engine.run(net, ms.Tensor(inputs), ms.Tensor(positions)).asnumpy().reshape(AT_ONCE, seq_len, -1)
        found: NDArray[Any] = score.negative_log_likelihood(logits[: len(ids)], ids[:, 1:])
        return found

    try:
        return loss_by(tokens, arrangement, seq_len, config.loss_ignore_id, losses)
    finally:
        engine.close()
