# SPDX-License-Identifier: Apache-2.0
"""Show the samples of any step of a run exactly as the model gets them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.core.numbers import Bounds, Natural
from sporeloom.data.loader import Loader
from sporeloom.data.tokenizer import Tokenizer, token_text
from sporeloom.train.config import check
from sporeloom.train.data import prepare_data
from sporeloom.train.plain_text import TrainConfig

Step = Annotated[int, Bounds(1, 10_000_000)]
END = "<end of document>"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(TrainConfig):
    """The flags of tools/train.py, and the step to show."""

    step: Step = option(1, "step of the run, counted from 1")
    rows: tuple[Natural, ...] = option((0,), "rows of its batch, counted from 0")
    tokens: bool = option(False, "print each token with its position and loss weight instead of the text")
    json: bool = option(False, "print JSON")


def inspect(config: InspectConfig) -> dict[str, Any]:
    """Describe what `step` reads: the blend up to it, and for some rows of its batch source, text, positions and
    masks.

    Raises:
        ConfigError: the run is not possible, or has no such step or row.
    """
    train = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    alone = TrainConfig(
        **{**train, "save_every": 0, "save_minutes": 0.0, "resume": False, "strategy": None, "data_budget": True}
    )
    run = check(alone, None)
    tokenizer, loader = prepare_data(run, 0)
    batch_size, length = run.sizes.of_step(config.step - 1)
    if wrong := [row for row in config.rows if not 0 <= row < batch_size]:
        raise ConfigError(f"--rows {wrong[0]}: step {config.step} has rows 0 to {batch_size - 1}")
    shares = loader.shares.before(config.step)
    return {
        "step": config.step,
        "sequences": batch_size,
        "seq_len": length,
        "tokens_before": loader.first_token(config.step - 1),
        "blend": [
            {"dataset": dataset.name, "weight": float(weight), "samples": int(count), "epochs": round(epochs, 4)}
            for dataset, weight, count, epochs in zip(
                loader.datasets, loader.shares.weights, shares, loader.epochs(config.step), strict=True
            )
        ],
        "rows": [_row(loader, tokenizer, config.step - 1, row) for row in config.rows],
    }


def _row(loader: Loader, tokenizer: Tokenizer, step: int, row: int) -> dict[str, Any]:
    drawn, batch, (_, length) = loader.drawn(step), loader.batch(step), loader.sizes.of_step(step)
    sample, part = divmod(row, loader.sizes.longest // length)
    dataset = loader.datasets[drawn.datasets[sample]]
    tokens = batch.tokens[row] - dataset.offset
    positions, weights = batch.positions[row], batch.loss_weights[row]
    ends = np.flatnonzero(tokens == tokenizer.eod_id)
    pieces = [piece[piece != tokenizer.eod_id].tolist() for piece in np.split(tokens, ends + 1) if len(piece)]
    return {
        "row": row,
        "dataset": dataset.name,
        "sample": int(drawn.samples[sample]),
        "part": part,
        "document_ends": len(ends),
        "trained": int((weights > 0).sum()),
        "text": f"{END}\n".join(map(tokenizer.decode, pieces)) + (END if length - 1 in ends else ""),
        "tokens": tokens.tolist(),
        "labels": batch.labels[row].tolist(),
        "positions": positions.tolist(),
        "loss_weights": weights.tolist(),
        "pieces": [token_text(tokenizer, int(token)) for token in tokens],
    }


def describe(found: dict[str, Any], as_tokens: bool) -> str:
    """Format the result of `inspect` as text."""
    lines = [
        f"step {found['step']}: {found['sequences']} sequences of {found['seq_len']} tokens, after "
        f"{found['tokens_before']:,} tokens",
        "blend up to and with this step:",
    ]
    total = sum(part["samples"] for part in found["blend"])
    lines += [
        f"  {part['dataset']}: {part['samples']:,} samples, {part['samples'] / total:.2%} (weight {part['weight']:.2%}), "
        f"{part['epochs']:.3f} epochs"
        for part in found["blend"]
    ]
    for row in found["rows"]:
        lines += [
            "",
            f"row {row['row']}: sample {row['sample']} of {row['dataset']}"
            + (f", part {row['part']}" if row["part"] else "")
            + f"; {counted(row['document_ends'], 'document ends', 'documents end')} in it; "
            + f"{row['trained']} of {found['seq_len']} tokens are trained on",
        ]
        if as_tokens:
            lines.append("  place  token  next   position  loss weight  text")
            columns = zip(
                row["tokens"], row["labels"], row["positions"], row["loss_weights"], row["pieces"], strict=True
            )
            lines += [
                f"  {place:5}  {token:5}  {label:5}  {position:8}  {weight:11.3e}  {piece!r}"
                for place, (token, label, position, weight, piece) in enumerate(columns)
            ]
        else:
            lines.append(row["text"])
    return "\n".join(lines)
