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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.checkpoint.tensor_files import Described, read_float32, stored_tensors, write_tensor_by_tensor
from sporeloom.errors import ConfigError
from sporeloom.files import replaced_folder
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
from sporeloom.reader import Document, fields_from, read_json

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
SCORE = f"{PREFIX}score.weight"
SAVED_OF_REWARD = {"score", "classifier"}
"""PEFT's `modules_to_save` of a reward model: names that its head may have."""
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "lora_bias": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
}
"""What adapters of other kinds have otherwise. Any other value is an error; how A and B were drawn at first is not asked."""
MINDFORMERS = {
    **{"wq": "attention.query", "wk": "attention.key", "wv": "attention.value", "wo": "attention.output"},
    **{"w1": "mlp.gate", "w2": "mlp.down", "w3": "mlp.up"},
}
"""Leaves of MindFormers' Llama -> ours."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Adapter:
    """Adapters of a model."""

    lora: LoRAConfig
    weights: Weights
    """Our parameters' names -> A (r, in) and B (out, r); of a reward model its head (1, hidden_size), too."""


def read_adapter(folder: Path, family: str, model: ModelConfig) -> Adapter:
    """The adapters of a folder, for the model that is their base.

    Raises:
        ConfigError: another kind of adapter, tensors that match no matrix or are of another shape, matrices without theirs.
    """
    document = read_json(folder / ADAPTER_CONFIG)
    if wrong := [key for key, value in PLAIN.items() if document.mapping.get(key, value) != value]:
        raise ConfigError(
            f"{document.source}: {key} is {document.mapping[key]!r}; only {PLAIN[key]!r} is built here" for key in wrong
        )
    if not set(document.mapping.get("modules_to_save") or ()) <= SAVED_OF_REWARD:
        raise ConfigError(
            f"{document.source}: modules_to_save is {document.mapping['modules_to_save']!r}; only a reward model's score is "
            "read here"
        )
    names = _modules(family, model)
    weights: Weights = {}
    head, problems = {}, []
    for key, tensor in stored_tensors([folder / TENSORS]).items():
        if key == SCORE and tensor.shape == (1, model.hidden_size):
            head = {HEAD: read_float32(tensor)}
            continue
        found = _parts(key, names)
        if not found:
            problems.append(f"{folder / TENSORS}: {key} {tensor.shape} matches no matrix of the model")
            continue
        value = read_float32(tensor)
        weights |= _split(value, found, model)
    lora = _described(document, weights, names)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    wanted = parameter_shapes(model)
    for path in sorted({name.rpartition(".")[0] for name in weights}):
        outer, inner = wanted[f"{path}.weight"]
        rank = lora.r_of(path)
        for end, shape in ((LORA_A, (rank, inner)), (LORA_B, (outer, rank))):
            if shapes.get(path + end) != shape:
                problems.append(f"{folder}: {path}{end} is {shapes.get(path + end)}, the model wants {shape}")
    if is_reward_adapter(folder) != bool(head):
        problems.append(
            f"{document.source}: task_type is {document.mapping.get('task_type')}, {SCORE} (1, {model.hidden_size}) is "
            + ("there" if head else "not there")
        )
    if problems or not weights:
        raise ConfigError(problems[:8] or [f"{folder / TENSORS}: holds no adapters"])
    return Adapter(lora, {**weights, **head})


