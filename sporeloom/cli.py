# SPDX-License-Identifier: Apache-2.0
"""A command line from a dataclass: its fields are the flags, their `option(...)` texts the help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sporeloom.errors import ConfigError, did_you_mean
from sporeloom.numbers import as_flag, number_problems
from sporeloom.run_file import read_run_file

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """A field that is a flag; `...` as default makes it required."""
    if default is ...:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def run_file() -> Any:
    """A field that names a run file, which gives the other flags; those on the command line win over it."""
    text = "run file: YAML with these flags as keys (`steps: 20`), or the config.json of a run; flags win over it"
    return dataclasses.field(default=None, metadata={"help": text, "run_file": True})


def argument(help: str) -> Any:
    """A field that is given by its place on the command line."""
    return dataclasses.field(metadata={"help": help, "positional": True})


class _Parser(argparse.ArgumentParser):
    flags: Sequence[str] = ()

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            hint = did_you_mean(message.split(": ")[1].split()[0].split("=")[0], self.flags)
        raise ConfigError([*self.problems, f"{message}{hint} (see --help)"])

    def reads(self, flag: str, kind: Any) -> Callable[[str], Any]:
        """Turns a text into a value; a wrong one becomes a problem, so that all of them are told at once."""

        def read(text: str) -> Any:
            try:
                return _value(text, kind)
            except ValueError as error:
                self.problems.append(f"argument {flag}: {error}")
                return None

        return read


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
        raise ValueError(f"{text}: a file or folder of this machine is wanted")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"invalid {kind.__name__} value: {text!r}") from None


def parse_args(kind: type[T], description: str, argv: Sequence[str] | None = None) -> T:
    """The command line as a `kind`. Types are looked at here, the bounds of numbers by `number_problems`.

    Raises:
        ConfigError: an unknown flag, a missing one, values of the wrong type.
    """
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    if own := vars(kind).get("heading"):  # what is special about a verb comes first
        groups[own] = parser.add_argument_group(own)
    hints, given = get_type_hints(kind), _from_run_file(kind, sys.argv[1:] if argv is None else argv)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = given.get(field.name, field.default)
        required = value is dataclasses.MISSING
        default = "" if required or value in (None, "", (), False) else f" (default: {value})"
        text = field.metadata["help"].replace("%", "%%") + default
        flag, hint = as_flag(field.name), _without_none(hints[field.name])
        many = get_origin(hint) is tuple
        hint = get_args(hint)[0] if many else hint
        choices = "{" + ",".join(get_args(hint)) + "}" if get_origin(hint) is Literal else None
        heading = _heading(kind, field.name)
        if heading and heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        group = groups.get(heading, parser)
        common: dict[str, Any] = {"default": value, "required": required, "dest": field.name, "help": text}
        if "positional" in field.metadata:
            metavar = choices or field.name.rstrip("s" if many else "").upper()
            reads = parser.reads(metavar if choices is None else field.name, hint)
            parser.add_argument(field.name, type=reads, nargs="+" if many else None, metavar=metavar, help=text)
        elif hint is bool:
            switch: Any = argparse.BooleanOptionalAction if value else "store_true"  # --no-FLAG where a run file has it
            group.add_argument(flag, action=switch, default=value, dest=field.name, help=text)
        else:
            metavar = choices or hint.__name__.upper()
            reads = parser.reads(flag, hint)
            group.add_argument(flag, type=reads, nargs="+" if many else None, metavar=metavar, **common)
    places = [action.metavar or "" for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s", *map(str, places), "[FLAGS]"])  # argparse would list all flags, unreadably
    parser.flags = [action.option_strings[-1] for action in parser._actions if action.option_strings]
    values = vars(parser.parse_args(argv))
    if parser.problems:
        raise ConfigError(f"{problem} (see --help)" for problem in parser.problems)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _heading(kind: Any, name: str) -> str:
    """What flags stand under in `-h` that are fields of the class that first has this one, `heading`; none without it."""
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


def check_numbers(config: Any) -> None:
    """For tools without checks of their own.

    Raises:
        ConfigError: flags that are outside their bounds.
    """
    if problems := list(number_problems(config)):
        raise ConfigError(problems)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(option for option in get_args(hint) if option is not type(None))
    return hint
