# SPDX-License-Identifier: Apache-2.0
"""Check the settings that a chain records before a stretch runs with them: the chain may come from somebody else, and a
run must not execute code that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sporeloom.train.audit_chain import START, Chain
from sporeloom.train.config import TrainingConfig
from sporeloom.train.distill import DistillConfig
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.preferences import KTOConfig, ORPOConfig, SimPOConfig
from sporeloom.train.tuning import DPOConfig, RewardConfig, SFTConfig

AUDITABLE: dict[str, type[TrainingConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "distill": DistillConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "simpo": SimPOConfig,
    "orpo": ORPOConfig,
    "kto": KTOConfig,
}
"""Command -> its flags. Those of `grpo` and `ppo` name Python code, and these cannot run again."""
READ = ("data", "tokenizer", "from_checkpoint", "config", "parameter_groups", "curriculum", "teacher")
"""Flags with files that a run reads."""
TABLES = ("train", "model", "strategy", "resolved", "versions", "data")
VERSIONS = ("mindspore", "numpy")


def settings_problems(chain: Chain) -> list[str]:
    """List what is wrong with the settings of all starts of a chain, which no run can have written."""
    found = (f"{chain.path}: step {start['step']}: start.{each}" for start in chain.starts() for each in _wrong(start))
    return list(dict.fromkeys(found))


def _wrong(start: dict[str, Any]) -> Iterator[str]:
    settings = start[START]
    if wrong := [name for name in TABLES if not isinstance(settings.get(name), dict)]:
        yield from (f"{name} is not a mapping" for name in wrong)
        return
    verb, train = settings.get("verb"), settings["train"]
    if not isinstance(settings.get("folder"), str):
        yield "folder is not a path"
    if verb not in list(AUDITABLE):
        yield f"verb is {verb!r:.40}, which does not run again; known: {', '.join(AUDITABLE)}"
        return
    known = {field.name for field in dataclasses.fields(AUDITABLE[verb])} - {"run"}
    yield from (f"train.{name!s:.40}: `sporeloom {verb}` has no such flag" for name in train if name not in known)
    every, data = train.get("audit_every"), train.get("data")
    if type(every) is not int or every < 1:
        yield f"train.audit_every is {every!r:.40}; a run with a chain has 1 or more"
    if not isinstance(data, str):
        yield f"train.data is {data!r:.40}, not a path"
    for name in READ:
        if not isinstance(train.get(name), (str, type(None))):
            yield f"train.{name} is {train[name]!r:.40}, not a path"
    mesh = settings["strategy"].get("mesh")
    if not isinstance(mesh, dict) or not all(type(mesh[axis]) is int for axis in mesh if axis != "order"):
        yield "strategy.mesh is not a mapping of axes to degrees"
    yield from (f"versions.{name!s:.40}: unknown" for name in settings["versions"] if name not in VERSIONS)


def missing_files(settings: dict[str, Any]) -> Iterator[str]:
    """List the files of a run that are not there."""
    given = settings["train"]
    for name in READ:
        if given.get(name) and not Path(given[name]).exists():
            yield f"--{name.replace('_', '-')} {given[name]}: not there; the run was started in {settings['folder']}"
