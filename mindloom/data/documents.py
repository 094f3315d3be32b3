# SPDX-License-Identifier: Apache-2.0
"""Documents of a text file, and token samples packed from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindloom.data.tokenizer import Tokenizer
from mindloom.errors import ConfigError


def read_documents(path: Path) -> list[str]:
    """Texts of a `.jsonl` file (its `text` fields) or of a plain text file (blank lines between documents).

    Raises:
        ConfigError: missing, empty, not UTF-8, not JSON, or a line without `text`.
    """
    text = decode_text(path)
    if path.suffix == ".jsonl":
        documents = [document for _, document in json_lines(path, text, "text")]
    else:
        documents = text.replace("\r\n", "\n").split("\n\n")
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"{path}: holds no text")
    return documents


def decode_text(path: Path) -> str:
    """What a UTF-8 file holds.

    Raises:
        ConfigError: missing, unreadable, or not UTF-8.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None


def json_lines(path: Path, text: str, key: str) -> list[tuple[int, str]]:
    """(line number, the text under `key`) of each JSON object, one a line.

    Raises:
        ConfigError: lines that are not such objects.
    """
    found, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: not JSON: {error}")
            continue
        if not isinstance(value, dict) or not isinstance(value.get(key), str):
            keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            problems.append(f"{path}:{number}: no `{key}` field with a string; found: {keys}")
        else:
            found.append((number, value[key]))
    if problems:
        more = [f"{path}: and {len(problems) - 5} more lines like these"] if len(problems) > 5 else []
        raise ConfigError(problems[:5] + more)
    return found


def pack(documents: Iterable[str], tokenizer: Tokenizer, seq_len: int) -> NDArray[np.int32]:
    """Samples (N, seq_len+1): documents one after another, each closed by an end-of-document token.

    A sample begins with the last token of the one before, so that every token is predicted once.
    """
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document)
        ids.append(tokenizer.eod_id)
    count = (len(ids) - 1) // seq_len
    stream = np.asarray(ids[: count * seq_len + 1], np.int32)
    starts = np.arange(count)[:, None] * seq_len
    return stream[starts + np.arange(seq_len + 1)] if count else np.empty((0, seq_len + 1), np.int32)


class SampleOrder:
    """Which samples make up the batch of a step: a new shuffle every epoch, a function of seed and step alone."""

    def __init__(self, num_samples: int, batch_size: int, seed: int):
        assert num_samples >= batch_size, (num_samples, batch_size)
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed

    def batch(self, step: int) -> NDArray[np.int64]:
        """Indices of the samples of `step`, counted from 0. The remainder of an epoch that fills no batch is left out."""
        epoch, place = divmod(step, self.num_samples // self.batch_size)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]
