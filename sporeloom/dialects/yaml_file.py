# SPDX-License-Identifier: Apache-2.0
"""YAML as flat keys, both ways: `section.key`; lists of `{type: NAME, ...}` as `section[NAME].key`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from sporeloom.core.document import Document, Keys
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.reader import read_yaml
from sporeloom.dialects.settings import GivenValue

VALUES = (
    "offset",
    "recompute",
    "select_recompute",
    "betas",
    "select_comm_recompute",
    "pipeline_parallel_layers_per_stage",
    "select_module",
    "exclude_op",
    "layer_swap",
    "op_swap",
)
"""Keys inside sections whose lists and mappings are values."""


def read_flat(path: Path, base_key: str | None = None, seen: tuple[Path, ...] = ()) -> dict[str, GivenValue]:
    """All keys of a file. `base_key` names a file whose keys it inherits.

    Raises:
        ConfigError: not YAML, a key given twice, files that inherit from each other.
    """
    document = read_yaml(path)
    given: dict[str, GivenValue] = {}
    _flatten(document, document.mapping, (), "", given)
    if base_key not in given:
        return given
    base = (path.parent / str(given.pop(base_key).value)).resolve()
    if base in seen or base == path.resolve():
        raise ConfigError(f"{path}: {base_key} {base} inherits from itself")
    return {**read_flat(base, base_key, (*seen, path.resolve())), **given}


def _flatten(document: Document, values: dict[str, Any], keys: Keys, prefix: str, given: dict[str, GivenValue]) -> None:
    for name, value in values.items():
        here, key = (*keys, name), prefix + name
        if key in given:
            raise ConfigError(f"{document.at(here)}: {key} is given twice")
        if isinstance(value, dict) and value and not (prefix and name in VALUES):
            _flatten(document, value, here, key + ".", given)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and "type" in item for item in value):
            for number, item in enumerate(value):
                entry = f"{key}[{item['type']}]"
                given[entry] = GivenValue(True, document.at((*here, number)))
                rest = {k: v for k, v in item.items() if k != "type"}
                _flatten(document, rest, (*here, number), entry + ".", given)
        else:
            given[key] = GivenValue(value, document.at(here))


def flat_text(values: Mapping[str, Any]) -> str:
    """The YAML that `read_flat` reads as these keys; sections in the order in which they first come."""
    return "\n".join(_lines(_nested(values), "")) + "\n"


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, field = key.split(".")
        here = nested
        for section in sections:
            name, _, entry = section.rstrip("]").partition("[")
            if not entry:
                here = here.setdefault(name, {})
                continue
            entries = here.setdefault(name, [])
            if entry not in [item["type"] for item in entries]:
                entries.append({"type": entry})
            here = next(item for item in entries if item["type"] == entry)
        here[field] = value
    return nested


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and all(isinstance(item, dict) and "type" in item for item in value):
            yield f"{indent}{key}:"
            for item in value:
                first, *rest = _lines(item, indent + "    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
            yield f"{indent}{key}: {first_line(shown)}"
