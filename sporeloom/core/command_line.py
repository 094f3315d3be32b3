# SPDX-License-Identifier: Apache-2.0
"""Build a command line from a dataclass: its fields are the flags, their `option(...)` texts the help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.core.numbers import as_flag, number_problem, number_problems
from sporeloom.core.outputs import OUTPUT, output_problems
from sporeloom.core.run_file import read_run_file

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """Declare a field that is a flag; `...` as default makes it required."""
    if default is ...:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def output(default: Any, help: str) -> Any:
    """Like `option`, for a file or folder that the command writes; its configuration must also be an `Overwrite`."""
    return _as_output(option(default, help))


def output_argument(help: str) -> Any:
    """Like `argument`, for a file or folder that the command writes."""
    return _as_output(argument(help))


def _as_output(field: Any) -> Any:
    field.metadata = types.MappingProxyType({**field.metadata, OUTPUT: True})
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overwrite:
    """Base of the configurations of commands that write files."""

    overwrite: bool = option(False, "replace existing outputs")


def run_file() -> Any:
    """Declare the field that names a run file, which gives the other flags; those on the command line take
    precedence."""
    text = (
        "run file: YAML with these flags as keys (`steps: 20`), or the config.json of a run; flags on the "
        "command line take precedence (default: none)"
    )
    return dataclasses.field(default=None, metadata={"help": text, "run_file": True})


def argument(help: str) -> Any:
    """Declare a field that is a positional argument."""
    return dataclasses.field(metadata={"help": help, "positional": True})


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(**options, exit_on_error=False)
        self.problems: dict[str, str] = {}
        """Problems of values, by flag."""
        self.missing: list[str] = []

    def error(self, message: str) -> NoReturn:
        start = "the following arguments are required: "
        if not message.startswith(start):
            raise ConfigError(f"{message} (see --help)")
        self.missing += message.removeprefix(start).split(", ")
        return None  # type: ignore[misc] # argparse continues, and the rest is reported, too

    def reads(self, flag: str, kind: Any) -> Callable[[str], Any]:
        """Build a function that converts a text to a value; a wrong text becomes a problem, so that all are
        reported at once."""

        def read(text: str) -> Any:
            try:
                return _value(text, kind)
            except ValueError as error:
                self.problems[flag] = f"argument {flag}: {error}"
                return WRONG

        return read


class _Several(argparse.Action):
    """Collect the values of a flag that may be repeated; the default and a run file's values are replaced."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(given if isinstance(given, list) else ()), *values])


ALL_FLAGS = "--help-all"
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Placeholders of values in help texts, by type."""
WRONG = object()
"""Stands for a value that could not be converted."""


def _value(text: str, kind: Any) -> Any:
    """Raises:
    ValueError: what is wrong with the text.
    """
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            known = ", ".join(get_args(kind))
            raise ValueError(f"invalid choice: {text!r} (choose from {known}){did_you_mean(text, get_args(kind))}")
        return text
    if "\0" in text:
        raise ValueError("holds a NUL character")
    if kind is Path and not text:
        raise ValueError("an empty name")
    if kind is Path and "://" in text:
        raise ValueError(f"{text}: expected a file or folder of this machine")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"invalid {kind.__name__} value: {text!r}") from None


def parse_args(
    kind: type[T], description: str, argv: Sequence[str] | None = None, check: Callable[[T], object] | None = None
) -> T:
    """Parse the command line into a `kind`. Types are checked here, and whether an output exists already; the
    bounds of numbers only where there are other problems to report.

    Args:
        check: function that finds the other mistakes, called where the command line has mistakes as well.

    Raises:
        ConfigError: all mistakes of the command line: unknown flags, missing ones, values of the wrong type.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(kind, description, words)
    values, problems = _parse(parser, words)
    problems += [f"{problem} (see --help)" for problem in parser.problems.values()]
    wrong = {name for name, value in values.items() if value is WRONG or (isinstance(value, list) and WRONG in value)}
    missing = set()
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in wrong:
            values[field.name] = field.default
        if values.get(field.name, dataclasses.MISSING) is dataclasses.MISSING:
            missing.add(field.name)
    if missing:
        hints = get_type_hints(kind, include_extras=True)
        told = ((name, value, number_problem(value, hints[name])) for name, value in values.items())
        raise ConfigError([*problems, *(f"{as_flag(name)} {what}, got {value}" for name, value, what in told if what)])
    config = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    more = Problems(output_problems(config)) if isinstance(config, Overwrite) else Problems()
    if problems:
        more += number_problems(config)
        if check:
            more.of(check, config)
        flags = [as_flag(name) for name in wrong]  # the defaults stand for them
        more = Problems(problem for problem in more if not problem.startswith(tuple(flags)) or not flags)
    if problems or more:
        raise ConfigError(dict.fromkeys([*problems, *more]))
    return config


