# SPDX-License-Identifier: Apache-2.0
"""Compare the weights that a run has exported with the states that its chain recorded. Without MindSpore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.adapters import read_adapter
from sporeloom.checkpoint.contents import AVERAGES, BESIDE_WEIGHTS
from sporeloom.checkpoint.manifest import FOLDER, MANIFEST, Manifest, read_manifest
from sporeloom.checkpoint.model_folder import load_config, open_weights
from sporeloom.core.errors import ConfigError
from sporeloom.models.adapters import base_folder, is_adapter_folder
from sporeloom.strategy.tensor_slice import TensorSlice
from sporeloom.train.audit_chain import START, Chain, State, first_difference, has_same_layout, state_of_slices

MODEL, BEST = "checkpoint", "best_checkpoint"
EXPORTS = {MODEL: "", "ema_checkpoint": AVERAGES}
"""Folder of a run -> prefix of its weights in the state, where they are averages."""
Read = Callable[[str, TensorSlice], NDArray[Any]]


@dataclass
class Weights:
    """Result of the comparison, in words."""

    verified: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def verify_weights(chain: Chain, folder: Path, states_folder: str) -> Weights:
    """Compare the tensors of all exported weights with the last state; those of a run that did not end, which another end
    may have written, with all."""
    found, states, last = Weights(), chain.states(), chain.records[-1]["step"]
    is_done = last == chain.starts()[-1][START]["train"].get("steps")
    for name, prefix in EXPORTS.items():
        path = folder / name
        if not path.is_dir():
            if name == MODEL and is_done:
                found.unknown.append(f"{path}: not there")
        elif is_adapter_folder(path) and not _has_base(path):
            found.unknown.append(f"{path}: the model of these adapters is not there")
        else:
            candidates = [last] if is_done else sorted(states, reverse=True)
            try:
                _compare(
                    path, prefix, {step: states.get(step, {}) for step in candidates}, folder / states_folder, found
                )
            except ConfigError as error:
                found.differences.append(error.problems[0])
    if (folder / BEST).is_dir():
        found.unknown.append(f"{folder / BEST}: states of the best validation loss are not recorded")
    return found


def _has_base(folder: Path) -> bool:
    try:
        return base_folder(folder).is_dir()
    except ConfigError:
        return False


def _compare(path: Path, prefix: str, states: Mapping[int, State], states_folder: Path, found: Weights) -> None:
    """Find the state that has the tensors of `path`."""
    shapes, read = _tensors(path)
    difference = None
    for step, state in states.items():
        if not state:
            continue
        recorded = {name: hashes for name, hashes in state.items() if not name.startswith(BESIDE_WEIGHTS)}
        recorded |= {name: state[prefix + name] for name in recorded if prefix + name in state}
        exported = _state_of(shapes, read, states_folder / FOLDER.format(step))
        name = first_difference(recorded, exported)
        if name is None:
            is_exact = has_same_layout(recorded, exported)
            how = "" if is_exact else " (by checksums alone: no checkpoint of that step has the layout of the ranks)"
            found.verified.append(f"{path}: the weights after step {step}, as recorded{how}")
            return
        difference = difference or f"{path}: tensor {name}: not the content recorded after step {step}"
    if difference:
        found.differences.append(difference)
    else:
        found.unknown.append(f"{path}: no state is recorded")


def _tensors(path: Path) -> tuple[Mapping[str, tuple[int, ...]], Read]:
    """Shapes of the tensors of a model or of adapters, and a function that reads a slice."""
    if not is_adapter_folder(path):
        weights = open_weights(path)
        return weights.shapes, weights.read
    values = read_adapter(path, *load_config(base_folder(path))).weights
    return {name: tuple(np.shape(value)) for name, value in values.items()}, lambda name, part: values[name][
        part.slices
    ]


def _state_of(shapes: Mapping[str, tuple[int, ...]], read: Read, checkpoint: Path) -> State:
    """Hashes of tensors in the layout of a checkpoint, or of one rank where it is not there."""
    manifest: Manifest | None = None
    if (checkpoint / MANIFEST).is_file():
        try:
            manifest = read_manifest(checkpoint)
        except ConfigError:
            manifest = None  # which is a difference of its own
    result = {}
    for name, shape in shapes.items():
        entry = manifest.tensors.get(name) if manifest else None
        slices = [part.bounds for part in entry.parts] if entry and entry.shape == shape else [TensorSlice.full(shape)]
        result[name] = state_of_slices(slices, functools.partial(read, name))
    return result
