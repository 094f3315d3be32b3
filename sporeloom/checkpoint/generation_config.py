# SPDX-License-Identifier: Apache-2.0
"""The end tokens of a model folder's generation_config.json. What else such a file may hold (sampling, lengths) is not taken:
a text depends on its caller's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import read_json
from sporeloom.models.config import ModelConfig

GENERATION_CONFIG = "generation_config.json"
KEY = "eos_token_id"


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a generated text by the folder's file: one, a list, or none; none where there is no such
    file.

    Raises:
        ConfigError: unreadable, or no token ids of this vocabulary.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return ()
    document = read_json(path)
    given = document.mapping.get(KEY)
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ConfigError(
                f"{document.at((KEY,))}: {KEY} {token!r} is not a token of the model's vocabulary of {vocab_size}; give one "
                "id, a list of ids, or leave it out"
            )
    return tuple(dict.fromkeys(tokens))


def with_end_tokens(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model, stopping at the folder's end tokens as well as at those of its configuration.

    Raises:
        ConfigError: as `end_tokens`.
    """
    more = [token for token in end_tokens(folder, model.vocab_size) if token not in (model.eod_id, *model.stop_ids)]
    return dataclasses.replace(model, stop_ids=(*model.stop_ids, *more)) if more else model