def _parse(parser: _Parser, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by field, and the problems of the command line itself. A flag that argparse stops at is left out, and
    the others are read."""
    problems, meant = [], set()
    while True:
        parser.problems.clear()
        parser.missing.clear()
        try:
            namespace, unknown = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:
            problems.append(f"{error} (see --help)")
            meant.add(error.argument_name or "")
            names = (error.argument_name or "").split("/")
            found = next((at for at, word in enumerate(words) if word.partition("=")[0] in names), None)
            if found is None:
                raise ConfigError(problems) from None
            words = words[:found] + words[found + 1 :]
    known = [action.option_strings[-1] for action in parser._actions if action.option_strings]
    for flag, *rest in _by_flag(unknown):
        hint = did_you_mean(flag.partition("=")[0], known)
        meant.add(hint.removeprefix("; did you mean ").removesuffix("?"))
        problems.append(f"unrecognized arguments: {' '.join([flag, *rest])}{hint} (see --help)")
    if missing := [name for name in parser.missing if name not in meant]:
        problems.append(f"the following arguments are required: {', '.join(missing)} (see --help)")
    return vars(namespace), problems


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    """Group unknown flags, each with the words that follow it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def _parser(kind: type[Any], description: str, words: Sequence[str]) -> _Parser:
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common, num_hidden = _common(kind), 0
    parser.add_argument(ALL_FLAGS, action="help", help="show all flags and exit" if common else argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    if own := vars(kind).get("heading"):  # the flags of the command itself come first
        groups[own] = parser.add_argument_group(own)
    hints, given = get_type_hints(kind), _from_run_file(kind, words)
    for field in dataclasses.fields(kind):
        value = given.get(field.name, field.default)
        required = value is dataclasses.MISSING
        default = "" if required or value is False or value in (None, "", ()) else f" (default: {value})"
        text = field.metadata["help"].replace("%", "%%") + default
        if common and ALL_FLAGS not in words and field.name not in common and "positional" not in field.metadata:
            text, num_hidden = argparse.SUPPRESS, num_hidden + 1
        flag, hint = as_flag(field.name), _without_none(hints[field.name])
        many = get_origin(hint) is tuple
        hint = get_args(hint)[0] if many else hint
        choices = "{" + ",".join(get_args(hint)) + "}" if get_origin(hint) is Literal else None
        heading = _heading(kind, field.name)
        if heading and heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        group = groups.get(heading, parser)
        shared: dict[str, Any] = {"default": value, "required": required, "dest": field.name, "help": text}
        if "positional" in field.metadata:
            metavar = choices or field.name.rstrip("s" if many else "").upper()
            reads = parser.reads(metavar if choices is None else field.name, hint)
            parser.add_argument(field.name, type=reads, nargs="+" if many else None, metavar=metavar, help=text)
        elif hint is bool and Path in get_args(hints[field.name]):
            reads = parser.reads(flag, Path)
            group.add_argument(flag, type=reads, nargs="?", const=True, metavar="PATH", **shared)
            if value:
                group.add_argument(
                    f"--no-{flag[2:]}", action="store_const", const=False, dest=field.name, help="turn it off"
                )
        elif hint is bool:
            switch: Any = argparse.BooleanOptionalAction if value else "store_true"  # --no-FLAG where a run file has it
            group.add_argument(flag, action=switch, default=value, dest=field.name, help=text)
        else:
            metavar = choices or METAVARS.get(hint, hint.__name__.upper())
            reads = parser.reads(flag, hint)
            several: dict[str, Any] = {"nargs": "+", "action": _Several} if many else {}
            group.add_argument(flag, type=reads, metavar=metavar, **several, **shared)
    if num_hidden:
        parser.epilog = f"{num_hidden} more flags: {ALL_FLAGS}"
    places = [action.metavar or "" for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s", *map(str, places), "[FLAGS]"])  # argparse would list all flags, unreadably
    return parser


def _common(kind: Any) -> set[str]:
    """The flags that `-h` shows: those that a command's classes list as `common`, or all where none does."""
    return {name for each in kind.__mro__ for name in vars(each).get("common", ())}


def _heading(kind: Any, name: str) -> str:
    """Heading of a flag in `-h`: `heading` of the class that first has the field; empty without one."""
    classes = (each for each in reversed(kind.__mro__) if name in inspect.get_annotations(each))
    return str(vars(next(classes)).get("heading", ""))


def _from_run_file(kind: Any, argv: Sequence[str]) -> dict[str, Any]:
    """Values of the run file that the command line names, if it does."""
    for field in dataclasses.fields(kind):
        if "run_file" in field.metadata:
            flag = as_flag(field.name)
            for word, following in zip(argv, [*argv[1:], ""], strict=True):
                if word == flag and following:
                    return read_run_file(Path(following), kind)
                if word.startswith(f"{flag}="):
                    return read_run_file(Path(word.partition("=")[2]), kind)
    return {}


def check_subcommand(argv: Sequence[str], names: Sequence[str]) -> None:
    """Check the first word of a command that also works without a subcommand.

    Raises:
        ConfigError: it is neither a flag nor one of `names`.
    """
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        hint = did_you_mean(argv[0], names)
        raise ConfigError(f"unknown subcommand {argv[0]}{hint}; known: {', '.join(names)} (see --help)")


def check_numbers(config: Any) -> None:
    """Check the bounds of numbers, for commands without checks of their own.

    Raises:
        ConfigError: flags that are outside their bounds.
    """
    if problems := list(number_problems(config)):
        raise ConfigError(problems)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(option for option in get_args(hint) if option is not type(None))
    return hint
