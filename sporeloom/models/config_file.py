# SPDX-License-Identifier: Apache-2.0
"""Model configurations from JSON files: of this package, or published ones (Hugging Face)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import check_file
from sporeloom.core.reader import fields_from, read_json
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import FAMILIES, family_module, size_config
from sporeloom.models.published import PublishedFormat, published_as, read_config

CONFIG = "config.json"


class PublishedModel(NamedTuple):
    """A published model's configuration, and where it came from."""

    family: str
    way: PublishedFormat
    model: ModelConfig
    has_end_token: bool
    """Whether config.json names the token that ends documents."""
    unknown: list[str]
    """Keys that are ignored."""


def _published_types(families: Iterable[str] = FAMILIES) -> dict[str, tuple[str, PublishedFormat]]:
    """The model_type of each published format, with its family."""
    known: dict[str, tuple[str, PublishedFormat]] = {}
    for name in families:
        for way in family_module(name, "weights").PUBLISHED:
            known.setdefault(way.model_type, (name, way))
    return known


def is_published_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of Hugging Face's form: it has a model_type, and does not name a family of this package."""
    model_type = values.get("model_type")
    return "family" not in values and model_type is not None and model_type not in set(FAMILIES) - {*_published_types()}


def read_published_config(document: Document, family: str | None = None) -> PublishedModel:
    """Read a published config.json, of `family` or of the one that knows its model_type.

    Raises:
        ConfigError: an unknown model_type, or another network than this package has, by all keys that say so.
    """
    model_type = str(document.mapping.get("model_type", ""))
    known = _published_types([family] if family else FAMILIES)
    published_as(tuple(way for _, way in known.values()), model_type, document.source)
    family, way = known[model_type]
    try:
        fields, unknown = read_config(way, document.mapping)
    except ConfigError as error:
        raise ConfigError(f"{document.source}: {problem}" for problem in error.problems) from None
    except KeyError as error:
        raise ConfigError(f"{document.source}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{document.source}: {error}") from None
    given = {name: value for name, value in fields.items() if value is not None}
    model = fields_from(ModelConfig, Document(document.source, given))
    return PublishedModel(family, way, model, "eod_id" in fields, unknown)


def config_with_file(path: Path, base: ModelConfig | None, family: str) -> ModelConfig:
    """`base` with the fields of a JSON file, which may be the config.json of a checkpoint folder, or that folder. A published
    one replaces all fields.

    Raises:
        ConfigError: what is wrong with it, or a model of another family.
    """
    path = path / CONFIG if path.is_dir() else path
    check_file(path)
    document = read_json(path)
    is_published = is_published_config(document.mapping)
    found = _family_of(document) or family
    if found != family:
        raise ConfigError(f"{path}: a model of {found}; give --model {found}")
    if is_published:
        return read_published_config(document, family).model
    values = {name: value for name, value in document.mapping.items() if name not in ("family", "model_type")}
    return fields_from(ModelConfig, dataclasses.replace(document, value=values), base)


def named_model(family: str, size: str, path: Path | None) -> ModelConfig:
    """The model of --model, --size and --config, as `with_model_folder` returns them.

    Raises:
        ConfigError: there is none, or what is wrong with the file.
    """
    base = None if path and path.is_dir() else size_config(family, size)  # a folder has a full configuration
    if path:
        return config_with_file(path, base, family)
    assert base
    return base


def _family_of(document: Document) -> str:
    """The family of a config.json; empty if it does not say."""
    values = document.mapping
    return read_published_config(document).family if is_published_config(values) else str(values.get("family", ""))


def is_model_config(path: Path) -> bool:
    """Whether a JSON file is the config.json of a model folder, by its keys.

    Raises:
        ConfigError: it cannot be read.
    """
    value = read_json(path).value
    return isinstance(value, dict) and ("family" in value or is_published_config(value))


@dataclass(frozen=True)
class NamedModel:
    """The flags that name a model, for commands that have others of their own."""

    model: str
    size: str
    config: Path | None = None


F = TypeVar("F")


def with_model_folder(flags: F, default_size: str = "tiny") -> F:
    """The dataclass `flags`, with the family, the name and the path of a folder that its `model` names in place of a family.

    Raises:
        ConfigError: not the folder of a model, or flags that name another model as well.
    """
    given: Any = flags
    folder = model_folder(given.model)
    if folder is None:
        return flags
    if given.config or given.size != default_size:
        raise ConfigError(
            f"--model {folder}: a folder, whose config.json gives the model; leave out --size and --config"
        )
    family = _family_of(read_json(folder / CONFIG))
    if family not in FAMILIES:
        raise ConfigError(f"{folder / CONFIG}: not the configuration of a model")
    changed: F = dataclasses.replace(given, model=family, size=folder.resolve().name, config=folder)
    return changed


def model_folder(model: str) -> Path | None:
    """The folder that --model names; None: a family, or an unknown name."""
    return Path(model) if model not in FAMILIES and Path(model).is_dir() else None
