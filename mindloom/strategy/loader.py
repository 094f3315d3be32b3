# SPDX-License-Identifier: Apache-2.0
"""Read a strategy file strictly: every unknown key, wrong type and wrong combination, all at once, with its line."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from mindloom.errors import ConfigError, did_you_mean
from mindloom.strategy.checks import strategy_problems
from mindloom.strategy.config import Rule, Rules, Strategy
from mindloom.strategy.layout import Dim, Layout
from mindloom.strategy.mesh import AXES

_RULES_KEYS = tuple(f.name for f in dataclasses.fields(Rules))
FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where PyYAML was built with it
SEQUENCE_AXIS = "sp"
"""In a rule: tp where sequence parallel is on, nothing where it is off."""


def load_strategy(path: str | Path, for_inference: bool = False) -> Strategy:
    """The strategy a YAML file describes.

    `for_inference` leaves out what only training needs, sequence parallel, recompute and optimizer parallel: one token a
    step leaves no sequence to cut, and weights cut over the replicas would be gathered for every token.

    Raises:
        ConfigError: all problems of the file and of its rules file.
    """
    reader = _Reader(Path(path))
    values = reader.mapping(reader.compose(), Strategy, "", skip=("rules", "source", "lines"))
    sequence_parallel = bool(values.get("sequence_parallel", False)) and not for_inference
    rules_node = reader.children.get("rules")
    rules = _read_rules(reader, rules_node, sequence_parallel) if rules_node is not None else Rules()
    if reader.problems:
        raise ConfigError(reader.problems)
    strategy = Strategy(**values, rules=rules, source=str(path), lines=reader.lines)
    if problems := strategy_problems(strategy):
        raise ConfigError(problems)
    if for_inference:
        return dataclasses.replace(strategy, sequence_parallel=False, recompute=None, optimizer_parallel=None)
    return strategy


def load_rules(path: Path, sequence_parallel: bool) -> Rules:
    """The rules of a rules file, as a strategy with or without sequence parallel reads them.

    Raises:
        ConfigError: all problems of the file.
    """
    reader = _Reader(path)
    rules = _whole_file(reader, sequence_parallel)
    if reader.problems:
        raise ConfigError(reader.problems)
    return rules


class _Reader:
    """One YAML file being read; collects problems instead of stopping at the first."""

    def __init__(self, path: Path, problems: list[str] | None = None):
        self.path = path
        self.problems: list[str] = [] if problems is None else problems
        self.lines: dict[str, int] = {}
        self.children: dict[str, yaml.Node] = {}  # of the top mapping

    def problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append(f"{self.path}:{node.start_mark.line + 1}: {text}")

    def compose(self) -> yaml.MappingNode:
        try:
            node = _compose(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError([*self.problems, f"{self.path}: cannot be read: {error.strerror}"]) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                [*self.problems, f"{self.path}: not UTF-8 text: {error.reason} at byte {error.start}"]
            ) from None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError([*self.problems, f"{self.path}:{line}: not YAML: {error.problem}"]) from None
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([*self.problems, f"{self.path}: a mapping of keys is expected"])
        return node

    def items(self, node: yaml.MappingNode, prefix: str, known: list[str] | None) -> dict[str, yaml.Node]:
        """The children of a mapping; unknown and repeated keys become problems."""
        found: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if known is not None and key not in known:
                self.problem(key_node, f"{prefix}{key} is unknown{did_you_mean(key, known)}; known: {', '.join(known)}")
            elif key in found:
                self.problem(key_node, f"{prefix}{key} is given twice")
            else:
                found[key] = value_node
                self.lines[prefix + key] = key_node.start_mark.line + 1
        return found

    def mapping(self, node: yaml.Node, kind: Any, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
        """Values of a dataclass's fields, by the types it declares."""
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, f"{prefix.rstrip('.') or 'the file'} must be a mapping of keys")
            return {}
        hints = get_type_hints(kind)
        known = [f.name for f in dataclasses.fields(kind) if f.name not in ("source", "lines")]
        children = self.items(node, prefix, known)
        if not prefix:
            self.children = children
        return {key: self.value(child, hints[key], prefix + key) for key, child in children.items() if key not in skip}

    def value(self, node: yaml.Node, hint: Any, key: str) -> Any:
        """One value of the type `hint`."""
        if dataclasses.is_dataclass(hint):
            values = self.mapping(node, hint, key + ".")
            return hint(**values)  # type: ignore[operator]
        if get_origin(hint) in (types.UnionType, Union):
            return self.union(node, get_args(hint), key)
        if get_origin(hint) is list and isinstance(node, yaml.SequenceNode):
            return [self.value(child, get_args(hint)[0], f"{key}[{i}]") for i, child in enumerate(node.value)]
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        if not _is_a(value, hint):
            self.problem(node, f"{key} must be {_describe(hint)}, got {value!r}")
        return value

    def union(self, node: yaml.Node, options: tuple[Any, ...], key: str) -> Any:
        for option in options:
            trial = _Reader(self.path)
            value = trial.value(node, option, key)
            if not trial.problems or (dataclasses.is_dataclass(option) and isinstance(node, yaml.MappingNode)):
                self.problems += trial.problems
                self.lines |= trial.lines
                return value
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        wanted = " or ".join(_describe(option) for option in options if option is not type(None))
        self.problem(node, f"{key} must be {wanted}, got {value!r}")
        return None


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=FAST_LOADER)
    except yaml.YAMLError:
        return yaml.compose(text, Loader=yaml.SafeLoader)  # says more exactly where


