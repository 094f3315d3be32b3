# SPDX-License-Identifier: Apache-2.0
"""A model with the weights of a checkpoint folder, under a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.checkpoint.adapters import Adapter, put_side_by_side, ranks_of_several
from sporeloom.checkpoint.finite import narrow
from sporeloom.checkpoint.model_folder import Read, check_shapes, open_weights
from sporeloom.checkpoint.tensor_files import WEIGHTS
from sporeloom.core.errors import ConfigError
from sporeloom.inference.cache import CacheName, cache_problems
from sporeloom.inference.kernels import kernel_library, rows_are_alone, use_kernels, use_products
from sporeloom.inference.memory import side_by_side
from sporeloom.inference.quantize import narrow_matrices, quantize, quantized_weights
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.cells import ExpertCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.parts.multi_token_prediction import PREFIX
from sporeloom.models.weight_formats import FLOAT32, WeightFormat, WeightName, format_problems, held_format
from sporeloom.nn.cache import KeyCache
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.multi_lora import attach_several_adapters
from sporeloom.nn.replace import share_parameters
from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime.cpu.products import PRODUCT_LIBRARIES
from sporeloom.runtime.spmd.program import SOURCES, Source
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.tensor_slice import TensorSlice

CACHE = ".cache."
"""Part of the names of parameters that no checkpoint has."""


def build_model(
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    caches: tuple[int, int] | None = None,
    weights: WeightFormat = FLOAT32,
    weights_of: nn.Cell | None = None,
    lora: LoRAConfig | None = None,
    ranks: Mapping[str, Sequence[int]] | None = None,
    num_drafts: int = 0,
    kv_cache: CacheName = "auto",
    gives_states: bool = False,
    takes_kernels: bool = True,
    drafts: bool = False,
    narrows: bool = False,
) -> nn.Cell:
    """The family's model, parallelized, its weights not materialised; not training.

    `caches`: rows and slots of KV caches to attach. `weights`: how matrices are held. `weights_of`: such a model
    with whose parameters it computes, whatever becomes of them; `lora`: that model's adapters. `ranks`: of several adapters
    that tokens choose from (see `ranks_of_several`). `num_drafts`: maximum number of drafted tokens of a row, for which
    other places in the batch compute. `kv_cache`: number type of the caches. `gives_states`: `HiddenStates` can be wrapped
    around it. `takes_kernels`: on CPUs compiled kernels replace operators. `drafts`: layers of multi-token prediction
    have caches. `narrows`: matrices are held in the number type that they are multiplied in.
    """
    with no_init_parameters():
        net: nn.Cell = family_module(family, "model").Model(config)
        if weights.bits < 32:
            quantize(net, weights)
        if narrows:
            narrow_matrices(net)
        if lora:
            attach_adapters(net, lora)
        if ranks:
            attach_several_adapters(net, ranks)
        if gives_states:
            net.attach_head_input()
        if weights_of:
            share_parameters(net, weights_of)
        if caches:
            net.attach_caches(*caches, kv_cache == "int8", num_drafts, drafts)
            for _, cell in net.cells_and_names():
                if isinstance(cell, KeyCache):
                    cell.picks_rows = num_drafts > 0
    parallelize(net, strategy, whole=False)
    for _, cell in net.cells_and_names():
        if isinstance(cell, ExpertCell):
            cell.sorts_rows = False
    net.num_kernels, net.has_several_adapters, net.rows_are_alone = 0, bool(ranks), False
    net.places_are_alike = ms.get_context("device_target") != "CPU"
    if caches and takes_kernels and not net.places_are_alike and (library := kernel_library()):
        _compute_by(library, net, config, strategy.mesh.size)
    net.num_drafts, net.kv_cache = num_drafts, kv_cache
    return net.set_train(False)


def _compute_by(library: Path, net: nn.Cell, config: ModelConfig, num_devices: int) -> None:
    """Let kernels compute, on a CPU alone whole parts and in several processes products, so that no place in a batch matters:
    MindSpore's products sum some rows in another order."""
    if num_devices == 1:
        net.num_kernels = use_kernels(net, library)
        net.rows_are_alone = config.experts is None and rows_are_alone(net)
    if num_devices > 1 and config.compute_dtype != "float16":  # processes compute bfloat16 in float32
        PRODUCT_LIBRARIES.set(net, str(library))
        net.places_are_alike = True
    if num_devices == 1 and config.compute_dtype == "float32":
        net.num_kernels += use_products(net, library)
        net.places_are_alike = True


