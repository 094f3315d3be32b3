# SPDX-License-Identifier: Apache-2.0
"""Folders of adapters as PEFT writes them, adapter_config.json and adapter_model.safetensors; read from MindFormers, too.

Such a folder is a checkpoint folder: what its `base_model_name_or_path` names, with the adapters merged in.
Source: PEFT docs/source/developer_guides/checkpoint.md; MindFormers pet/tuners (`tk_delta_lora_a`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.finite import FLOAT32_MAX, FLOAT32_TINY, check_finite, is_finite
from sporeloom.checkpoint.peft_config import PeftConfig, read_peft_config
from sporeloom.checkpoint.tensor_files import (
    TensorDescription,
    numpy_dtype,
    read_float32,
    stored_tensors,
    write_tensor_by_tensor,
)
from sporeloom.checkpoint.tensor_hashes import seal, tensor_damage
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import replaced_folder
from sporeloom.core.reader import read_json
from sporeloom.models.adapters import (
    ADAPTER_CONFIG,
    HEAD,
    LORA_A,
    LORA_B,
    LORA_MASK,
    REWARD,
    TEXT,
    LoRAConfig,
    is_reward_adapter,
    linear_paths,
)
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.parameters import parameter_shapes

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
SCORE = f"{PREFIX}score.weight"
MINDFORMERS = {
    **{"wq": "attention.query", "wk": "attention.key", "wv": "attention.value", "wo": "attention.output"},
    **{"w1": "mlp.gate", "w2": "mlp.down", "w3": "mlp.up"},
}
"""Leaves of MindFormers' Llama -> names of this package."""
IGNORED = (".lora_velora_embed",)
"""Endings of the names of tensors that only training uses."""
MAX_CHANGE = FLOAT32_MAX**0.5
"""Maximum change of a weight by an adapter: norms and attention square its results."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Adapter:
    """Adapters of a model."""

    lora: LoRAConfig
    weights: Weights
    """Parameter names -> A (r, in) and B (out, r); of a reward model also its head (1, hidden_size)."""


def read_adapter(folder: Path, family: str, model: ModelConfig) -> Adapter:
    """Read the adapters of a folder, for the model that is their base.

    Raises:
        ConfigError: another kind of adapter, tensors that match no matrix or are of another shape, matrices without tensors,
            numbers that are not finite; all at once.
    """
    if problem := tensor_damage(folder):
        raise ConfigError(problem)
    document = read_json(folder / ADAPTER_CONFIG)
    spellings = _spellings(family, model)
    names = {name: ours for spelling in spellings for name, ours in spelling.items()}
    stored = stored_tensors([folder / TENSORS])
    found_parts = {key: _parts(key, names) for key in stored}
    config = read_peft_config(document, [*names, *(found[2] for found in found_parts.values() if found)])
    weights: Weights = {}
    head: Weights = {}
    modules: dict[str, str] = {}  # our path -> the module that its tensors are named after
    problems: list[str] = []
    for key, tensor in stored.items():
        if key == SCORE and tensor.shape == (1, model.hidden_size):
            head = {HEAD: read_float32(tensor)}
            continue
        found = found_parts[key]
        if not found:
            if not key.endswith(IGNORED):
                problems.append(f"{folder / TENSORS}: {key} {tensor.shape} matches no matrix of the model")
            continue
        end, paths, module = found
        if twice := [path for path in paths if path + end in weights]:
            problems.append(f"{folder / TENSORS}: {key}: {twice[0]}{end} is given twice")
            continue
        modules |= dict.fromkeys(paths, module)
        weights |= _split(read_float32(tensor), (end, paths), model)
    problems += _shape_problems(folder, config, modules, weights, model)
    problems += _target_problems(document.source, config, modules, spellings)
    if is_reward_adapter(folder) != bool(head):
        problems.append(
            f"{document.source}: task_type is {document.mapping.get('task_type')}, {SCORE} (1, {model.hidden_size}) is "
            + ("there" if head else "not there")
        )
    if problems or not weights:
        raise ConfigError(problems[:8] or [f"{folder / TENSORS}: contains no adapters"])
    adapter = Adapter(_lora(config, modules), {**weights, **head})
    if problems := [f"{folder}: {problem}" for problem in _number_problems(adapter, model)]:
        raise ConfigError(problems[:8])
    return adapter


def _shape_problems(
    folder: Path, config: PeftConfig, modules: Mapping[str, str], weights: Weights, model: ModelConfig
) -> Iterator[str]:
    """List tensors whose rank is not the configuration's, or whose shape is not the model's."""
    wanted = parameter_shapes(model)
    for path, module in sorted(modules.items()):
        outer, inner = wanted[f"{path}.weight"]
        rank = config.rank(module)
        for end, shape in ((LORA_A, (rank, inner)), (LORA_B, (outer, rank))):
            found = tuple(weights[path + end].shape) if path + end in weights else None
            if found != shape:
                yield (f"{folder}: {path}{end} is {found}, the model needs {shape} at rank {rank} of {ADAPTER_CONFIG}")


def _target_problems(
    source: str, config: PeftConfig, modules: Mapping[str, str], spellings: Sequence[Mapping[str, tuple[str, ...]]]
) -> Iterator[str]:
    """List tensors that PEFT would not use, and matrices without the tensors that it would look for."""
    given = set(modules.values())
    spelling = next((each for each in spellings if given <= each.keys()), None)
    if config.target_modules is None or spelling is None:  # MindFormers' names
        return
    if unused := sorted(module for module in given if not config.is_target(module)):
        yield f"{source}: target_modules and what goes with it leave out {_some(unused)}, of which there are tensors"
    if missing := sorted(module for module in spelling.keys() - given if config.is_target(module)):
        yield f"{source}: target_modules names {_some(missing)}, of which there are no tensors"


def write_adapter(
    folder: Path,
    adapter: Adapter,
    family: str,
    model: ModelConfig,
    base: Path,
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Write a folder that PEFT opens, under the names of the first publication of `model`, the base, that has one for
    each matrix; a family without one keeps the names of this package. An older folder of this name is replaced when the
    new one is complete.

    `add_files` puts what else belongs there, the tokenizer, into it.

    Raises:
        ConfigError: numbers that are not finite.
    """
    check_finite(adapter.weights, f"{folder}: the adapters to write")
    paths = adapter.lora.targets(model)
    theirs, every = _published_names(family, model, paths)
    ends = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
    tensors = {PREFIX + theirs[path] + ends[end]: adapter.weights[path + end] for path in paths for end in ends}
    is_reward = HEAD in adapter.weights
    if is_reward:
        tensors[SCORE] = adapter.weights[HEAD]
    config = {
        "peft_type": "LORA",
        "task_type": REWARD if is_reward else TEXT,
        "base_model_name_or_path": os.path.relpath(base.absolute(), folder.absolute()),
        "r": adapter.lora.r,
        "lora_alpha": adapter.lora.lora_alpha,
        "lora_dropout": adapter.lora.lora_dropout,
        "use_rslora": adapter.lora.use_rslora,
        "target_modules": _short_names([theirs[path] for path in paths], every),
        "rank_pattern": {theirs[path]: rank for path, rank in adapter.lora.ranks.items()},
        "alpha_pattern": {theirs[path]: alpha for path, alpha in adapter.lora.alphas.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": ["score"] if is_reward else None,
    }
    with replaced_folder(folder) as partial:
        described = {name: TensorDescription("float32", tuple(value.shape)) for name, value in tensors.items()}
        write_tensor_by_tensor(partial / TENSORS, described, tensors.values(), {"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if add_files:
            add_files(partial)
        seal(partial)


def merge(weights: Mapping[str, NDArray[Any]], adapter: Adapter, sign: float = 1.0) -> dict[str, NDArray[Any]]:
    """Weights W + scale * B A; with `sign` -1 adapters are subtracted again.

    Raises:
        ConfigError: the sum is more than float32 holds.
    """
    result = dict(weights)
    for name in adapter.weights:
        if name.endswith(LORA_A):
            path = name.removesuffix(LORA_A)
            change = adapter.weights[path + LORA_B] @ adapter.weights[name]
            result[f"{path}.weight"] = result[f"{path}.weight"] + np.float32(sign * adapter.lora.scale(path)) * change
            if not is_finite(result[f"{path}.weight"]):
                raise ConfigError(f"{path}.weight with its adapter merged in is not finite in float32")
    return result | {name: value for name, value in adapter.weights.items() if name == HEAD}


def ranks_of_several(adapters: Sequence[Adapter]) -> dict[str, list[int]]:
    """Path of each matrix that any of the adapters is for -> the rank of each there, 0 where it has none."""
    paths = {name.rpartition(".")[0]: None for adapter in adapters for name in adapter.weights}
    return {
        path: [adapter.lora.r_of(path) if path + LORA_A in adapter.weights else 0 for adapter in adapters]
        for path in paths
    }


def put_side_by_side(adapters: Sequence[Adapter]) -> Weights:
    """The parameters of `sporeloom.nn.multi_lora`: each adapter's part of the rows of A and of the columns of B,
    and a table that assigns the parts, its first row for no adapter.

    Raises:
        ConfigError: numbers that are not finite, which would reach the tokens of other adapters, too.
    """
    result: Weights = {}
    for path, ranks in ranks_of_several(adapters).items():
        having = [factors(adapter, path) for adapter, rank in zip(adapters, ranks, strict=True) if rank]
        result[path + LORA_A] = np.concatenate([a for a, _ in having])
        result[path + LORA_B] = np.concatenate([b for _, b in having], axis=1)
        owners = np.repeat(np.arange(1, 1 + len(adapters)), ranks)
        result[path + LORA_MASK] = (np.arange(1 + len(adapters))[:, None] == owners).astype(np.float32)
    check_finite(result, "adapters, B with their scales")
    return result


def factors(adapter: Adapter, path: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A (r, in) and B (out, r) of the adapter of a matrix, B with its scale.

    Raises:
        ConfigError: numbers that are not finite.
    """
    a, b = adapter.weights[path + LORA_A], np.float32(adapter.lora.scale(path)) * adapter.weights[path + LORA_B]
    check_finite({path + LORA_A: a, path + LORA_B: b}, "adapters, B with their scales")
    return a, b


def empty_adapter(model: ModelConfig, rank: int) -> Adapter:
    """Adapters of all matrices that can have one, which change nothing: memory for others of up to this rank."""
    lora = LoRAConfig(r=rank, target_modules=tuple(linear_paths(model)))
    return Adapter(lora, {name: np.zeros(shape, np.float32) for name, shape in lora.shapes(model).items()})


def _spellings(family: str, model: ModelConfig) -> list[dict[str, tuple[str, ...]]]:
    """The matrices' names, this package's first, then those of each publication -> paths in this package, of which
    several are its rows."""
    linear = linear_paths(model)
    spellings: list[dict[str, tuple[str, ...]]] = [{path: (path,) for path in linear}]
    for way in family_module(family, "weights").PUBLISHED:
        try:
            tensors = way.tensors(model)
        except ConfigError:
            continue  # a network of this family that is not published so
        names = {
            theirs: tuple(part.name.removesuffix(".weight") for part in parts) for theirs, parts in tensors.items()
        }
        spellings.append(
            {
                theirs.removesuffix(".weight"): ours
                for theirs, ours in names.items()
                if set(ours) <= set(linear) and theirs.endswith(".weight")
            }
        )
    return spellings


def _parts(key: str, names: Mapping[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...], str] | None:
    """(end of the name, paths in this package, the module they belong to) of a tensor's name, if there is such a
    matrix."""
    if peft := re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", key):
        ours = names.get(peft[1])
        return (LORA_A if peft[2] == "A" else LORA_B, ours, peft[1]) if ours else None
    if theirs := re.fullmatch(
        r"(?:model\.)*layers\.(\d+)\.(?:attention|feed_forward)\.(\w+)\.\w+_delta_lora_([ab])", key
    ):
        path = f"layers.{theirs[1]}.{MINDFORMERS.get(theirs[2])}"
        return (LORA_A if theirs[3] == "a" else LORA_B, (path,), key.rpartition(".")[0]) if path in names else None
    return None


def _split(value: NDArray[np.float32], found: tuple[str, tuple[str, ...]], model: ModelConfig) -> Weights:
    """Split an adapter of a matrix that is several here: each has the same A, and its rows of B."""
    end, paths = found
    if end == LORA_A or len(paths) == 1:
        return {path + end: value for path in paths}
    shapes, result, start = parameter_shapes(model), {}, 0
    for path in paths:
        stop = start + shapes[f"{path}.weight"][0]
        result[path + end] = value[start:stop]
        start = stop
    return result


def _lora(config: PeftConfig, modules: Mapping[str, str]) -> LoRAConfig:
    """The adapters' configuration in this package's names: for each path the values of the module that its tensors
    are named after."""
    ranks = {path: config.rank(module) for path, module in sorted(modules.items())}
    alphas = {path: float(config.alpha(module)) for path, module in sorted(modules.items())}
    return dataclasses.replace(
        config.lora,
        target_modules=tuple(ranks),
        ranks={path: rank for path, rank in ranks.items() if rank != config.lora.r},
        alphas={path: alpha for path, alpha in alphas.items() if alpha != config.lora.lora_alpha},
    )


def _number_problems(adapter: Adapter, model: ModelConfig) -> Iterator[str]:
    """List what would not be finite in computations: scale, B with the scale, B A with it."""
    largest = float(ml_dtypes.finfo(numpy_dtype(model.compute_dtype)).max)
    for path in [name.removesuffix(LORA_A) for name in adapter.weights if name.endswith(LORA_A)]:
        scale, rank = adapter.lora.scale(path), adapter.lora.r_of(path)
        if not FLOAT32_TINY <= scale <= FLOAT32_MAX:
            yield f"{path}: lora_alpha and rank {rank} make a scale of {scale}"
            continue
        a, b = (float(np.abs(adapter.weights[path + end]).max(initial=0)) for end in (LORA_A, LORA_B))
        if (top := max(a, scale * b)) > largest:
            yield f"{path}: numbers up to {top:.3g} in A or scale * B; {model.compute_dtype} ends at {largest:.3g}"
        elif scale * rank * a * b > MAX_CHANGE and (found := _largest_change(adapter, path)) > MAX_CHANGE:
            yield (
                f"{path}: lora_alpha and rank {rank} make a scale of {scale:.3g}, and scale * B A is up to {found:.3g}; "
                f"norms square numbers, and those of float32 end at {FLOAT32_MAX:.3g}"
            )


def _largest_change(adapter: Adapter, path: str) -> float:
    b, a = (adapter.weights[path + end].astype(np.float64) for end in (LORA_B, LORA_A))
    return float(np.abs(adapter.lora.scale(path) * (b @ a)).max())


def _published_names(family: str, model: ModelConfig, paths: list[str]) -> tuple[dict[str, str], list[str]]:
    """Path in this package -> the matrix's name where the model is published, of all matrices that have one of
    their own there; and the names of all modules there."""
    for way in family_module(family, "weights").PUBLISHED:
        try:
            way.write(model)
            tensors = way.tensors(model)
        except ConfigError:
            continue
        whole = {
            parts[0].name.removesuffix(".weight"): theirs.removesuffix(".weight")
            for theirs, parts in tensors.items()
            if len(parts) == 1 and theirs.endswith(".weight")
        }
        if all(path in whole for path in paths):
            modules = [name.removesuffix(".weight") for name in tensors]
            return {path: whole[path] for path in linear_paths(model) if path in whole}, modules
    modules = [name.removesuffix(".weight") for name in parameter_shapes(model)]
    return {path: path for path in linear_paths(model)}, modules


def _short_names(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Names of matrices; those in all layers by their last component."""
    leaves = {name.rpartition(".")[2] for name in chosen}
    whole = {leaf for leaf in leaves if all(name in chosen for name in every if name.rpartition(".")[2] == leaf)}
    return sorted(whole | {name for name in chosen if name.rpartition(".")[2] not in whole})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
