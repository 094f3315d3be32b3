# SPDX-License-Identifier: Apache-2.0
"""The one strict reader of YAML and JSON: values are plain and finite, every key occurs once, every mistake has
its line.

Refused: keys given twice, NaN and infinity, tags, anchors that contain themselves or unfold without end, deep nesting.
YAML 1.1's surprises are not followed: 1e-5 is a number; 12:30 and dates are texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sporeloom.core.document import Document, Keys, kind_of, read_text, shortened, show_key, shown_key
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.numbers import number_problem
from sporeloom.core.yaml_text import YamlReader

T = TypeVar("T")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def read_yaml(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: unreadable, not YAML, or what is refused (see above); all of the latter at once.
    """
    return YamlReader(str(path)).read(read_text(path))


def read_json(path: Path) -> Document:
    """Read a JSON file.

    Raises:
        ConfigError: unreadable, not JSON, or what is refused (see above).
    """
    text = read_text(path)
    return Document(str(path), parse_json(text, str(path)), _json_lines(text))


def parse_json(text: str | bytes, source: str, finite: bool = True) -> Any:
    """Read a JSON text. `finite`: refuse NaN and infinity, too.

    Raises:
        ConfigError: not JSON, a key given twice, nested too deeply, a number that is none.
    """

    def refuse(what: str) -> NoReturn:
        raise ConfigError(f"{source}: {what}")

    def number(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) or not finite else refuse(f"{literal} is not a finite number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            refuse(f"{_line_of_second(text, name)}{shown_key(name)} is given twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once, parse_float=number, parse_constant=number)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from None
    except ValueError as error:  # not UTF-8, numbers of thousands of digits
        raise ConfigError(f"{source}: not JSON: {str(error).split(';')[0]}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not JSON that can be read: nested too deeply") from None


def _json_walk(text: str) -> Iterator[tuple[Keys, int]]:
    """(keys, line) of each key and each entry of a list, in the order of the text."""
    stack: list[tuple[Keys, bool, int]] = []  # where we are, whether in a mapping, how many entries before
    line, place, key = 1, 0, ""
    expects_key = False
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        line, place = line + text.count("\n", place, match.start()), match.start()
        if token in "}]":
            stack = stack[:-1]
            expects_key = False
        elif token == ",":
            if stack:
                stack[-1] = (*stack[-1][:2], stack[-1][2] + 1)
                expects_key = stack[-1][1]
        elif token == ":":
            expects_key = False
        elif expects_key:
            key = json.loads(token) if token.startswith('"') else token
            yield (*stack[-1][0], key), line
        else:
            here: Keys = ()
            if stack:
                here = (*stack[-1][0], key if stack[-1][1] else stack[-1][2])
                if not stack[-1][1]:
                    yield here, line
            if token in "{[":
                stack.append((here, token == "{", 0))
                expects_key = token == "{"


def _json_lines(text: str) -> dict[Keys, int]:
    return dict(_json_walk(text)) if len(text) < 1 << 20 else {}  # larger ones are machines' work


def _line_of_second(text: str | bytes, key: str) -> str:
    """`line 3: ` of the second occurrence of a key in a mapping; empty for a text of one line."""
    seen: set[Keys] = set()
    text = text if isinstance(text, str) else text.decode(errors="replace")
    for keys, line in _json_walk(text) if "\n" in text.strip() else ():
        if keys in seen and keys[-1] == key:
            return f"line {line}: "
        seen.add(keys)
    return ""


def _brief(value: Any) -> str:
    return shortened(repr(value))


