# SPDX-License-Identifier: Apache-2.0
"""Read a strategy file strictly: report every unknown key, wrong type and wrong combination at once, with its
line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from sporeloom.core.document import Document, Keys, show_key
from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import Reader, is_a, read_yaml
from sporeloom.core.shipped import RULES, shipped_names, shipped_or_file
from sporeloom.models.paths import alternatives
from sporeloom.strategy.axes import LAYOUT_AXES, ROWS
from sporeloom.strategy.checks import strategy_problems
from sporeloom.strategy.config import Pipeline, Rule, Rules, Schedule, Strategy
from sporeloom.strategy.layout import Dim, Layout
from sporeloom.strategy.listed_schedule import read_schedule

_RULES_KEYS = tuple(f.name for f in dataclasses.fields(Rules))
Named = dict[str, tuple[str, ...]]
"""Axis of a rule -> mesh axes."""
NAMES_IN_RULES = (
    *LAYOUT_AXES,
    *(name for axis in ROWS for name in axis.set_by),
    *(name for axis in ROWS for name in axis.parts),
)
"""Names of axes in rules."""


def load_strategy(path: str | Path, for_inference: bool = False) -> Strategy:
    """Load the strategy of a YAML file, or the built-in one of that name.

    `for_inference` leaves out what only training needs, sequence and context parallel, recompute and optimizer parallel: one
    token a step leaves no sequence to shard, and weights sharded over the replicas would be gathered for every token. The
    ranks of cp are further replicas then. Virtual stages are left out, too: a token would go around once for each; and
    `engine`, which is for training.

    Raises:
        ConfigError: all problems of the file and of its rules file.
    """
    return _strategy(read_yaml(shipped_or_file(path)), for_inference)


def strategy_of(settings: dict[str, Any], source: str = "auto_parallel") -> Strategy:
    """Build the strategy that a script gives as a mapping: the keys of a strategy file. `rules` may be just its
    operators.

    Raises:
        ConfigError: all problems.
    """
    rules = settings.get("rules")
    if isinstance(rules, dict) and not set(rules) & {"base", *_RULES_KEYS}:
        settings = {**settings, "rules": {"operators": rules}}
    return _strategy(Document(source, _plain(settings)))


def _plain(value: Any) -> Any:
    """Convert mappings and sequences of a script to the types that a YAML file gives."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _strategy(document: Document, for_inference: bool = False) -> Strategy:
    reader, given = Reader(document), document.mapping
    values = reader.fields(given, Strategy, skip=("rules",))
    settings = {**values, "sequence_parallel": values.get("sequence_parallel", False) and not for_inference}
    named = _named_axes(settings)
    rules = _strategys_rules(reader, given["rules"], named) if "rules" in given else Rules()
    if isinstance(pipeline := values.get("pipeline"), Pipeline):
        values["pipeline"] = _with_listed_schedule(reader, pipeline)
    if reader.problems:
        raise ConfigError(reader.problems)
    lines = {show_key(keys): line for keys, line in document.lines.items()}
    strategy = Strategy(**values, rules=rules, source=document.source, lines=lines)
    if problems := strategy_problems(strategy):
        raise ConfigError(problems)
    if for_inference:
        mesh, pipeline = strategy.mesh.for_inference(), strategy.pipeline
        is_interleaved = pipeline.virtual_stages > 1 or pipeline.listed
        return dataclasses.replace(
            strategy,
            mesh=mesh,
            pipeline=Pipeline(num_microbatches=pipeline.num_microbatches) if is_interleaved else pipeline,
            sequence_parallel=False,
            recompute=None,
            offload=None,
            optimizer_parallel=None,
        )
    return strategy


def _with_listed_schedule(reader: Reader, pipeline: Pipeline) -> Pipeline:
    """Replace the pipeline's schedule file by its contents."""
    if pipeline.schedule in (known := get_args(Schedule)):
        return pipeline
    path = Path(reader.document.source).parent / pipeline.schedule
    if not path.is_file():
        names = ", ".join(known)
        reader.problem(
            ("pipeline", "schedule"),
            f"pipeline.schedule: {pipeline.schedule!r} is none of {names}, and there is no file {path}",
        )
        return pipeline
    try:
        return dataclasses.replace(pipeline, listed=read_schedule(path))
    except ConfigError as error:
        reader.problems += error.problems
        return pipeline


def _named_axes(settings: Mapping[str, Any]) -> Named:
    """Mesh axes of the axis names in rules that depend on the settings of a strategy."""
    return {
        name: (axis.name,) if settings.get(key, getattr(Strategy, key)) == value else ()
        for axis in ROWS
        for name, (key, value) in axis.set_by.items()
    }


def load_rules(path: Path, like: Strategy) -> Rules:
    """Load a rules file, with the axes of this strategy.

    Raises:
        ConfigError: all problems of the file.
    """
    problems: list[str] = []
    rules = _whole_file(path, problems, _named_axes(vars(like)))
    if problems:
        raise ConfigError(problems)
    return rules


