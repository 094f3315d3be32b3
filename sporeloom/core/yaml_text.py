# SPDX-License-Identifier: Apache-2.0
"""YAML, read strictly: see `sporeloom.core.reader`."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import yaml

from sporeloom.core.document import Document, Keys, show_key
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line

MAX_DEPTH, MAX_VALUES = 64, 100_000
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where PyYAML was built with it
_KINDS_OF_TAG = {"null": "nothing", "bool": "true or false", "int": "a whole number", "float": "a number"}
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_QUOTED_NAME = re.compile(r"\b(alias|anchor|handle|directive|tag) (?:'[^']*'|\"[^\"]*\")")


class YamlReader:
    """Reads one YAML text and collects its problems."""

    def __init__(self, source: str):
        self.source = source
        self.problems: list[str] = []
        self.lines: dict[Keys, int] = {}
        self.open: set[int] = set()  # nodes we are inside of
        self.count = 0
        self.scalars = yaml.SafeLoader("")

    def read(self, text: str) -> Document:
        try:
            self._check_depth(text)
            node = self._compose(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = _QUOTED_NAME.sub(r"\1", error.problem or "")  # never more of a file than its keys
            raise ConfigError(f"{self.source}:{line}: not YAML: {problem}") from None
        except yaml.YAMLError as error:
            line = text.count("\n", 0, getattr(error, "position", 0)) + 1
            raise ConfigError(f"{self.source}:{line}: not YAML: {first_line(error)}") from None
        value = None if node is None else self._value(node, ())
        if self.problems:
            raise ConfigError(self.problems)
        return Document(self.source, value, self.lines)

    def _compose(self, text: str) -> yaml.Node | None:
        try:
            return yaml.compose(text, Loader=LOADER)
        except yaml.YAMLError:
            return yaml.compose(text, Loader=yaml.SafeLoader)  # says more exactly where

    def _check_depth(self, text: str) -> None:
        depth = 0
        with contextlib.suppress(yaml.YAMLError):  # `_compose` says it better
            for event in yaml.parse(text, Loader=LOADER):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH:
                    line = f":{event.start_mark.line + 1}" if event.start_mark else ""
                    raise ConfigError(f"{self.source}{line}: nested more than {MAX_DEPTH} deep")

    def _problem(self, node: yaml.Node, keys: Keys, text: str) -> None:
        name = f"{show_key(keys)}: " if keys else ""
        self.problems.append(f"{self.source}:{node.start_mark.line + 1}: {name}{text}")

    def _value(self, node: yaml.Node, keys: Keys) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        self.count += 1
        if self.count > MAX_VALUES:
            raise ConfigError(f"{self.source}: its anchors unfold to more than {MAX_VALUES:,} values")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, keys)
        if id(node) in self.open:
            self._problem(node, keys, "an anchor that contains itself")
            return None
        self.open.add(id(node))
        try:
            if node.tag not in (_TAG + "map", _TAG + "seq"):
                self._problem(node, keys, f"the tag {_shown(node.tag)} is not read here")
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, keys)
            return [self._value(child, (*keys, i)) for i, child in enumerate(node.value)]
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, keys, "a key must be a text")
            elif key_node.tag == _TAG + "merge":
                merged |= self._merged(child, keys)
            elif key_node.value in found:
                self._problem(key_node, (), f"{show_key((*keys, key_node.value))} is given twice")
            else:
                name = str(key_node.value)
                self.lines[(*keys, name)] = key_node.start_mark.line + 1
                found[name] = self._value(child, (*keys, name))
        return {**merged, **found}

    def _merged(self, node: yaml.Node, keys: Keys) -> dict[str, Any]:
        """Read the mappings that `<<` merges."""
        value = self._value(node, (*keys, "<<"))
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            self._problem(node, keys, "<< takes a mapping, or a list of them")
            return {}
        return {name: v for part in reversed(parts) for name, v in part.items()}

    def _scalar(self, node: yaml.ScalarNode, keys: Keys) -> Any:
        tag, text = node.tag.removeprefix(_TAG), str(node.value)
        if tag in ("str", "timestamp", "value", "merge"):
            is_plain_number = not node.style and _EXPONENT.fullmatch(text)
            return self._float(node, keys, float(text)) if is_plain_number else text
        if tag not in ("null", "bool", "int", "float"):
            self._problem(node, keys, f"the tag {_shown(node.tag)} is not read here")
            return None
        if ":" in text and tag in ("int", "float"):
            return text
        try:
            value = self.scalars.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError):
            self._problem(node, keys, f"not read as {_KINDS_OF_TAG[tag]}")
            return None
        return self._float(node, keys, value) if tag == "float" else value

    def _float(self, node: yaml.Node, keys: Keys, value: float) -> float:
        if not math.isfinite(value):
            self._problem(node, keys, f"{node.value} is not a finite number")
        return value


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!")