def write_adapter(
    folder: Path,
    adapter: Adapter,
    family: str,
    model: ModelConfig,
    base: Path,
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Write a folder that PEFT opens, under the names of the first publication of `model`, the base, that has one for each
    matrix; a family without one keeps ours. An older folder of this name is replaced when the new one is complete.

    `add_files` puts what else belongs there, the tokenizer, into it.
    """
    paths = adapter.lora.targets(model)
    theirs = _published_names(family, model, paths)
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
        "target_modules": _short_names([theirs[path] for path in paths], list(theirs.values())),
        "rank_pattern": {theirs[path]: rank for path, rank in adapter.lora.ranks.items()},
        "alpha_pattern": {theirs[path]: alpha for path, alpha in adapter.lora.alphas.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": ["score"] if is_reward else None,
    }
    with replaced_folder(folder) as partial:
        described = {name: Described("float32", tuple(value.shape)) for name, value in tensors.items()}
        write_tensor_by_tensor(partial / TENSORS, described, tensors.values(), {"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if add_files:
            add_files(partial)


def merge(weights: Mapping[str, NDArray[Any]], adapter: Adapter, sign: float = 1.0) -> dict[str, NDArray[Any]]:
    """Weights W + scale * B A; with `sign` -1 adapters are taken out again."""
    result = dict(weights)
    for name in adapter.weights:
        if name.endswith(LORA_A):
            path = name.removesuffix(LORA_A)
            change = adapter.weights[path + LORA_B] @ adapter.weights[name]
            result[f"{path}.weight"] = result[f"{path}.weight"] + np.float32(sign * adapter.lora.scale(path)) * change
    return result | {name: value for name, value in adapter.weights.items() if name == HEAD}


def ranks_of_several(adapters: Sequence[Adapter]) -> dict[str, list[int]]:
    """Path of each matrix that any of the adapters is for -> the rank of each there, 0 where it has none."""
    paths = {name.rpartition(".")[0]: None for adapter in adapters for name in adapter.weights}
    return {
        path: [adapter.lora.r_of(path) if path + LORA_A in adapter.weights else 0 for adapter in adapters]
        for path in paths
    }


def put_side_by_side(adapters: Sequence[Adapter]) -> Weights:
    """The parameters of `sporeloom.nn.multi_lora`: each adapter's part of the rows of A and of the columns of B, and a table
    that says which part is whose, its first row for no adapter."""
    result: Weights = {}
    for path, ranks in ranks_of_several(adapters).items():
        having = [adapter for adapter, rank in zip(adapters, ranks, strict=True) if rank]
        scaled = [np.float32(each.lora.scale(path)) * each.weights[path + LORA_B] for each in having]
        result[path + LORA_A] = np.concatenate([each.weights[path + LORA_A] for each in having])
        result[path + LORA_B] = np.concatenate(scaled, axis=1)
        owners = np.repeat(np.arange(1, 1 + len(adapters)), ranks)
        result[path + LORA_MASK] = (np.arange(1 + len(adapters))[:, None] == owners).astype(np.float32)
    return result


def _modules(family: str, model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Every name a matrix of the model is known by -> our paths, of which several are its rows."""
    linear = linear_paths(model)
    names: dict[str, tuple[str, ...]] = {path: (path,) for path in linear}
    for way in family_module(family, "weights").PUBLISHED:
        try:
            tensors = way.tensors(model)
        except ConfigError:
            continue  # a network of this family that is not published so
        for theirs, parts in tensors.items():
            ours = tuple(part.name.removesuffix(".weight") for part in parts)
            if set(ours) <= set(linear) and theirs.endswith(".weight"):
                names[theirs.removesuffix(".weight")] = ours
    return names


def _parts(key: str, names: Mapping[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]] | None:
    """(end of our name, our paths) of a tensor's name, if there is such a matrix."""
    if peft := re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", key):
        ours = names.get(peft[1])
        return (LORA_A if peft[2] == "A" else LORA_B, ours) if ours else None
    if theirs := re.fullmatch(
        r"(?:model\.)*layers\.(\d+)\.(?:attention|feed_forward)\.(\w+)\.\w+_delta_lora_([ab])", key
    ):
        path = f"layers.{theirs[1]}.{MINDFORMERS.get(theirs[2])}"
        return (LORA_A if theirs[3] == "a" else LORA_B, (path,)) if path in names else None
    return None


def _split(value: NDArray[np.float32], found: tuple[str, tuple[str, ...]], model: ModelConfig) -> Weights:
    """An adapter of a matrix that is several of ours: each has the same A, and its rows of B."""
    end, paths = found
    if end == LORA_A or len(paths) == 1:
        return {path + end: value for path in paths}
    shapes, result, start = parameter_shapes(model), {}, 0
    for path in paths:
        stop = start + shapes[f"{path}.weight"][0]
        result[path + end] = value[start:stop]
        start = stop
    return result


def _described(document: Document, weights: Weights, names: Mapping[str, tuple[str, ...]]) -> LoRAConfig:
    """What adapter_config.json says, the ranks as they are in the tensors."""
    values = document.mapping
    known = ("r", "lora_alpha", "lora_dropout", "use_rslora")
    given = {key: values[key] for key in known if values.get(key) is not None}
    plain = fields_from(LoRAConfig, Document(document.source, given))
    paths = sorted({name.rpartition(".")[0] for name in weights})
    ranks = {path: weights[path + LORA_A].shape[0] for path in paths if path + LORA_A in weights}
    alphas = {
        path: float(alpha)
        for pattern, alpha in (values.get("alpha_pattern") or {}).items()
        for theirs, ours in names.items()
        for path in ours
        if re.search(rf"(^|\.){pattern}$", theirs) and path in paths
    }
    ranks = {path: rank for path, rank in ranks.items() if rank != plain.r}
    return dataclasses.replace(plain, target_modules=tuple(paths), ranks=ranks, alphas=alphas)


def _published_names(family: str, model: ModelConfig, paths: list[str]) -> dict[str, str]:
    """Our path -> the matrix' name where the model is published, of all matrices that have one of their own there."""
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
            return {path: whole[path] for path in linear_paths(model) if path in whole}
    return {path: path for path in linear_paths(model)}


def _short_names(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Names of matrices, those that all layers have by their last component."""
    leaves = {name.rpartition(".")[2] for name in chosen}
    whole = {leaf for leaf in leaves if all(name in chosen for name in every if name.rpartition(".")[2] == leaf)}
    return sorted(whole | {name for name in chosen if name.rpartition(".")[2] not in whole})
