# SPDX-License-Identifier: Apache-2.0
"""Show the samples of any step of a run exactly as the model gets them."""

from __future__ import annotations

import dataclasses
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from sporeloom.core.command_line import option
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import counted
from sporeloom.core.numbers import Bounds, Natural
from sporeloom.data.loader import Loader
from sporeloom.data.token_file import TOKENS
from sporeloom.data.tokenizer import Tokenizer, token_text
from sporeloom.train.checks import check
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
    find: str | None = option(
        None, "list the steps and rows of the run whose inputs contain this text, instead of a step (default: none)"
    )
    json: bool = option(False, "print JSON")


def inspect(config: InspectConfig) -> dict[str, Any]:
    """Describe what `step` reads: the blend up to it, and for some rows of its batch source, text, positions and
    masks. With `find`: all rows of the run that contain a text.

    Raises:
        ConfigError: the run is not possible, or has no such step or row.
    """
    train = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    alone = TrainConfig(
        **{**train, "save_every": 0, "save_minutes": 0.0, "resume": False, "strategy": None, "data_budget": True}
    )
    run = check(alone, None)
    tokenizer, loader = prepare_data(run, 0)
    if config.find is not None:
        return _find(loader, tokenizer, config.find, config.steps)
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


def _find(loader: Loader, tokenizer: Tokenizer, text: str, steps: int) -> dict[str, Any]:
    """All rows of a run whose inputs contain a text within one document.

    Raises:
        ConfigError: the text is empty.
    """
    if not text:
        raise ConfigError("--find: an empty text is everywhere; give some characters")
    wanted = {text, unicodedata.normalize("NFKC", text)}  # SentencePiece normalizes, so its texts have other commas
    found = []
    for step in range(steps):
        for row, tokens in enumerate(loader.samples(step)[:, :-1]):
            if any(each in piece for piece in _texts(tokens, tokenizer) for each in wanted):
                dataset, _ = loader.source(step, row)
                found.append({"step": step + 1, "row": row, "dataset": dataset.name})
    return {"find": text, "steps": steps, "matches": found}


def _texts(tokens: Any, tokenizer: Tokenizer) -> list[str]:
    """Texts of the documents in some tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eod_id)
    pieces = [piece[piece != tokenizer.eod_id].tolist() for piece in np.split(tokens, ends + 1) if len(piece)]
    return list(map(tokenizer.decode, pieces))


def _documents(loader: Loader, step: int, row: int) -> list[dict[str, Any]]:
    """The documents that a row is made of: their numbers in the token files, counted from 0, and where those have them."""
    dataset, places = loader.source(step, row)
    tokens = dataset.tokens
    width, found = tokens.tokens.itemsize, []
    for start, stop in places.tolist():
        for document, first, end in tokens.documents_in(start, stop):
            place = {"document": document, "tokens": [first, end]}
            found.append({**place, "bytes": [width * start, width * (start + end - first)]})
            start += end - first
    return found


def _row(loader: Loader, tokenizer: Tokenizer, step: int, row: int) -> dict[str, Any]:
    drawn, batch, (_, length) = loader.drawn(step), loader.batch(step), loader.sizes.of_step(step)
    sample, part = divmod(row, loader.sizes.longest // length)
    dataset = loader.datasets[drawn.datasets[sample]]
    tokens = batch.tokens[row] - dataset.offset
    positions, weights = batch.positions[row], batch.loss_weights[row]
    ends = np.flatnonzero(tokens == tokenizer.eod_id)
    return {
        "row": row,
        "dataset": dataset.name,
        "file": str(dataset.tokens.folder / TOKENS),
        "documents": _documents(loader, step, row),
        "sample": int(drawn.samples[sample]),
        "part": part,
        "document_ends": len(ends),
        "trained": int((weights > 0).sum()),
        "text": f"{END}\n".join(_texts(tokens, tokenizer)) + (END if length - 1 in ends else ""),
        "tokens": tokens.tolist(),
        "labels": batch.labels[row].tolist(),
        "positions": positions.tolist(),
        "loss_weights": weights.tolist(),
        "pieces": [token_text(tokenizer, int(token)) for token in tokens],
    }


def _describe_documents(row: dict[str, Any]) -> list[str]:
    return [
        f"  document {part['document']}, tokens {part['tokens'][0]} to {part['tokens'][1] - 1}: {row['file']}, "
        f"bytes {part['bytes'][0]} to {part['bytes'][1] - 1}"
        for part in row["documents"]
    ]


def _describe_matches(found: dict[str, Any]) -> str:
    num_rows = counted(len(found["matches"]), "row contains", "rows contain")
    lines = [f"{num_rows} {found['find']!r}, of the steps 1 to {found['steps']}"]
    lines += [f"step {match['step']}, row {match['row']}, of {match['dataset']}" for match in found["matches"]]
    return "\n".join(lines)


def describe(found: dict[str, Any], as_tokens: bool) -> str:
    """Format the result of `inspect` as text."""
    if "find" in found:
        return _describe_matches(found)
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
            *_describe_documents(row),
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
