# SPDX-License-Identifier: Apache-2.0
"""Which token files a run reads, and how much of each: a folder, or a YAML file that blends several.

    datasets:
      - {path: tokens/books, weight: 0.7}      # relative to this file
      - {path: tokens/code, weight: 0.3}

or, without weights, `temperature: 2`: a dataset's share is its number of tokens to the power of 1/2. 1 is proportional, and
the higher, the more equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindloom.data.token_file import TokenFile
from mindloom.errors import ConfigError, did_you_mean

KEYS, DATASET_KEYS = ("datasets", "temperature"), ("path", "weight")
BLENDS = (".yaml", ".yml")


@dataclass(frozen=True)
class Part:
    """One dataset of a blend."""

    name: str
    tokens: TokenFile
    weight: float
    """Share of the samples."""


def read_blend(path: Path) -> list[Part]:
    """The parts of a blend; their weights add up to 1. All were tokenized alike.

    Raises:
        ConfigError: everything that is wrong with the file, or with the token files it names.
    """
    if path.suffix not in BLENDS:
        return [Part(str(path), TokenFile(path), 1.0)]
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
    parts = [Part(e["path"], files[e["path"]], w / sum(weights)) for e, w in zip(entries, weights, strict=True)]
    first = parts[0]
    for part in parts[1:]:
        if part.tokens.info.tokenizer != first.tokens.info.tokenizer:
            problems.append(f"{path}: {part.name} was made with another tokenizer than {first.name}")
    if problems:
        raise ConfigError(problems)
    return parts


def short_datasets(parts: Sequence[Part], seq_len: int) -> list[str]:
    """What is wrong with parts that give no sample of this length."""
    problems = []
    for part in parts:
        info = part.tokens.info
        if info.record_length and info.record_length != seq_len + 1:
            problems.append(
                f"{part.name}: cut into records of {info.record_length} tokens; use --seq-len {info.record_length - 1}"
            )
        elif not part.tokens.num_samples(seq_len):
            problems.append(
                f"{part.name}: {info.num_tokens} tokens give no sequence of {seq_len} tokens and one to predict"
            )
    return problems


def _read(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{path}{f':{mark.line + 1}' if mark else ''}: not YAML: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("datasets"), list) or not values["datasets"]:
        raise ConfigError(f"{path}: needs `datasets`, a list of path and weight")
    problems = [f"{path}: {key} is unknown{did_you_mean(str(key), KEYS)}" for key in values if key not in KEYS]
    temperature = values.get("temperature")
    if temperature is not None and not _is_positive(temperature):
        problems.append(f"{path}: temperature must be a number above 0, got {temperature!r}")
    for number, entry in enumerate(values["datasets"]):
        at = f"{path}: datasets[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            problems.append(f"{at} needs a path")
            continue
        problems += [
            f"{at}.{key} is unknown{did_you_mean(str(key), DATASET_KEYS)}" for key in entry if key not in DATASET_KEYS
        ]
        weight = entry.get("weight")
        if temperature is not None and weight is not None:
            problems.append(f"{at} has a weight, and temperature is set: choose one")
        elif temperature is None and not _is_positive(weight):
            problems.append(f"{at}.weight must be a number above 0, got {weight!r}")
    paths = [entry["path"] for entry in values["datasets"] if isinstance(entry, dict) and "path" in entry]
    problems += [f"{path}: {name} is named twice" for name in dict.fromkeys(paths) if paths.count(name) > 1]
    if problems:
        raise ConfigError(problems)
    return values["datasets"], temperature


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
