# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with other projects' tensor names: read, rename, write. The tables of names are in each family's
weights.py."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.finite import check_finite, narrow
from sporeloom.checkpoint.model_folder import load_weights
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.core.hashes import check_file, check_hashes
from sporeloom.core.lines import first_line
from sporeloom.core.scratch import scratch_folder
from sporeloom.models.weight_names import Name

Tensors = dict[str, NDArray[Any]]

# Not weights: optimizer state, counters and caches that training and inference leave in the reference implementation's files.
_STATE = re.compile(
    r"^(adam_[mv]\.|moments\.|accu_grads\.|golden\.)|(^|\.)(key_past|value_past|is_first_iteration)$"
    r"|^(global_step|learning_rate|beta[12]_power|step_num|epoch_num|loss_scale|scale_sense|current_iterator_step"
    r"|last_overflow_iterator_step|optimizer_\w+)$"
)


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of an `.npz`, a MindSpore `.ckpt`, or a checkpoint folder.

    Raises:
        ConfigError: missing, damaged, or of a kind that is not read here.
    """
    if path.is_dir():
        return load_weights(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                return {name: archive[name] for name in archive.files}
        if path.suffix == ".ckpt":
            return {name: value.asnumpy() for name, value in ms.load_checkpoint(str(path)).items()}
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix}: {first_line(error)}") from None
    raise ConfigError(
        f"{path}: {path.suffix or 'a file without suffix'} cannot be read; give .npz, .ckpt or a checkpoint folder"
    )


def read_rank_files(folder: Path, layouts: Path) -> Tensors:
    """Unsharded tensors from MindSpore's own files: `rank_0/*.ckpt`, ... and the layouts it saved when it compiled
    (`strategy_ckpt_config`), one file or, of a pipeline, a folder with one of each stage.

    Raises:
        ConfigError: missing, or files that MindSpore cannot put together.
    """
    if not sorted(folder.glob("rank_*/*.ckpt")):
        raise ConfigError(f"{folder}: contains no rank_0/*.ckpt, rank_1/*.ckpt, ...")
    if not layouts.exists():
        raise ConfigError(f"{layouts}: there is no such file")
    check_hashes(folder)
    check_file(layouts)
    with scratch_folder() as scratch:
        try:
            if layouts.is_dir():
                merged = scratch / "merged.ckpt"
                ms.merge_pipeline_strategys(str(layouts), str(merged))
                layouts = merged
            ms.transform_checkpoints(str(folder), f"{scratch}/whole", "whole", str(layouts), None)
            (whole,) = scratch.glob("whole/rank_0/*.ckpt")
        except Exception as error:  # of many kinds: MindSpore checks little before it computes
            raise ConfigError(f"{folder}: MindSpore cannot merge these files: {first_line(error)}") from None
        return read_tensors(whole)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write an `.npz` or a MindSpore `.ckpt`.

    Raises:
        ConfigError: another suffix.
    """
    if path.suffix == ".npz":
        write_atomically(path, lambda partial: _save_npz(partial, tensors))
    elif path.suffix == ".ckpt":
        entries = [{"name": name, "data": ms.Tensor(value)} for name, value in tensors.items()]
        write_atomically(path, lambda partial: _save_ckpt(partial, entries))
    else:
        raise ConfigError(f"{path}: write to a .npz or .ckpt file")


def _save_ckpt(path: Path, entries: list[dict[str, Any]]) -> None:
    named = path.with_name(f"{path.name}.ckpt")  # MindSpore insists on the suffix
    try:
        ms.save_checkpoint(entries, str(named))
        named.replace(path)
    finally:
        named.unlink(missing_ok=True)


def _save_npz(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, **tensors)


def count_layers(tensors: Mapping[str, Any], table: Mapping[str, Name]) -> int:
    """Number of repeated layers, by the highest number in a layer's name."""
    patterns = [re.escape(other.name).replace(r"\{i\}", r"(\d+)") for ours, other in table.items() if "{i}" in ours]
    found = [int(m.group(1)) for name in tensors for p in patterns[:1] if (m := re.fullmatch(p, name))]
    return max(found, default=-1) + 1


def to_ours(tensors: Tensors, names: Mapping[str, Name], source: str) -> Tensors:
    """Rename (and transpose) tensors of another project to this package's names.

    Raises:
        ConfigError: a tensor the model needs is missing, one is there that nobody knows, or one does not fit into float32.
    """
    foreign = {other.name for other in names.values()}
    missing = [other.name for other in names.values() if other.name not in tensors]
    unknown = [name for name in tensors if name not in foreign and not _STATE.search(name)]
    problems = [f"{source}: {name} is missing" for name in missing] + [
        f"{source}: {name} is not known" for name in unknown
    ]
    if problems:
        raise ConfigError(problems[:8] + ([f"{source}: and {len(problems) - 8} more"] if len(problems) > 8 else []))
    found = {}
    for ours, other in names.items():
        value = tensors[other.name]
        check_finite({other.name: value}, source)
        value = narrow(value, np.dtype(np.float32), f"{source}: {other.name}")
        found[ours] = np.ascontiguousarray(value.T if other.transposed else value)
    return found


def from_ours(tensors: Tensors, names: Mapping[str, Name]) -> Tensors:
    """Rename (and transpose) this package's tensors to another project's names."""
    return {other.name: tensors[ours].T.copy() if other.transposed else tensors[ours] for ours, other in names.items()}


def rename_aliases(tensors: Tensors, aliases: Mapping[str, str]) -> Tensors:
    """Rewrite other spellings of a name's beginning."""

    def canonical(name: str) -> str:
        for alias, usual in aliases.items():
            if name.startswith(alias):
                return usual + name[len(alias) :]
        return name

    return {canonical(name): value for name, value in tensors.items()}


def dimensions(tensors: Tensors) -> dict[str, int]:
    """Fields of the model's configuration that follow from the tensors' shapes."""
    words = tensors.get("embedding.word.weight")
    if words is None:
        return {}  # the model's parameters are looked for next
    layers = {".".join(name.split(".")[:2]) for name in tensors if name.startswith("layers.")}
    has_query_layer = any(name.startswith("query_layer.") for name in tensors)
    found = {"vocab_size": words.shape[0], "hidden_size": words.shape[1], "num_layers": len(layers) + has_query_layer}
    if "embedding.position.weight" in tensors:
        found["seq_len"] = tensors["embedding.position.weight"].shape[0]
    return found
