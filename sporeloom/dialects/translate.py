# SPDX-License-Identifier: Apache-2.0
"""Translate settings from one dialect to another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.shipped import RULES, name_of, shipped_or_file
from sporeloom.dialects import deepspeed, megatron, mindformers1, mindformers2, ours
from sporeloom.dialects.settings import LOSSES, Note, Settings
from sporeloom.dialects.yaml_file import read_flat
from sporeloom.strategy.checks import strategy_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_rules
from sporeloom.strategy.text import fitting_rules

DIALECTS = ("ours", "mindformers1", "mindformers2", "megatron")
"""Dialects that can be written; DeepSpeed's configurations are read only."""


@dataclass(frozen=True)
class Translation:
    """A text in another dialect, with the notes on every key."""

    settings: Settings
    text: str
    notes: list[Note]

    @property
    def losses(self) -> list[Note]:
        """The notes on changed settings."""
        return [note for note in self.notes if note.fate in LOSSES]


def recognize(path: Path) -> str:
    """Detect the dialect of a file, by its sections.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.suffix == ".json":
        return "deepspeed"
    if path.suffix not in (".yaml", ".yml"):
        return "megatron"
    sections = {key.partition(".")[0] for key in read_flat(path)}
    if "mesh" in sections or "rules" in sections:
        return "ours"
    return "mindformers2" if "parallelism" in sections else "mindformers1"


def read(path: Path, dialect: str, known: Settings, devices: int | None = None) -> tuple[Settings, list[Note]]:
    """Read a file. `known`: settings that it may leave out.

    Raises:
        ConfigError: it cannot be understood, or says what cannot be.
    """
    if dialect == "ours":
        return ours.read(path, known)
    if dialect == "mindformers1":
        settings, notes = mindformers1.read(path, known)
    else:
        reader = {"mindformers2": mindformers2, "megatron": megatron, "deepspeed": deepspeed}[dialect]
        settings, notes = reader.read(path, known, devices)
    strategy, notes = _without_idle(settings.strategy, notes)
    if dialect == "mindformers1" and strategy.device_problems():  # settings that MindSpore's partitioner alone has
        strategy = dataclasses.replace(strategy, engine="mindspore")
    lines = {note.text.split(" ")[0]: int(note.place.rpartition(":")[2]) for note in notes if note.text}
    strategy = dataclasses.replace(strategy, lines=lines)
    problems = strategy_problems(dataclasses.replace(strategy, lines=_without_whole_sections(lines)))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(settings, strategy=strategy), notes


def _without_idle(strategy: Strategy, notes: list[Note]) -> tuple[Strategy, list[Note]]:
    """Remove settings without effect on such a mesh: other projects accept them silently, strategy files here
    refuse them."""
    idle = {}
    if strategy.sequence_parallel and strategy.mesh.tp == 1:
        strategy, idle["sequence_parallel"] = dataclasses.replace(strategy, sequence_parallel=False), "mesh.tp is 1"
    if strategy.optimizer_parallel and strategy.mesh.replicas == 1:
        strategy = dataclasses.replace(strategy, optimizer_parallel=None)
        idle["optimizer_parallel"] = "mesh.dp is 1"
    why = [idle.get(note.text.split(" ")[0].partition(".")[0]) for note in notes]
    return strategy, [
        dataclasses.replace(note, fate="no effect", text=text) if text else note
        for note, text in zip(notes, why, strict=True)
    ]


def _without_whole_sections(lines: dict[str, int]) -> dict[str, int]:
    """Line numbers for messages: in other dialects a key of a section may have no effect."""
    return {key: line for key, line in lines.items() if "." in key and not key.startswith("recompute")}


def translate(
    path: Path,
    to: str,
    rules: Path,
    out: Path,
    known: Settings,
    devices: int | None = None,
    dialect: str | None = None,
    config_out: Path | None = None,
) -> Translation:
    """Translate `path` to the dialect `to`.

    `rules`: the rules file of a strategy file that is written to `out`. `config_out`: a file that will have the model's
    configuration.

    Raises:
        ConfigError: it cannot be understood.
    """
    settings, notes = read(path, dialect or recognize(path), known, devices)
    if settings.model and (config_out or to == "ours"):  # a command without --config would train another model
        file = str(config_out or "MODEL.json")
        settings = dataclasses.replace(settings, train={**settings.train, "config": file})
    rules = shipped_or_file(rules, RULES)
    if to == "ours":
        text, more = ours.write(settings, name_of(rules, RULES) or _relative(rules, out.parent))
    else:
        writer = {"mindformers1": mindformers1, "mindformers2": mindformers2, "megatron": megatron}[to]
        text, more = writer.write(settings)
    own = settings.strategy
    fitting = shipped_or_file(fitting_rules(name_of(rules, RULES) or str(rules), own), RULES)
    if own.rules.operators and not _are_shipped(own, fitting):
        more = [*more, Note("rules", to, "not expressible", f"other rules than {rules}; only these can be named")]
    return Translation(settings, text, notes + more)


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path.resolve())


def _are_shipped(strategy: Strategy, path: Path) -> bool:
    """Whether a strategy's rules equal those of the rules file."""
    shipped = load_rules(path, strategy)
    return [dataclasses.replace(rule, source="") for rule in strategy.rules.operators] == [
        dataclasses.replace(rule, source="") for rule in shipped.operators
    ]
