# SPDX-License-Identifier: Apache-2.0
"""Where one process keeps weights: side by side, each from the start of a line of the cache on, for as long as it is used."""

import gc

import numpy as np
import pytest
from mindspore import Parameter, Tensor

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.inference.memory import LINE, side_by_side
from sporeloom.inference.model import CACHE, load_model
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.config import SINGLE_DEVICE


@pytest.mark.parametrize("has_large_pages", [True, False])
def test_values_lie_side_by_side(monkeypatch, has_large_pages):
    if not has_large_pages:
        monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    kinds = [((3, 5), np.float32), ((7,), np.int8), ((), np.float32), ((2, 2), np.int8)]
    parameters = [Parameter(Tensor(np.ones(shape, kind))) for shape, kind in kinds]
    places = side_by_side(parameters)
    assert [(place.shape, place.dtype) for place in places] == [(shape, np.dtype(kind)) for shape, kind in kinds]
    assert not any(place.any() for place in places)
    for number, place in enumerate(places):
        place[...] = number + 1
    assert [set(place.ravel()) for place in places] == [{1}, {2}, {3}, {4}]  # none lies over another
    starts = [place.ctypes.data for place in places]
    assert [start - starts[0] for start in starts] == [0, LINE, 2 * LINE, 3 * LINE]
    assert side_by_side([]) == []


@pytest.mark.parametrize("weights_in", ["float32", "int8", "int4-g32"])
def test_a_loaded_model_computes_from_there(tmp_path, weights_in):
    config, draw = size_config("pangu", "tiny"), np.random.default_rng(0)
    weights = {name: draw.standard_normal(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    save_checkpoint(tmp_path / "checkpoint", weights, "pangu", config)
    net = load_model(tmp_path / "checkpoint", "pangu", config, SINGLE_DEVICE, (2, 16), weights_in)
    gc.collect()  # nothing but the parameters holds the memory
    parameters = list(net.get_parameters())
    starts = [parameter.data_ptr() for parameter in parameters]
    assert not any(start % LINE for start in starts)
    ends = [start + -(-parameter.nbytes // LINE) * LINE for start, parameter in zip(starts, parameters, strict=True)]
    assert starts[1:] == ends[:-1]
    caches = [parameter for parameter in parameters if CACHE in parameter.name]
    assert caches and not any(cache.asnumpy().any() for cache in caches)
    exact = [parameter for parameter in parameters if parameter.name in weights and str(parameter.dtype) == "Float32"]
    assert len(exact) < len(weights) if weights_in != "float32" else len(exact) == len(weights)
    assert exact
    for parameter in exact:
        np.testing.assert_array_equal(parameter.asnumpy(), weights[parameter.name])
