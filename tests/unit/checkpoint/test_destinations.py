# SPDX-License-Identifier: Apache-2.0
"""Shards of a checkpoint for a strategy."""

import pytest

from sporeloom.checkpoint.destinations import destinations
from sporeloom.core.errors import ConfigError
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

MODEL = size_config("pangu", "tiny")


def test_moments_have_the_shards_of_their_weights():
    shapes = parameter_shapes(MODEL)
    shapes |= {f"adam_m.{name}": shape for name, shape in shapes.items()}
    found = destinations(load_strategy("pangu_tiny_tp2"), "pangu", MODEL, shapes)
    assert found.keys() == shapes.keys()
    assert all(found[f"adam_m.{name}"] == found[name] for name in parameter_shapes(MODEL))
    assert any(len(parts) == 2 for parts in found.values())


@pytest.mark.parametrize("kind", ["adapters", "value head"])
def test_tensors_besides_the_models_are_refused_for_a_strategy(kind):
    """One device has them all."""
    shapes = (
        LoRAConfig().shapes(MODEL) if kind == "adapters" else {**parameter_shapes(MODEL), "value_head.weight": (1, 64)}
    )
    name = next(iter(shapes)) if kind == "adapters" else "value_head.weight"
    with pytest.raises(ConfigError, match=rf"{name}: \d+ tensors? of adapters or of a value head .* or give --full"):
        destinations(load_strategy("pangu_tiny_tp2"), "pangu", MODEL, shapes)
    assert destinations(SINGLE_DEVICE, "pangu", MODEL, shapes).keys() == shapes.keys()
