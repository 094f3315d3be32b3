# SPDX-License-Identifier: Apache-2.0
"""YAML as flat keys, each with its line: `section.key`; lists of `{type: NAME, ...}` as `section[NAME].key`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindloom.errors import ConfigError
from mindloom.strategy.dialects.settings import Given

VALUES = (
    "offset",
    "recompute",
    "select_recompute",
    "betas",
    "select_comm_recompute",
    "pipeline_parallel_layers_per_stage",
)
"""Keys inside sections whose lists and mappings are values."""


def read_flat(path: Path, base_key: str | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Given]:
    """All keys of a file. `base_key` names a file whose keys it inherits.

    Raises:
        ConfigError: not YAML, a key given twice, files that inherit from each other.
    """
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: a mapping of keys is expected")
    given: dict[str, Given] = {}
    _flatten(path, node, "", given)
    if base_key not in given:
        return given
    base = (path.parent / str(given.pop(base_key).value)).resolve()
    if base in seen or base == path.resolve():
        raise ConfigError(f"{path}: {base_key} {base} inherits from itself")
    return {**read_flat(base, base_key, (*seen, path.resolve())), **given}


def _flatten(path: Path, node: yaml.MappingNode, prefix: str, given: dict[str, Given]) -> None:
    for key_node, value_node in node.value:
        key = prefix + str(key_node.value)
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key in given:
            raise ConfigError(f"{place}: {key} is given twice")
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not (prefix and key_node.value in VALUES):
            _flatten(path, value_node, key + ".", given)
        elif _names_types(value_node):
            for item in value_node.value:
                fields = {k.value: v for k, v in item.value}
                item.value = [(k, v) for k, v in item.value if k.value != "type"]
                name = f"{key}[{fields['type'].value}]"
                given[name] = Given(True, f"{path}:{item.start_mark.line + 1}")
                _flatten(path, item, name + ".", given)
        else:
            given[key] = Given(_value(value_node), place)


def _names_types(node: yaml.Node) -> bool:
    return (
        isinstance(node, yaml.SequenceNode)
        and bool(node.value)
        and all(
            isinstance(item, yaml.MappingNode) and any(k.value == "type" for k, _ in item.value) for item in node.value
        )
    )


def _value(node: yaml.Node) -> Any:
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    if isinstance(value, str):  # YAML 1.1 takes 1e-5 for a text
        try:
            return float(value) if value[:1] in "+-.0123456789" else value
        except ValueError:
            return value
    return value
