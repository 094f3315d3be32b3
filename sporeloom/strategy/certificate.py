# SPDX-License-Identifier: Apache-2.0
"""Contents of a certificate, and their comparison with a run. The package `certification` makes certificates."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sporeloom import __version__
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.numbers import without_infinity
from sporeloom.core.reader import read_json
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import sources_hash
from sporeloom.models.parameters import num_parameters
from sporeloom.strategy.config import Strategy

CERTIFIED, REFUSED = "certified", "refused"
SEAL = "sha256"
SEAL_NOTE = "its seal shows accidental changes; it is not a signature, and anybody can write another"
"""Meaning of the seal, for messages."""
COVERS, OLD_COVERS = "covers", "vouched_for"
"""Key of the settings that a certificate covers, now and in certificates of earlier releases."""


def about_strategy(strategy: Strategy) -> dict[str, Any]:
    """Describe a strategy, its rules and its engine as data, without the files that they came from."""
    values = dataclasses.asdict(strategy)
    rules = values["rules"]
    rules["operators"] = {
        rule["pattern"]: {"position": position, **{key: rule[key] for key in ("inputs", "outputs", "local")}}
        for position, rule in enumerate(rules["operators"])
    }
    values["engine"] = strategy.engine or "spmd"
    return {key: value for key, value in values.items() if key not in ("source", "lines")}


def about_versions() -> dict[str, str]:
    """List the versions of everything that affects the results of a run."""
    return {"mindspore": version("mindspore"), "sporeloom": __version__, "sources": sources_hash()}


def about_task(
    name: str, lora: LoRAConfig | None, has_reference: bool, reward_model: ModelConfig | None
) -> dict[str, Any] | None:
    """Describe the parts of a task that affect graphs and memory; None for pretraining of all weights."""
    if name == "pretraining" and lora is None:
        return None
    adapters = lora and {"r": lora.r, "dropout": lora.lora_dropout, "target_modules": [*lora.target_modules]}
    reward = reward_model and {"num_parameters": num_parameters(reward_model), "num_layers": reward_model.num_layers}
    return {"name": name, "lora": adapters, "reference": has_reference, "reward_model": reward}


def covered_settings(
    family: str,
    model: ModelConfig,
    strategy: Strategy,
    batch_size: int,
    seq_len: int,
    accumulate: int,
    task: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe the settings of a training run that its certificate covers. `batch_size`: sequences of a step."""
    return {
        **({"task": task} if task else {}),
        "model": {"family": family, **model.to_dict(), "attention": model.attention_on_ascend},
        "strategy": about_strategy(strategy),
        "batch": {"batch_size": batch_size, "seq_len": seq_len, "accumulate": accumulate},
        "versions": about_versions(),
    }


def hashes_of(covered: Mapping[str, Any]) -> dict[str, str]:
    """Hash each part of the settings."""
    return {name: _hash(value) for name, value in covered.items()}


def write_certificate(path: Path, values: Mapping[str, Any]) -> None:
    """Write a certificate with its seal, a hash of all other contents, which reveals accidental changes. The seal has no
    key, so it does not prove who made the certificate; sign the file where that matters."""
    plain = without_infinity(values)
    text = json_text({**plain, SEAL: _hash(plain)}, indent=1, ensure_ascii=False) + "\n"
    write_text_atomically(path, text)


def check_certificate(path: Path, covered: Mapping[str, Any]) -> None:
    """Compare a run with its certificate.

    Args:
        covered: `covered_settings` of the run.

    Raises:
        ConfigError: it is not a certificate, is from an earlier release, was changed, says `refused`, or covers other
            settings.
    """
    values = dict(read_json(path).mapping)
    if {"verdict", OLD_COVERS} <= values.keys():
        raise ConfigError(_earlier_release(path, values[OLD_COVERS]))
    if not {"verdict", COVERS, SEAL} <= values.keys():
        raise ConfigError(f"{path}: is not a certificate; make one with sporeloom certify")
    seal = values.pop(SEAL)
    if seal != _hash(values):
        raise ConfigError(
            f"{path}: was changed after it was made: its seal does not fit; make it again with sporeloom certify"
        )
    if values["verdict"] != CERTIFIED:
        raise ConfigError(f"{path}: the strategy was refused: {'; '.join(values.get('reasons', []))}")
    changed = list(_differences(values[COVERS], json.loads(json_text(covered)), ""))
    if changed:
        raise ConfigError([*(f"{path}: {line}" for line in changed), f"{path}: make it again with sporeloom certify"])


def _earlier_release(path: Path, covered: Any) -> str:
    strategy = covered.get("strategy") if isinstance(covered, dict) else None
    engine = strategy.get("engine") if isinstance(strategy, dict) else None
    what = "for engine mindspore, which is not certified any more" if engine == "mindspore" else "by an earlier release"
    return f"{path}: was made {what}; make it again with sporeloom certify"


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
