# SPDX-License-Identifier: Apache-2.0
"""Compute logits and loss of token ids under a checkpoint.

    sporeloom score --checkpoint out/latest/checkpoint --ids ids.npy --logits-out logits.npy

ids.npy holds (B, N) token ids; N may be one more than the model's context, the last column then being labels only.
Prints {"loss": ..., "num_tokens": ..., "shape": [...]} and writes the logits (B, T, V).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.checkpoint.model_folder import load_text_config, weight_problems
from sporeloom.core.command_line import Overwrite, check_numbers, option, output, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import check_regular, write_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import Natural
from sporeloom.models.family import family_module
from sporeloom.models.weight_formats import WEIGHTS_HELP, WeightName
from sporeloom.runtime.environment import launched_processes, prepare_environment
from sporeloom.strategy.checks import batch_problems, launch_problems, model_problems
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Overwrite):
    checkpoint: Path = option(..., "checkpoint folder")
    ids: Path = option(..., "NumPy file of token ids, (B, N)")
    logits_out: Path | None = output(None, "NumPy file to write the logits to, (B, T, V) (default: none)")
    eod_id: Natural | None = option(
        None, "end-of-document id, after which attention and positions start anew (default: none)"
    )
    weights: WeightName = option("float32", WEIGHTS_HELP)
    strategy: Path | None = option(None, "strategy file, or name of a built-in strategy (default: one device)")
    domain: Natural | None = option(None, "domain of all texts, for models with domain-routed experts (default: none)")


def read_ids(path: Path, vocab_size: int, seq_len: int) -> Any:
    try:
        check_regular(path)
        ids = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path}: not a NumPy file of numbers: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ConfigError(f"{path}: whole numbers of shape (B, N) are expected")
    if ids.shape[1] < 2 or ids.shape[1] > seq_len + 1:
        raise ConfigError(f"{path}: {ids.shape[1]} ids a row; the model takes 2 .. {seq_len + 1}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(f"{path}: ids {ids.min()} .. {ids.max()} are outside the vocabulary of {vocab_size}")
    return ids


def main(argv: Sequence[str]) -> int:
    config = parse_args(ScoreConfig, __doc__, argv)
    check_numbers(config)
    family, model = load_text_config(config.checkpoint)
    model = model.with_domain(config.domain)
    family_module(family, "config")
    ids = read_ids(config.ids, model.vocab_size, model.seq_len)
    strategy = load_strategy(config.strategy, for_inference=True) if config.strategy else SINGLE_DEVICE
    problems = launch_problems(strategy, launched_processes()) + model_problems(strategy, model)
    problems += weight_problems(config.weights, config.checkpoint, model, strategy.mesh.tp)
    if problems := problems + batch_problems(strategy, len(ids), min(ids.shape[1], model.seq_len), training=False):
        raise ConfigError(problems)
    prepare_environment()
    engine = import_module("sporeloom.runtime.engine").Engine.start(strategy)  # loads MindSpore
    of = config.checkpoint, family, model, config.weights
    scorer = import_module("sporeloom.inference.score").Scorer(engine, *of)
    result = scorer.score(ids, config.eod_id)
    if result is not None:
        if not math.isfinite(result.loss):
            raise ConfigError(f"{config.checkpoint}: the loss is {result.loss}: weights or arithmetic overflow")
        if config.logits_out:
            write_atomically(config.logits_out, lambda path: np.save(path.open("wb"), result.logits))
        print(json_text({"loss": result.loss, "num_tokens": result.num_tokens, "shape": list(result.logits.shape)}))
    return 0
