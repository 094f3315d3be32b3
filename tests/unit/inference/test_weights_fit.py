# SPDX-License-Identifier: Apache-2.0
"""Weights that the type a model computes in cannot hold are refused when it is loaded."""

import dataclasses

import numpy as np
import pytest

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.core.errors import ConfigError
from sporeloom.inference.model import load_model
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.config import SINGLE_DEVICE

MODEL = ModelConfig(vocab_size=16, hidden_size=32, num_layers=2, num_heads=2, dropout_rate=0.0)


@pytest.mark.parametrize("weights_in", ["float32", "int8", "int4-g32"])
def test_a_number_that_is_infinite_in_float16(weights_in, tmp_path):
    weights = {name: np.full(shape, 0.5, np.float32) for name, shape in parameter_shapes(MODEL).items()}
    weights["layers.0.mlp.up.weight"][3, 4] = -7e4
    save_checkpoint(tmp_path / "m", weights, "pangu", MODEL)
    assert load_model(tmp_path / "m", "pangu", MODEL, SINGLE_DEVICE, weights=weights_in)
    narrow = dataclasses.replace(MODEL, compute_dtype="float16")
    with pytest.raises(
        ConfigError, match=r"m: layers\.0\.mlp\.up\.weight: numbers up to 70000 do not fit into float16"
    ):
        load_model(tmp_path / "m", "pangu", narrow, SINGLE_DEVICE, weights=weights_in)
