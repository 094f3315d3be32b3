# SPDX-License-Identifier: Apache-2.0
"""A model with the weights of a checkpoint folder, under a strategy."""

from __future__ import annotations

from pathlib import Path

from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindloom.checkpoint.io import check_weights, load_weights
from mindloom.checkpoint.tensor_files import WEIGHTS
from mindloom.inference.quantize import quantize, quantize_weights
from mindloom.models.config import ModelConfig
from mindloom.models.family import family_module
from mindloom.parallel.parallelize import parallelize
from mindloom.strategy.config import Strategy


def build_model(
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    caches: tuple[int, int] | None = None,
    int8: bool = False,
) -> nn.Cell:
    """The family's model, parallelized, its weights not materialised; not training.

    `caches`: rows and slots of KV caches to attach. `int8`: matrices as int8 (see `quantize`).
    """
    with no_init_parameters():
        net: nn.Cell = family_module(family, "model").Model(config)
        if int8:
            quantize(net)
        if caches:
            net.attach_caches(*caches)
    parallelize(net, strategy, whole=False)
    net.graph_key = {"family": family, "model": config.to_dict(), "caches": caches, "int8": int8}
    return net.set_train(False)


def load_model(
    folder: Path,
    family: str,
    config: ModelConfig,
    strategy: Strategy,
    caches: tuple[int, int] | None = None,
    int8: bool = False,
) -> nn.Cell:
    """`build_model` with the folder's weights whole in it.

    Raises:
        ConfigError: the weights are missing, damaged, or not this model's.
    """
    weights = load_weights(folder)
    with no_init_parameters():
        plain: nn.Cell = family_module(family, "model").Model(config)
    shapes = {parameter.name: tuple(parameter.shape) for parameter in plain.get_parameters()}
    check_weights(weights, shapes, str(folder / WEIGHTS))
    net = build_model(family, config, strategy, caches, int8)
    if int8:
        weights = quantize_weights(net, weights)
    for parameter in net.get_parameters():
        if parameter.name in weights:
            parameter.set_data(Tensor(weights.pop(parameter.name), dtype=parameter.dtype))
        else:
            parameter.init_data()  # a cache
    return net
