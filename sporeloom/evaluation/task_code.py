# SPDX-License-Identifier: Apache-2.0
"""Find the code that a task file of the lm-evaluation-harness runs, without running it: its installed tasks are trusted,
a file of somebody else is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError
from sporeloom.core.yaml_text import LOADER, MAX_DEPTH

FLAG = "--trust-remote-code"
SWITCHES = ("unsafe_code", "hf_evaluate", "trust_remote_code")
"""Keys of tasks that run code, unless they are false."""
NO = ("", "~", "null", "false", "no", "off", "n", "0")
OWN_TASKS = Path(__file__).parent / "tasks"
_PLAIN_TAGS = (
    "null",
    "bool",
    "int",
    "float",
    "str",
    "map",
    "seq",
    "timestamp",
    "binary",
    "set",
    "omap",
    "pairs",
    "merge",
)


def code_problems(files: Iterable[Path]) -> list[str]:
    """List where these task files, and those they include, run code, one line each."""
    waiting, seen, problems = [*files], set[Path](), list[str]()
    trusted = [OWN_TASKS.resolve(), *map(Path, _harness_folders())]
    while waiting:
        path = waiting.pop(0).expanduser().resolve()
        if path in seen or any(path.is_relative_to(folder) for folder in trusted):
            continue
        seen.add(path)
        try:
            found = list(_findings(path))
        except ConfigError as error:
            problems += error.problems
            continue
        problems += [f"{path}:{line}: {what}; {FLAG} allows it" for line, what in found if what]
        waiting += [path.parent / name for name in _included(path)]
    return problems


def _harness_folders() -> list[str]:
    spec = find_spec("lm_eval")
    return list(spec.submodule_search_locations or ()) if spec else []


def _events(path: Path) -> Iterator[yaml.Event]:
    """Nodes of a YAML file; anchors are not expanded.

    Raises:
        ConfigError: it cannot be read, or is nested too deeply.
    """
    depth = 0
    try:
        for event in yaml.parse(read_text(path), Loader=LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(f"{path}: nested more than {MAX_DEPTH} deep")
            yield event
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not YAML") from None


def _findings(path: Path) -> Iterator[tuple[int, str]]:
    """List (line, the code that would run) of a file."""
    before = ""
    for event in _events(path):
        line, tag = event.start_mark.line + 1 if event.start_mark else 1, getattr(event, "tag", None)
        if tag and tag != "!" and tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
            yield line, f"the tag {tag[:60]} runs Python code"
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        is_value = isinstance(event, yaml.ScalarEvent | yaml.AliasEvent)
        if is_value and before in SWITCHES and (isinstance(event, yaml.AliasEvent) or value.lower() not in NO):
            yield line, f"{before} runs Python code that is not in this file"
        if before == "dataset_path" and (value.endswith(".py") or (value and _has_script(Path(value)))):
            yield line, "dataset_path names a data set that is a Python program"
        before = value


def _has_script(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.glob("*.py"))
    except (OSError, ValueError):
        return False


def _included(path: Path) -> Iterator[str]:
    """Names of the files that a file includes."""
    before, is_list = "", False
    for event in _events(path):
        if isinstance(event, yaml.SequenceStartEvent | yaml.SequenceEndEvent):
            is_list = before == "include" and isinstance(event, yaml.SequenceStartEvent)
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        if value and (before == "include" or is_list):
            yield value
        before = value
