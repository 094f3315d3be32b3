# SPDX-License-Identifier: Apache-2.0
"""What a certificate vouches for, and whether a run is still that. How one is made: the package `certify`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sporeloom import __version__
from sporeloom.errors import ConfigError
from sporeloom.files import write_text_atomically
from sporeloom.json_text import json_text
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import sources_hash
from sporeloom.models.parameters import num_parameters
from sporeloom.numbers import without_infinity
from sporeloom.reader import read_json
from sporeloom.strategy.config import Strategy

CERTIFIED, REFUSED = "certified", "refused"
SEAL = "sha256"
SEAL_NOTE = "its seal shows accidental changes; it is not a signature, and anybody can write another"
"""What the seal is worth, for every place that speaks of a certificate."""


def about_strategy(strategy: Strategy) -> dict[str, Any]:
    """A strategy and its rules as data, without the files they came from. Its engine is the one of devices."""
    values = dataclasses.asdict(strategy)
    rules = values["rules"]
    rules["operators"] = {
        rule["pattern"]: {"place": place, **{key: rule[key] for key in ("inputs", "outputs", "local")}}
        for place, rule in enumerate(rules["operators"])
    }
    values["engine"] = "spmd" if strategy.engine == "spmd" else "mindspore"
    return {key: value for key, value in values.items() if key not in ("source", "lines")}


def about_versions() -> dict[str, str]:
    """Of everything that decides what is computed."""
    return {"mindspore": version("mindspore"), "sporeloom": __version__, "sources": sources_hash()}


def about_task(
    name: str, lora: LoRAConfig | None, has_reference: bool, reward_model: ModelConfig | None
) -> dict[str, Any] | None:
    """What of a task its graph and its memory hang on; None: plain text is learned, by the whole model."""
    if name == "pretraining" and lora is None:
        return None
    adapters = lora and {"r": lora.r, "dropout": lora.lora_dropout, "target_modules": [*lora.target_modules]}
    reward = reward_model and {"num_parameters": num_parameters(reward_model), "num_layers": reward_model.num_layers}
    return {"name": name, "lora": adapters, "reference": has_reference, "reward_model": reward}


def vouched_for(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    batch_size: int,
    seq_len: int,
    accumulate: int,
    task: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What must stay as it is for a certificate of a training run to hold. `batch_size`: sequences of a step."""
    return {
        **({"task": task} if task else {}),
        "model": {"family": family, **model.to_dict(), "attention": model.attention_on_ascend},
        "strategy": about_strategy(strategy),
        "batch": {"batch_size": batch_size, "seq_len": seq_len, "accumulate": accumulate},
        "versions": about_versions(),
    }


def hashes_of(vouched: Mapping[str, Any]) -> dict[str, str]:
    """A short name for each part."""
    return {name: _hash(value) for name, value in vouched.items()}


def write_certificate(path: Path, values: Mapping[str, Any]) -> None:
    """Write a certificate with its seal, the hash of all the rest: against accidents. There is no key in it, so it proves
    nothing of who made the certificate; where that matters, sign the file as files are signed."""
    plain = without_infinity(values)
    text = json_text({**plain, SEAL: _hash(plain)}, indent=1, ensure_ascii=False) + "\n"
    write_text_atomically(path, text)


def check_certificate(path: Path, vouched: Mapping[str, Any]) -> None:
    """Hold a run against its certificate.

    Raises:
        ConfigError: it is no certificate, it was changed, it says `refused`, or something it vouches for has changed.
    """
    values = dict(read_json(path).mapping)
    if not {"verdict", "vouched_for", SEAL} <= values.keys():
        raise ConfigError(f"{path}: no certificate; tools/certify.py writes them")
    seal = values.pop(SEAL)
    if seal != _hash(values):
        raise ConfigError(f"{path}: was changed after it was made: its seal does not fit; make it again by certify")
    if values["verdict"] != CERTIFIED:
        raise ConfigError(f"{path}: the strategy was refused: {'; '.join(values.get('reasons', []))}")
    changed = list(_differences(values["vouched_for"], json.loads(json_text(vouched)), ""))
    if changed:
        raise ConfigError([*(f"{path}: {line}" for line in changed), f"{path}: make it again with tools/certify.py"])


def _differences(before: Any, now: Any, key: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif key == "versions.sources":
        if before != now:
            yield "the sources of sporeloom or of a model family have changed"
    elif before != now:
        yield f"{key} was {json_text(before)[:80]}, is {json_text(now)[:80]}"


def _hash(values: Any) -> str:
    return hashlib.sha256(json_text(values, sort_keys=True).encode()).hexdigest()