def load_model(
    folder: Path,
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    caches: tuple[int, int] | None = None,
    weights: WeightName = "float32",
    adapters: Sequence[Adapter] = (),
    num_drafts: int = 0,
    kv_cache: CacheName = "auto",
    gives_states: bool = False,
    drafts: bool = False,
) -> nn.Cell:
    """`build_model` with the folder's weights, and with adapters that tokens choose from. Of several CPU processes
    each reads what it holds when the first graph is compiled. `weights`: name of the format in which matrices are held.
    Layers of multi-token prediction are there only for `drafts`.

    Raises:
        ConfigError: the weights are missing, damaged, not finite, or not this model's; matrices or their shards that the
            format does not fit.
    """
    stored = open_weights(folder)
    if problem := stored.damage(slice(None)):
        raise ConfigError(problem)
    has_mtp = any(name.startswith(PREFIX) for name in stored.shapes)
    if drafts and not has_mtp:
        raise ConfigError(f"{folder}: no parameters of multi-token prediction ({PREFIX}*); leave out --speculate mtp")
    check_shapes(stored.shapes, parameter_shapes(config if has_mtp else config.without_mtp()), str(folder / WEIGHTS))
    config = config if drafts else config.without_mtp()
    held = held_format(weights, stored.packed, folder)
    if problems := format_problems(held, config, strategy.mesh.tp):
        raise ConfigError(f"{folder}: --weights {weights}: {problem}" for problem in problems)
    if problems := cache_problems(kv_cache, config):
        raise ConfigError(f"{folder}: {problem}" for problem in problems)
    ranks = ranks_of_several(adapters)
    of = family, config, strategy, caches, held, None, None, ranks, num_drafts, kv_cache, gives_states
    on_cpu = ms.get_context("device_target") == "CPU"  # where processes compute all types in float32
    net = build_model(*of, drafts=drafts, narrows=not on_cpu)
    exact = _fitting(stored.read, config, folder)
    read_int4 = stored.read_int4 if held is stored.packed else None
    read = quantized_weights(net, exact, held, read_int4, stored.read_int8) if held.bits < 32 else exact
    beside = put_side_by_side(adapters)
    parameters = list(net.get_parameters())
    places = side_by_side(parameters) if on_cpu and strategy.mesh.size == 1 else []
    for number, parameter in enumerate(parameters):
        shape, name = tuple(parameter.shape), parameter.name
        if CACHE in name:
            source = Source.of_zeros(shape)
        else:
            source = Source(shape, partial(_take, beside[name]) if name in beside else partial(read, name))
        if places:
            places[number][...] = source.read(source.full)  # caches, too: else the first texts wait for their memory
            parameter.set_data(Tensor.from_numpy(places[number]))
        elif on_cpu:
            SOURCES.set(parameter, source)
        else:
            parameter.set_data(Tensor(source.read(source.full), dtype=parameter.dtype))
    return net


def _take(value: NDArray[Any], part: TensorSlice) -> NDArray[Any]:
    return value[part.slices]


def _fitting(read: Read, config: ModelConfig, folder: Path) -> Read:
    """The function that reads weights to be computed in the model's type.

    Raises:
        ConfigError: when it reads one that would be infinite in float16.
    """

    def read_and_check(name: str, part: TensorSlice) -> NDArray[Any]:
        value = read(name, part)
        narrow(value, np.dtype(np.float16), f"{folder}: {name}")
        return value

    return read_and_check if config.compute_dtype == "float16" else read
