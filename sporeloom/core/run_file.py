# SPDX-License-Identifier: Apache-2.0
"""Run files: the flags of a command as YAML, `steps: 20` for `--steps 20`. The config.json of a run is one, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import Reader, read_json, read_yaml

BASE = "base"
"""Key: another run file, relative to this one, whose values hold where this one has none."""
COMMAND_LINE_ONLY = {
    "run": "name other run files by `base`",
    "overwrite": "give --overwrite",
    "launch": "give --launch: launched processes read the file again",
}
OF_A_RUN = "train"
"""Key of config.json under which a run writes its flags."""


def read_run_file(path: Path, kind: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind` that a run file, and those it is based on, give. Paths in it are as on the command
    line: from the working folder.

    Raises:
        ConfigError: all problems of a file: unknown keys, wrong types, files that are based on each other.
    """
    hints, values = get_type_hints(kind), {}
    for document in reversed(based_on(path)):
        reader = Reader(document)
        given = {name: value for name, value in document.mapping.items() if name != BASE and value is not None}
        for name in COMMAND_LINE_ONLY.keys() & given.keys():
            if given.pop(name):  # a run writes `launch: false`
                reader.problem((name,), f"{name} is for the command line; {COMMAND_LINE_ONLY[name]}")
        found = reader.fields(given, kind)
        if reader.problems:
            raise ConfigError(reader.problems)
        values.update({name: _converted(value, hints[name]) for name, value in found.items()})
    return values


def based_on(path: Path) -> list[Document]:
    """List a run file and those it is based on, one after another.

    Raises:
        ConfigError: one cannot be read, or is based on itself.
    """
    documents: list[Document] = []
    while True:
        document = _document(path)
        documents.append(document)
        base = document.mapping.get(BASE)
        if base is None:
            return documents
        path = path.parent / str(base)
        if any(Path(other.source).resolve() == path.resolve() for other in documents):
            raise ConfigError(f"{document.at((BASE,))}: {path} is based on itself")


def _document(path: Path) -> Document:
    if path.suffix != ".json":
        return read_yaml(path)
    document = read_json(path)
    flags = document.mapping.get(OF_A_RUN)
    if not isinstance(flags, dict):
        return document
    lines = {keys[1:]: line for keys, line in document.lines.items() if keys[:1] == (OF_A_RUN,)}
    return Document(document.source, flags, lines)


def _converted(value: Any, hint: Any) -> Any:
    """Convert a plain value to the type of a flag."""
    options = [option for option in (get_args(hint) or (hint,)) if option is not type(None)]
    if Path in options and isinstance(value, str):
        return Path(value)
    return tuple(value) if isinstance(value, list) and tuple in (get_origin(hint), *map(get_origin, options)) else value
