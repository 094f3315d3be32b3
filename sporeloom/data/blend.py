# SPDX-License-Identifier: Apache-2.0
"""The token files of a run, with their weights: a folder, or a YAML file that blends several.

    datasets:
      - {path: tokens/books, weight: 0.7}      # relative to this file
      - {path: tokens/code, weight: 0.3, domain: 1}     # where the model's experts have domains

or, without weights, `temperature: 2`: a dataset's share is its number of tokens to the power of 1/2. 1 is proportional, and
the higher, the more equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.document import Keys
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Natural, Positive
from sporeloom.core.reader import Reader, read_yaml
from sporeloom.data.token_file import TokenFile

KEYS, DATASET_KEYS = ("datasets", "temperature"), ("path", "weight", "domain")
BLENDS = (".yaml", ".yml")


@dataclass(frozen=True)
class BlendEntry:
    """One dataset of a blend."""

    name: str
    tokens: TokenFile
    weight: float
    """Fraction of the samples."""
    domain: int | None = None
    """Domain of its text, if the file gives one."""


def read_blend(path: Path) -> list[BlendEntry]:
    """Read the datasets of a blend; their weights add up to 1. All must have the same tokenizer.

    Raises:
        ConfigError: everything that is wrong with the file, or with the token files it names.
    """
    if path.suffix not in BLENDS:
        return [BlendEntry(str(path), TokenFile(path), 1.0)]
    entries, temperature = _read(path)
    problems, files = list[str](), dict[str, TokenFile]()
    for entry in entries:
        try:
            files[entry["path"]] = TokenFile(path.parent / entry["path"])
        except ConfigError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    weights = [
        float(e["weight"]) if temperature is None else files[e["path"]].info.num_tokens ** (1 / temperature)
        for e in entries
    ]
    parts = [
        BlendEntry(e["path"], files[e["path"]], w / sum(weights), e.get("domain"))
        for e, w in zip(entries, weights, strict=True)
    ]
    first = parts[0]
    for part in parts[1:]:
        if part.tokens.info.tokenizer != first.tokens.info.tokenizer:
            problems.append(f"{path}: {part.name} was made with another tokenizer than {first.name}")
    if problems:
        raise ConfigError(problems)
    return parts


def short_datasets(parts: Sequence[BlendEntry], seq_len: int) -> list[str]:
    """List the datasets that have no sample of this length."""
    problems = []
    for part in parts:
        info = part.tokens.info
        if info.record_length and info.record_length != seq_len + 1:
            problems.append(
                f"{part.name}: contains records of {info.record_length} tokens; use --seq-len {info.record_length - 1}"
            )
        elif not part.tokens.num_samples(seq_len):
            problems.append(
                f"{part.name}: {info.num_tokens} tokens give no sequence of {seq_len} tokens and one to predict"
            )
    return problems


def _read(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    document = read_yaml(path)
    reader, values = Reader(document), document.mapping
    given = reader.known(values, (), KEYS)
    datasets, temperature = given.get("datasets"), given.get("temperature")
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError([*reader.problems, f"{path}: needs `datasets`, a list of path and weight"])
    if temperature is not None:
        reader.value(temperature, Positive, ("temperature",))
    for number, entry in enumerate(datasets):
        keys: Keys = ("datasets", number)
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            reader.problem(keys, f"datasets[{number}] needs a path")
            continue
        known = reader.known(entry, keys, DATASET_KEYS)
        weight = known.get("weight")
        if known.get("domain") is not None:
            reader.value(known["domain"], Natural, (*keys, "domain"))
        if temperature is None:
            reader.value(weight, Positive, (*keys, "weight"))
        elif weight is not None:
            reader.problem((*keys, "weight"), f"datasets[{number}] has a weight, and temperature is set: choose one")
    paths = [entry["path"] for entry in datasets if isinstance(entry, dict) and "path" in entry]
    for name in dict.fromkeys(paths):
        if paths.count(name) > 1:
            reader.problem((), f"{name} is named twice")
    if reader.problems:
        raise ConfigError(reader.problems)
    return datasets, temperature
