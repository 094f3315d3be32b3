# SPDX-License-Identifier: Apache-2.0
"""The one strict reader of YAML and JSON: values are plain and finite, every key occurs once, every mistake has
its line.

Refused: keys given twice, NaN and infinity, tags, anchors that contain themselves or unfold without end, deep nesting.
YAML 1.1's surprises are not followed: 1e-5 is a number; 12:30 and dates are texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.files import read_bytes
from sporeloom.core.lines import first_line
from sporeloom.core.numbers import number_problem

T = TypeVar("T")
Keys = tuple[str | int, ...]
MAX_DEPTH, MAX_VALUES, MAX_BYTES, LONGEST = 64, 100_000, 256 << 20, 100
_KINDS_OF_TAG = {"null": "nothing", "bool": "true or false", "int": "a whole number", "float": "a number"}
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where PyYAML was built with it
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_QUOTED_NAME = re.compile(r"\b(alias|anchor|handle|directive|tag) (?:'[^']*'|\"[^\"]*\")")
_NAME = re.compile(r"[\w.,*|?/ -]+")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def show_key(keys: Keys) -> str:
    """`pipeline.stages[2]`"""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{shown_key(k)}" for k in keys).removeprefix(".")


def shown_key(name: str) -> str:
    """Format a key for a message. One that cannot be a name is not shown: the file may be another one than was
    meant."""
    return _shortened(name) if _NAME.fullmatch(name) else "(a key that is not a name)"


@dataclass
class Document:
    """The contents of a file, with the lines of its keys."""

    source: str
    """Name of the file, for messages."""
    value: Any
    lines: dict[Keys, int] = field(default_factory=dict, repr=False)
    """Line of each key and each entry of a list."""

    def at(self, keys: Keys = ()) -> str:
        """`file:line` of a key, or of the nearest key that the file has."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.source}:{self.lines[keys]}" if keys in self.lines else self.source

    @property
    def mapping(self) -> dict[str, Any]:
        """The full contents, which must be a mapping.

        Raises:
            ConfigError: it is not.
        """
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.source}: a mapping of keys is expected, got {_kind(self.value)}")
        return self.value


def read_text(path: Path) -> str:
    """Read a UTF-8 file of settings.

    Raises:
        ConfigError: missing, unreadable, not a regular file, too long, or not UTF-8.
    """
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{str(path)!r}: cannot be read: {error}") from None


def read_yaml(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: unreadable, not YAML, or what is refused (see above); all of the latter at once.
    """
    return _Yaml(str(path)).read(read_text(path))


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


class _Yaml:
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


def _brief(value: Any) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!")


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


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
            self.problem(keys, f"{show_key(keys) or 'the file'} must be a mapping of keys, got {_kind(value)}")
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