def _strategys_rules(reader: Reader, value: Any, named: Named) -> Rules:
    """Read `rules:` of a strategy: the name of a rules file, or rules written in place, on top of `base`."""
    keys: Keys = ("rules",)
    if isinstance(value, str) and value:
        return _rules_file(reader, value, keys, named)
    if not isinstance(value, dict):
        reader.problem(keys, "rules must be a file name or a mapping")
        return Rules()
    return _rules(reader, value, keys, named)


def _rules_file(reader: Reader, name: str, keys: Keys, named: Named, above: tuple[Path, ...] = ()) -> Rules:
    beside = Path(reader.document.source).parent / name
    if not beside.is_file() and name not in shipped_names(RULES):
        reader.problem(keys, f"rules: there is no file {beside}, and no built-in rules of that name")
        return Rules()
    path = beside if beside.is_file() else shipped_or_file(name, RULES)
    if path.resolve() in above:
        reader.problem(keys, f"{show_key(keys)}: {path} is a base of itself")
        return Rules()
    return _whole_file(path, reader.problems, named, above)


def _whole_file(path: Path, problems: list[str], named: Named, above: tuple[Path, ...] = ()) -> Rules:
    try:
        document = read_yaml(path)
        return _rules(Reader(document, problems), document.mapping, (), named, (*above, path.resolve()))
    except ConfigError as error:
        problems += error.problems
        return Rules()


def _rules(reader: Reader, value: dict[str, Any], keys: Keys, named: Named, above: tuple[Path, ...] = ()) -> Rules:
    """Read a mapping of rules, on top of the files that it calls its `base`: later ones win."""
    given = reader.known(value, keys, ("base", *_RULES_KEYS))
    names = given.get("base", [])
    if not isinstance(names, str):
        names = reader.value(names, list[str], (*keys, "base"))
    names = [names] if isinstance(names, str) else names if is_a(names, list[str]) else []
    bases = [_rules_file(reader, name, (*keys, "base"), named, above) for name in names]
    rules = [rule for base in bases for rule in base.operators]
    operators = given.get("operators")
    if isinstance(operators, dict):
        rules += [_rule(reader, value, (*keys, "operators", pattern), named) for pattern, value in operators.items()]
    elif "operators" in given:
        reader.problem((*keys, "operators"), "operators must be a mapping of path patterns")
    cells: dict[str, tuple[str, ...]] = {}
    for key in (key for key in _RULES_KEYS if key != "operators"):
        found = reader.value(given[key], list[str], (*keys, key)) if key in given else None
        of_bases = [patterns for base in bases if (patterns := getattr(base, key))]
        cells[key] = tuple(found) if isinstance(found, list) else of_bases[-1] if of_bases else ()
    return Rules(**cells, operators=tuple(rules))


def _rule(reader: Reader, value: Any, keys: Keys, named: Named) -> Rule:
    pattern = str(keys[-1])
    try:
        alternatives(pattern)
    except ConfigError as error:
        reader.problem(keys, error.problems[0])
    inputs, outputs, local = value, None, False
    if isinstance(value, dict):
        given = reader.known(value, keys, ("in", "out", "local"))
        local = "local" in given and bool(reader.value(given["local"], bool, (*keys, "local")))
        missing = [key for key in ("in", "out") if key not in given and (key == "in" or local)]
        if missing:
            reader.problem(keys, f"{pattern}: {' and '.join(map(repr, missing))} is missing")
            return Rule(pattern=pattern, inputs=())
        inputs, outputs = given["in"], given.get("out")
    return Rule(
        pattern=pattern.removesuffix("?"),
        optional=pattern.endswith("?"),
        inputs=_layouts(reader, inputs, keys, named),
        outputs=None if outputs is None else _layouts(reader, outputs, keys, named),
        local=local,
        source=reader.document.at(keys),
    )


def _layouts(reader: Reader, value: Any, keys: Keys, named: Named) -> tuple[Layout, ...]:
    pattern = keys[-1]
    if not isinstance(value, list) or not all(isinstance(layout, list) for layout in value):
        reader.problem(keys, f"{pattern}: a list with one layout per input is expected, e.g. [[dp, ~], [tp, ~]]")
        return ()
    layouts = []
    for layout in value:
        dims: list[Dim] = []
        for dim in layout:
            axes = [] if dim is None else dim if isinstance(dim, list) else [dim]
            for axis in axes:
                if axis not in NAMES_IN_RULES:
                    reader.problem(
                        keys,
                        f"{pattern}: {axis!r} is not a mesh axis of a layout; use {', '.join(NAMES_IN_RULES)} or ~",
                    )
            dims.append(tuple(name for axis in map(str, axes) for name in named.get(axis, (axis,))))
        layouts.append(tuple(dims))
    return tuple(layouts)
