# SPDX-License-Identifier: Apache-2.0
"""A model with the weights of a checkpoint folder, under a strategy."""

from __future__ import annotations

from pathlib import Path

from mindspore import Tensor, nn

from mindloom.checkpoint.io import WEIGHTS, check_weights, load_weights
from mindloom.family import family_module
from mindloom.model_config import DecoderConfig
from mindloom.parallel.parallelize import parallelize
from mindloom.strategy.config import Strategy


def load_model(folder: Path, family: str, config: DecoderConfig, strategy: Strategy) -> nn.Cell:
    """The family's model, parallelized, with the folder's weights whole in it; not training.

    Raises:
        ConfigError: the weights are missing, damaged, or not this model's.
    """
    weights = load_weights(folder)
    net: nn.Cell = family_module(family, "model").Model(config)
    shapes = {parameter.name: tuple(parameter.shape) for parameter in net.get_parameters()}
    check_weights(weights, shapes, str(folder / WEIGHTS))
    parallelize(net, strategy, whole=False)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(weights[parameter.name], dtype=parameter.dtype))
    return net.set_train(False)
