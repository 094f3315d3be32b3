# SPDX-License-Identifier: Apache-2.0
"""Formats in which models are published on Hugging Face: config.json and the names of weights, in both directions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import Shapes, parameter_shapes
from sporeloom.models.parts import attention, mlp, norm, tables
from sporeloom.models.published_keys import TrackedKeys, key_problems, unknown_keys
from sporeloom.models.rope_scaling import read_scaling

LAYER = "{i}"
"""In a name: the number of a layer."""
BEHIND = "{n}"
"""In a name: the number after the last layer's."""
MTP = "{m}"
"""In a name: the number of a multi-token prediction layer, here from 0, published after those of the layers."""
EXPERT = "{e}"
"""In a name: the number of an expert. Published experts are separate tensors, here they are one tensor with a dim
for the expert."""


COPY_FIELDS = {"embedding.word.weight": "mtp_repeats_embedding", "head.weight": "mtp_repeats_head"}
"""Parameter -> the field that says whether published layers of multi-token prediction repeat it."""


class ParameterPart(NamedTuple):
    """A parameter, or one expert's slice of it."""

    name: str
    expert: int | None = None

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Shape of it, by the shapes of all parameters."""
        whole = shapes[self.name]
        return whole if self.expert is None else whole[1:]


@dataclass(frozen=True)
class PublishedFormat:
    """One published format of a family's models."""

    model_type: str
    """model_type in config.json."""
    names: Mapping[str, tuple[str, ...]]
    """Published name -> parameters here; the rows of several follow each other. Parameters that a model does not
    have are left out."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Convert their config.json to fields of the model configuration.

    Raises:
        ConfigError: a network that cannot be expressed here.
    """
    write: Callable[[ModelConfig], dict[str, Any]]
    """Convert a model configuration to their config.json.

    Raises:
        ConfigError: a network that it cannot express.
    """
    ignored: str = r"(^|\.)(inv_freq|kv_cache_(scale|offset))$"
    """Names that are not weights: buffers of RoPE, scales of int8 caches."""
    first_layer: int = 0
    copies: Mapping[str, str] = field(default_factory=dict)
    """Published name -> parameter that it may repeat, in which case it is left out."""

    def tensors(self, config: ModelConfig) -> dict[str, tuple[ParameterPart, ...]]:
        """Published name -> parameters, for one model.

        Raises:
            ConfigError: it has parameters that they have no name for.
        """
        shapes, result = parameter_shapes(config), {}
        num_experts = config.experts.num_experts if config.experts else 0
        for theirs, ours in self.names.items():
            numbers = config.num_layers if LAYER in theirs else config.num_mtp_layers if MTP in theirs else 1
            for layer in range(numbers):
                number = str(layer + self.first_layer + (0 if LAYER in theirs else config.num_layers))
                names = [name.replace(LAYER, str(layer)).replace(MTP, str(layer)) for name in ours]
                if names[0] not in shapes:
                    continue
                for expert in range(num_experts) if EXPERT in theirs else (None,):
                    found = theirs.replace(LAYER, number).replace(MTP, number).replace(BEHIND, number)
                    found = found.replace(EXPERT, str(expert))
                    result[found] = tuple(ParameterPart(name, expert) for name in names)
        named = {part.name for parts in result.values() for part in parts}
        if unnamed := [name for name in shapes if name not in named]:
            raise ConfigError(
                f"{self.model_type} has no name for {', '.join(unnamed[:4])}{', ...' * (len(unnamed) > 4)}"
            )
        return result

    def repeated(self, config: ModelConfig, only_of: Collection[str] | None = None) -> dict[str, str]:
        """Published name of what may be stored twice -> name of the tensor that it repeats. `only_of`: copies of these
        parameters alone."""
        numbers = range(
            config.num_layers + self.first_layer, config.num_layers + self.first_layer + config.num_mtp_layers
        )
        head = "embedding.word.weight" if config.tied_embedding else "head.weight"
        return {
            theirs.replace(MTP, str(number)): str(self.name_of(head if ours == "head.weight" else ours))
            for theirs, ours in self.copies.items()
            for number in numbers
            if only_of is None or ours in only_of
        }

    def copies_of(self, config: ModelConfig) -> dict[str, str]:
        """Published name of each copy that this model is published with -> name of the tensor that it repeats."""
        return self.repeated(config, [name for name, field in COPY_FIELDS.items() if getattr(config, field)])

    def with_copies(self, config: ModelConfig, found: Collection[str]) -> ModelConfig:
        """The model as published with the copies `found`, of which one counts if every layer that may have it does."""
        has = {field: self.repeated(config, [name]).keys() for name, field in COPY_FIELDS.items()}
        fields: dict[str, Any] = {field: bool(names) and names <= set(found) for field, names in has.items()}
        return dataclasses.replace(config, **fields) if any(fields.values()) else config

    def name_of(self, ours: str) -> str | None:
        """Published name of a parameter that has one of its own and belongs to no layer."""
        return next((theirs for theirs, parts in self.names.items() if parts == (ours,)), None)

    def shapes(self, config: ModelConfig) -> Shapes:
        """Shape of each published tensor."""
        own = parameter_shapes(config)
        return {
            theirs: (sum(part.shape(own)[0] for part in parts), *parts[0].shape(own)[1:])
            for theirs, parts in self.tensors(config).items()
        }

    def problems(self, found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> list[str]:
        """List missing and unknown tensors of a published folder, and those of other shapes."""
        wanted = self.shapes(config)
        problems = [f"{name} {shape} is missing" for name, shape in wanted.items() if name not in found]
        for name, shape in found.items():
            if name not in wanted:
                if not re.search(self.ignored, name):
                    problems.append(f"{name} {shape} is not known")
            elif shape != wanted[name]:
                problems.append(f"{name} is {shape}, its config.json makes it {wanted[name]}")
        return problems


def published_as(ways: tuple[PublishedFormat, ...], model_type: str, source: str) -> PublishedFormat:
    """The format of that `model_type`.

    Raises:
        ConfigError: there is none.
    """
    known = [way.model_type for way in ways]
    if model_type not in known:
        raise ConfigError(
            f"{source}: model_type {model_type!r} is unknown{did_you_mean(model_type, known)}; known: {', '.join(known)}"
        )
    return ways[known.index(model_type)]


def read_config(way: PublishedFormat, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Model configuration from a config.json; and its keys that are unknown here.

    Raises:
        ConfigError: a network that cannot be expressed here, by any of its keys.
        KeyError: a key that is needed is missing.
    """
    asked, problems = TrackedKeys(values), Problems()
    fields = problems.of(way.read, asked)
    problems += key_problems(asked)
    problems.raise_if_any()
    assert fields is not None
    return fields, unknown_keys(asked)


def only(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check keys of a config.json against the one supported value each, or a tuple of equivalent ones. A key that
    is absent is fine.

    Raises:
        ConfigError: another value.
    """
    choices = {key: value if isinstance(value, tuple) else (value,) for key, value in wanted.items()}
    wrong = [key for key, fine in choices.items() if values.get(key, fine[0]) not in (*fine, None)]
    if wrong:
        raise ConfigError(f"{key} is {values[key]!r}; only {choices[key][0]!r} is supported" for key in wrong)


def require(config: ModelConfig, parts: Mapping[str, Any], name: str) -> None:
    """Check a configuration against the parts that every model of a kind has.

    Raises:
        ConfigError: another part.
    """
    if wrong := [field for field, part in parts.items() if getattr(config, field) != part]:
        told = ", ".join(f"{field} {getattr(config, field)!r} instead of {parts[field]!r}" for field in wrong[:3])
        raise ConfigError(f"not a network that can be written as {name}: {told}")


class Rope(NamedTuple):
    """Rotary positions of a config.json."""

    theta: float | None
    rotated: float | None
    """Fraction of each head's features that is rotated."""
    scaling: dict[str, Any] | None = None
    """Fields of `RopeScaling`; None: unscaled angles."""


def read_rope(values: Mapping[str, Any]) -> Rope:
    """Read them from a config.json, wherever transformers 4 (`rope_theta`, `rope_scaling`) and 5
    (`rope_parameters`, which counts where both are there) write it.

    Raises:
        ConfigError: angles that are scaled in another way, or one thing said twice.
    """
    problems = Problems()
    inner: dict[str, dict[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key) or {}
        if isinstance(given, dict):
            inner[key] = given
        else:
            problems += [f"{key} must be a mapping of keys, got {given!r}"]
    theta, rotated = (
        _rope_number(name, values.get(name), inner, problems) for name in ("rope_theta", "partial_rotary_factor")
    )
    seq_len = values.get("max_position_embeddings")
    scalings = {key: problems.of(lambda key=key: read_scaling(key, inner[key], seq_len)) for key in inner if inner[key]}
    scaled = [scaling for scaling in scalings.values() if scaling]
    if len(scaled) > 1 and scaled[0] != scaled[1]:
        problems += ["rope_parameters and rope_scaling contradict each other; leave one"]
    problems.raise_if_any()
    return Rope(theta, rotated, scaled[0] if scaled else None)


def _rope_number(name: str, outer: Any, inner: Mapping[str, Mapping[str, Any]], problems: Problems) -> float | None:
    said = {f"{key}.{name}": given[name] for key, given in inner.items() if given.get(name) is not None}
    if len(set(map(str, said.values()))) > 1:
        told = " and ".join(f"{place} {value!r}" for place, value in said.items())
        problems += [f"{told} contradict each other; leave one"]
    number = next(iter(said.values()), outer)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
        problems += [f"{name} must be a number, got {number!r}"]
        return None
    return None if number is None else float(number)


def rope_theta(rope: Rope, default: float | None = None) -> float:
    """Raises:
    KeyError: there is none, and no default.
    """
    theta = default if rope.theta is None else rope.theta
    if theta is None:
        raise KeyError("rope_theta")
    return theta


def end_tokens(values: Mapping[str, Any], key: str = "eos_token_id") -> dict[str, Any]:
    """eod_id, loss_ignore_id and stop_ids of a config.json, whose eos_token_id is one token or a list."""
    found = values.get(key)
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    return {"eod_id": tokens[0], "loss_ignore_id": tokens[0], "stop_ids": tokens[1:]} if tokens else {}


def eos_token_id(config: ModelConfig) -> int | list[int]:
    """The tokens as in a config.json."""
    return [config.eod_id, *config.stop_ids] if config.stop_ids else config.eod_id


def llama_names(**more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names of Llama and similar models; `more` replaces or adds some of a layer, with __ for a dot."""
    layer: dict[str, tuple[str, ...]] = {
        **{f"{published}.weight": (f"{name}.weight",) for published, name in norm.LLAMA_NAMES.items()},
        **{f"mlp.{published}.weight": (f"mlp.{name}.weight",) for published, name in mlp.LLAMA_NAMES.items()},
        **{
            f"self_attn.{published}.{kind}": (f"attention.{name}.{kind}",)
            for published, name in attention.LLAMA_NAMES.items()
            for kind in ("weight", "bias")
        },
        **{name.replace("__", "."): parts for name, parts in more.items()},
    }
    words, *last = [(f"{published}.weight", (f"{name}.weight",)) for published, name in tables.LLAMA_NAMES.items()]
    path = f"layers.{LAYER}."
    return {
        words[0]: words[1],
        **{f"model.{path}{name}": tuple(path + part for part in parts) for name, parts in layer.items()},
        **dict(last),
    }