def _is_a(value: Any, hint: Any) -> bool:
    if hint is type(None):
        return value is None
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, hint) if isinstance(hint, type) else False


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        return f"a list of {_describe(get_args(hint)[0]).removeprefix('a ')}s"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(f"{f.name}: ..." for f in dataclasses.fields(hint)) + "}"
    names = {int: "a whole number", float: "a positive number", bool: "true or false", str: "a text"}
    return names.get(hint, str(hint))


def _read_rules(reader: _Reader, node: yaml.Node, sequence_parallel: bool) -> Rules:
    """`rules:` of a strategy: the name of a rules file, or rules written in place, on top of `base`."""
    if isinstance(node, yaml.ScalarNode) and node.value:
        return _rules_file(reader, reader.path.parent / node.value, node, sequence_parallel)
    if not isinstance(node, yaml.MappingNode):
        reader.problem(node, "rules must be a file name or a mapping")
        return Rules()
    children = reader.items(node, "rules.", ["base", *_RULES_KEYS])
    base = Rules()
    if "base" in children:
        base = _rules_file(
            reader, reader.path.parent / str(children["base"].value), children["base"], sequence_parallel
        )
    return _rules(reader, children, base, sequence_parallel)


def _rules_file(reader: _Reader, path: Path, node: yaml.Node, sequence_parallel: bool) -> Rules:
    if not path.is_file():
        reader.problem(node, f"rules: there is no file {path}")
        return Rules()
    return _whole_file(_Reader(path, reader.problems), sequence_parallel)


def _whole_file(reader: _Reader, sequence_parallel: bool) -> Rules:
    return _rules(reader, reader.items(reader.compose(), "", list(_RULES_KEYS)), Rules(), sequence_parallel)


def _rules(reader: _Reader, children: dict[str, yaml.Node], base: Rules, sequence_parallel: bool) -> Rules:
    def patterns(key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(reader.value(children[key], list[str], key)) if key in children else default

    rules = list(base.operators)
    operators = children.get("operators")
    if isinstance(operators, yaml.MappingNode):
        for pattern, node in reader.items(operators, "operators.", None).items():
            rules.append(_rule(reader, pattern, node, sequence_parallel))
    elif operators is not None:
        reader.problem(operators, "operators must be a mapping of path patterns")
    return Rules(
        layers=patterns("layers", base.layers),
        first_stage=patterns("first_stage", base.first_stage),
        last_stage=patterns("last_stage", base.last_stage),
        selective=patterns("selective", base.selective),
        tied=patterns("tied", base.tied),
        operators=tuple(rules),
    )


def _rule(reader: _Reader, pattern: str, node: yaml.Node, sequence_parallel: bool) -> Rule:
    inputs, outputs, local = node, None, False
    if isinstance(node, yaml.MappingNode):
        children = reader.items(node, f"{pattern}.", ["in", "out", "local"])
        local = "local" in children and bool(reader.value(children["local"], bool, f"{pattern}.local"))
        missing = [key for key in ("in", "out") if key not in children and (key == "in" or local)]
        if missing:
            reader.problem(node, f"{pattern}: {' and '.join(map(repr, missing))} is missing")
            return Rule(pattern=pattern, inputs=())
        inputs, outputs = children["in"], children.get("out")
    return Rule(
        pattern=pattern.removesuffix("?"),
        optional=pattern.endswith("?"),
        inputs=_layouts(reader, inputs, pattern, sequence_parallel),
        outputs=None if outputs is None else _layouts(reader, outputs, pattern, sequence_parallel),
        local=local,
        source=f"{reader.path}:{node.start_mark.line + 1}",
    )


def _layouts(reader: _Reader, node: yaml.Node, pattern: str, sequence_parallel: bool) -> tuple[Layout, ...]:
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    if not isinstance(value, list) or not all(isinstance(layout, list) for layout in value):
        reader.problem(node, f"{pattern}: a list with one layout per input is expected, e.g. [[dp, ~], [tp, ~]]")
        return ()
    layouts = []
    for layout in value:
        dims: list[Dim] = []
        for dim in layout:
            axes = [] if dim is None else dim if isinstance(dim, list) else [dim]
            for axis in axes:
                if axis not in (*AXES[1:], SEQUENCE_AXIS):
                    reader.problem(node, f"{pattern}: {axis!r} is no mesh axis of a layout; use dp, tp, sp or ~")
            axes = [
                "tp" if axis == SEQUENCE_AXIS else axis for axis in axes if axis != SEQUENCE_AXIS or sequence_parallel
            ]
            dims.append(tuple(map(str, axes)))
        layouts.append(tuple(dims))
    return tuple(layouts)