class Reader:
    """Builds dataclasses from a document, by their declared types; collects problems."""

    def __init__(self, document: Document, problems: list[str] | None = None):
        self.document = document
        self.problems: list[str] = [] if problems is None else problems

    def problem(self, keys: Keys, text: str) -> None:
        self.problems.append(f"{self.document.at(keys)}: {text}")

    def known(self, value: Any, keys: Keys, known: Sequence[str]) -> dict[str, Any]:
        """Read the entries of a mapping; unknown keys become problems."""
        if not isinstance(value, dict):
            self.problem(keys, f"{show_key(keys) or 'the file'} must be a mapping of keys, got {kind_of(value)}")
            return {}
        for name in value:
            if name not in known:
                where, hint = (*keys, name), did_you_mean(name, known)
                self.problem(where, f"{show_key(where)} is unknown{hint}; known: {', '.join(known)}")
        return {name: entry for name, entry in value.items() if name in known}

    def fields(self, value: Any, kind: Any, keys: Keys = (), skip: Sequence[str] = ()) -> dict[str, Any]:
        """Read the values of a dataclass's fields. `skip`: fields that are known but not read here."""
        hints = get_type_hints(kind, include_extras=True)
        names = [f.name for f in dataclasses.fields(kind) if f.init and not f.metadata.get("hidden")]
        return {
            name: self.value(entry, hints[name], (*keys, name))
            for name, entry in self.known(value, keys, names).items()
            if name not in skip
        }

    def value(self, value: Any, hint: Any, keys: Keys) -> Any:
        """Read one value of the type `hint`."""
        if dataclasses.is_dataclass(hint):
            before, values = len(self.problems), self.fields(value, hint, keys)
            if missing := _missing(hint, values):
                self.problem(keys, f"{show_key(keys)}: {', '.join(missing)} missing")
            if len(self.problems) > before:
                return None
            try:
                return hint(**values)  # type: ignore[operator]
            except ConfigError as error:
                self.problems += [f"{self.document.at(keys)}: {problem}" for problem in error.problems]
                return None
        if get_origin(hint) in (types.UnionType, Union):
            return self._union(value, get_args(hint), keys)
        if get_origin(hint) is list and isinstance(value, list):
            return [self.value(entry, get_args(hint)[0], (*keys, i)) for i, entry in enumerate(value)]
        if not is_a(value, hint):
            self.problem(keys, f"{show_key(keys)} must be {describe(hint)}, got {_brief(value)}")
        elif problem := number_problem(value, hint):
            self.problem(keys, f"{show_key(keys)} {problem}, got {_brief(value)}")
        return value

    def _union(self, value: Any, options: tuple[Any, ...], keys: Keys) -> Any:
        for option in options:
            trial = Reader(self.document)
            result = trial.value(value, option, keys)
            fits = is_a(value, option) or (dataclasses.is_dataclass(option) and isinstance(value, dict))
            if not trial.problems or fits:
                self.problems += trial.problems
                return result
        wanted = " or ".join(describe(option) for option in options if option is not type(None))
        self.problem(keys, f"{show_key(keys)} must be {wanted}, got {_brief(value)}")
        return None


def fields_from(kind: type[T], document: Document, base: T | None = None) -> T:
    """Build a dataclass from a document. Fields that it does not have are as in `base`, or have their defaults.

    Raises:
        ConfigError: every unknown, missing or wrong field, and what the dataclass itself refuses.
    """
    reader = Reader(document)
    values = reader.fields(document.mapping, kind)
    if base is None and (missing := _missing(kind, values)) and not reader.problems:
        reader.problem((), f"{', '.join(missing)} missing")
    if reader.problems:
        raise ConfigError(reader.problems)
    try:
        return kind(**values) if base is None else dataclasses.replace(base, **values)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{document.source}: {problem}" for problem in error.problems) from None


def _missing(kind: Any, values: Mapping[str, Any]) -> list[str]:
    needed = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    return [name for name in needed if name not in values]


def is_a(value: Any, hint: Any) -> bool:
    """Whether a plain value has a type, numbers' bounds aside."""
    if get_origin(hint) is Annotated:
        return is_a(value, get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        return any(is_a(value, option) for option in get_args(hint))
    if hint is type(None):
        return value is None
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if (origin := get_origin(hint) or hint) and isinstance(origin, type) and issubclass(origin, dict):
        return isinstance(value, dict)
    if get_origin(hint) in (list, tuple):
        return isinstance(value, list) and all(is_a(entry, get_args(hint)[0]) for entry in value)
    if hint is Path:
        return isinstance(value, str) and bool(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or (isinstance(hint, type) and isinstance(value, hint))


def describe(hint: Any) -> str:
    """Describe a type in messages."""
    if get_origin(hint) is Annotated:
        return describe(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return f"a list of {describe(get_args(hint)[0]).removeprefix('a ')}s"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(f"{f.name}: ..." for f in dataclasses.fields(hint)) + "}"
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a file name",
    }
    return names.get(hint) or ("a mapping of keys" if get_origin(hint) is dict else str(hint))
