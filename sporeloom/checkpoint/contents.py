# SPDX-License-Identifier: Apache-2.0
"""Check the contents of a training checkpoint: exactly the tensors of its model, and the moments of its optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sporeloom.checkpoint.manifest import MANIFEST, Manifest
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.reader import fields_from, is_a
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import FAMILIES
from sporeloom.models.parameters import parameter_shapes

FACTORED = ("adafactor_rows.", "adafactor_columns.")
"""Means of a second moment that is stored as their product, in place of adam_v."""
MOMENTS = ("adam_m.", "adam_v.", *FACTORED)
AVERAGES = "ema."
"""Prefix of the exponential moving averages of weights."""
BESIDE_WEIGHTS = (*MOMENTS, AVERAGES)
"""Prefixes of the tensors that belong to a weight."""
WEIGHTS_ALONE = "weights_alone"
"""Entry of a manifest's state: no run can resume from the checkpoint, but a new one can start from it."""
SHOWN = 8


def logical_name(name: str) -> str:
    """A parameter's name in a checkpoint: the model's own, with `adam_m.` or `adam_v.` before it for its moments."""
    return name.replace("model.", "", 1)


def is_trained(name: str) -> bool:
    """Whether an optimizer updates a parameter; a router's bias moves by its layer's counts."""
    return not name.endswith(".balance_bias")


def is_orthogonalized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a parameter: a matrix, or matrices of experts, but no embedding, head, norm or bias."""
    is_matrix = len(shape) > 1 and name.endswith(".weight")
    return is_matrix and not any(part in name for part in ("embedding", "head.", "norm."))


def state_shape(prefix: str, shape: tuple[int, ...], factored: bool) -> tuple[int, ...] | None:
    """Shape of the optimizer state that one of MOMENTS names, for a parameter of this shape; None: the optimizer
    has no such state of it."""
    is_split = factored and len(shape) > 1
    if prefix in FACTORED:
        return (shape[:1] if prefix == FACTORED[0] else shape[1:]) if is_split else None
    return None if is_split and prefix == "adam_v." else shape


def model_of(manifest: Manifest, folder: Path) -> tuple[str, ModelConfig]:
    """Family and configuration of a checkpoint's model.

    Raises:
        ConfigError: they are missing, unknown or wrong.
    """
    source, family = str(folder / MANIFEST), manifest.model.get("family")
    if family not in FAMILIES:
        raise ConfigError(f"{source}: model.family is {family!r}; known: {', '.join(FAMILIES)}")
    values = {name: value for name, value in manifest.model.items() if name != "family"}
    return str(family), fields_from(ModelConfig, Document(f"{source}: model", values))


def _saved_adapters(values: Any, source: str) -> LoRAConfig | None:
    """The adapters of a checkpoint, if it is one of adapters.

    Raises:
        ConfigError: their configuration cannot be read.
    """
    if not values:
        return None
    document = Document(f"{source}: state.lora", values)
    tables = {name: document.mapping.get(name, {}) for name in ("ranks", "alphas")}
    plain = {name: value for name, value in document.mapping.items() if name not in tables}
    lora = fields_from(LoRAConfig, Document(document.source, plain))
    kinds = {"ranks": int, "alphas": float}
    for name, table in tables.items():
        if not isinstance(table, dict) or not all(is_a(v, kinds[name]) and v > 0 for v in table.values()):
            raise ConfigError(f"{document.source}: {name} must be a mapping of paths to numbers above 0")
    return dataclasses.replace(lora, **tables)


def check_contents(manifest: Manifest, folder: Path) -> None:
    """Check the manifest against the model it names.

    Raises:
        ConfigError: tensors that are missing or too many, of another shape or type; no state to resume.
    """
    _, config = model_of(manifest, folder)
    source, state = folder / MANIFEST, manifest.state
    alone = state.get(WEIGHTS_ALONE) is True
    problems = [
        f"{source}: state.{part} is missing"
        for part in ("data", "optimizer", "schedule")
        if not alone and not isinstance(state.get(part), dict)
    ]
    if problems:
        raise ConfigError(problems)
    optimizer = "sgd" if alone else state["optimizer"].get("name")
    moments, factored = () if optimizer == "sgd" else MOMENTS, optimizer == "adafactor-factored"
    lora = _saved_adapters(state.get("lora"), str(source))
    shapes = lora.shapes(config) if lora else parameter_shapes(config)
    beside = state.get("beside") or {}
    if not isinstance(beside, dict) or not all(is_a(shape, list[int]) for shape in beside.values()):
        raise ConfigError(f"{source}: state.beside must be a mapping of names to shapes")
    shapes |= {name: tuple(shape) for name, shape in beside.items()}
    frozen = state.get("frozen") or []
    if not is_a(frozen, list[str]) or not set(frozen) <= set(shapes):
        raise ConfigError(f"{source}: state.frozen must be a list of names of the model's parameters")
    wanted = dict(shapes)
    for prefix in moments:
        states = {
            prefix + name: state_shape(prefix, shape, factored)
            for name, shape in shapes.items()
            if is_trained(name)
            and name not in frozen
            and not (optimizer == "muon" and prefix == "adam_v." and is_orthogonalized(name, shape))
        }
        wanted |= {name: shape for name, shape in states.items() if shape is not None}
    if not alone and state["optimizer"].get("ema_decay"):
        wanted |= {AVERAGES + name: shape for name, shape in shapes.items() if is_trained(name) and name not in frozen}
    narrow = not alone and state["optimizer"].get("optimizer_state_dtype") == "bfloat16"
    for name, shape in wanted.items():
        dtype = "bfloat16" if narrow and name.startswith(MOMENTS) else "float32"
        entry = manifest.tensors.get(name)
        if entry is None:
            problems.append(f"{source}: {name} {shape} is missing")
        elif (entry.shape, entry.dtype) != (shape, dtype):
            problems.append(f"{source}: {name} is {entry.dtype} {entry.shape}; the model's is {dtype} {shape}")
    problems += [f"{source}: {name} does not belong to the model" for name in manifest.tensors if name not in wanted]
    if problems:
        more = [f"{source}: and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError(problems[:SHOWN] + more)
