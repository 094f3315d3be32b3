# SPDX-License-Identifier: Apache-2.0
"""A command line from a dataclass: its fields are the flags, their `option(...)` texts the help."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from mindloom.errors import ConfigError, did_you_mean

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """A field that is a flag; `...` as default makes it required."""
    if default is ...:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def argument(help: str) -> Any:
    """A field that is given by its place on the command line."""
    return dataclasses.field(metadata={"help": help, "positional": True})


class _Parser(argparse.ArgumentParser):
    flags: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            hint = did_you_mean(message.split(": ")[1].split()[0].split("=")[0], self.flags)
        raise ConfigError(f"{message}{hint} (see --help)")


def parse_args(kind: type[T], description: str, argv: Sequence[str] | None = None) -> T:
    """The command line as a `kind`.

    Raises:
        ConfigError: an unknown flag, a missing one, a value of the wrong type.
    """
    parser = _Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING
        default = "" if required or field.default in (None, "", (), False) else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + default
        flag, hint = "--" + field.name.rstrip("_").replace("_", "-"), _without_none(hints[field.name])
        common: dict[str, Any] = {"default": field.default, "required": required, "dest": field.name, "help": text}
        if "positional" in field.metadata:
            choices = get_args(hint) if get_origin(hint) is Literal else None
            many = get_origin(hint) is tuple
            type_ = str if choices else get_args(hint)[0] if many else hint
            metavar = None if choices else field.name.rstrip("s" if many else "").upper()
            parser.add_argument(
                field.name, type=type_, choices=choices, nargs="+" if many else None, metavar=metavar, help=text
            )
        elif hint is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif get_origin(hint) is tuple:
            kind_of_each = get_args(hint)[0]
            parser.add_argument(flag, type=kind_of_each, nargs="+", metavar=kind_of_each.__name__.upper(), **common)
        elif get_origin(hint) is Literal:
            parser.add_argument(flag, choices=get_args(hint), **common)
        else:
            parser.add_argument(flag, type=hint, metavar=hint.__name__.upper(), **common)
    parser.flags = [action.option_strings[-1] for action in parser._actions if action.option_strings]
    values = vars(parser.parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(option for option in get_args(hint) if option is not type(None))
    return hint
