# SPDX-License-Identifier: Apache-2.0
"""Values that a reference implementation computed in a step, read from a file, for a comparison with a recording.

A safetensors or .npz file has unsharded tensors, by name:

before/NAME     parameter NAME before the step
forward/PATH    what Cell PATH returns
after/NAME      parameter NAME after the step
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.runtime.cpu.recording import Array
from sporeloom.runtime.cpu.whole_values import WholeStep, WholeValue

SUFFIXES = (".safetensors", ".npz")
FORWARD = ", forward"


def read_reference(path: Path) -> dict[str, Array]:
    """Read the tensors of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                return {name: file[name] for name in file.files}
        return dict(load_file(path))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as tensors: {error}") from None


def as_step(tensors: dict[str, Array], own: WholeStep, source: Path) -> WholeStep:
    """The tensors of a reference under the keys of a recorded step, in the shapes that it has.

    Raises:
        ConfigError: a tensor is of nothing in the step, or has another number of entries.
    """
    found, problems = WholeStep(), []
    outputs = _outputs(own)
    for name, array in tensors.items():
        group, _, rest = name.partition("/")
        groups: dict[str, Mapping[str, object]] = {"before": own.before, "after": own.after, "forward": outputs}
        known = groups.get(group, {})
        if rest not in known:
            near = did_you_mean(rest, known)
            problems.append(f"{source}: tensor {name}: is of no parameter or Cell of the run{near}")
            continue
        key = outputs[rest] if group == "forward" else rest
        mine = {"before": own.before, "after": own.after, "forward": own.computed}[group][key]
        value = WholeValue(mine.place, name, mine.order)
        value.parts = _in_parts(array, mine.parts)
        if not value.parts:
            shapes = f"{list(array.shape)}, the run has {len(mine.parts)} x {list(mine.parts[0].shape)}"
            problems.append(f"{source}: tensor {name}: its shape is {shapes}")
        {"before": found.before, "after": found.after, "forward": found.computed}[group][key] = value
    if problems or not tensors:
        raise ConfigError(problems or f"{source}: has no tensors")
    return found


def _outputs(own: WholeStep) -> dict[str, str]:
    """Path of a Cell -> key of the last operator in it of the forward pass."""
    found: dict[str, str] = {}
    for key, value in sorted(own.computed.items(), key=lambda item: item[1].order):
        _, _, path = value.place.removesuffix(FORWARD).partition(" of ")
        while value.place.endswith(FORWARD) and path:
            found[path] = key
            path = path.rpartition(".")[0]
    return found


def _in_parts(array: Array, parts: list[Array]) -> list[Array]:
    """A full tensor as the parts of microbatches; none if it does not fit."""
    if array.size == parts[0].size:
        return [array.reshape(parts[0].shape)] * len(parts)
    if array.size == len(parts) * parts[0].size:
        return list(array.reshape(len(parts), *parts[0].shape))
    return []
