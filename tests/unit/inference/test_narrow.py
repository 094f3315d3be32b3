# SPDX-License-Identifier: Apache-2.0
"""Matrices held in the number type that they are multiplied in, as devices hold them."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest

from sporeloom.inference.model import build_model
from sporeloom.models.family import size_config
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

ROWS, SLOTS = 2, 32


@pytest.mark.parametrize("size", ["embedded_tiny", "pro_moe_tiny"])
def test_logits_are_the_same_to_the_bit_with_half_the_bytes(size):
    ms.set_device("CPU")
    config = dataclasses.replace(size_config("pangu", size), num_layers=2, compute_dtype="float16")
    slots = np.zeros((ROWS, config.kv_heads, 1, 3), np.int32)
    slots[..., 0], slots[..., 1] = np.arange(ROWS)[:, None, None], np.arange(config.kv_heads)[:, None]
    of = np.asarray([[7], [3]], np.int32), np.zeros((ROWS, 1), np.int32), np.arange(ROWS, dtype=np.int32), slots
    logits, num_bytes = [], []
    for narrows in (False, True):
        net = build_model("pangu", config, SINGLE_DEVICE, (ROWS, SLOTS), takes_kernels=False, narrows=narrows)
        draw = np.random.default_rng(0)
        for parameter in net.get_parameters():
            value = np.zeros(parameter.shape) if ".cache." in parameter.name else draw.normal(0, 0.1, parameter.shape)
            parameter.set_data(ms.Tensor(value.astype(np.float32), dtype=parameter.dtype))
        matrices = [each for each in net.get_parameters() if ".cache." not in each.name and len(each.shape) > 1]
        matrices = [each for each in matrices if "embedding" not in each.name]
        num_bytes.append(sum(each.size * each.itemsize for each in matrices))
        logits.append(Engine.start(SINGLE_DEVICE).run(net, *map(ms.Tensor, of)).asnumpy())
    assert num_bytes[1] < 0.51 * num_bytes[0], num_bytes  # routers compute in float32
    np.testing.assert_array_equal(*logits)
