# SPDX-License-Identifier: Apache-2.0
"""Adapters beside a matrix: what a token gets is of its own adapter alone, whatever numbers another one comes to."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from sporeloom.models.parts.spec import ZEROS, ParameterSpecs, linear
from sporeloom.nn.linear import Linear

PRODUCT = ParameterSpecs.of(linear("product", 4, 3, False, ZEROS)).within("product")


class Product(nn.Cell):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def construct(self, x, ids):
        return self.linear(x, ids)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 3e38])
def test_another_adapters_numbers_reach_no_other_token(spoilt):
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    draw = np.random.default_rng(0)
    linear = Linear(PRODUCT)
    linear.attach_adapters([2, 1])
    w, a, b = (draw.normal(size=shape).astype(np.float32) for shape in ((3, 4), (3, 4), (3, 3)))
    a[:2] = spoilt  # of the first adapter; a finite one, too, is infinite once it is multiplied by x
    values = {"weight": w, "lora_a": a, "lora_b": b, "lora_mask": np.float32([[0, 0, 0], [1, 1, 0], [0, 0, 1]])}
    for name, value in values.items():
        getattr(linear, name).set_data(Tensor(value))
    x = 10 * (1 + draw.random((3, 4), np.float32))
    y = Product(linear)(Tensor(x), Tensor(np.array([[0, 1, 2]], np.int32))).asnumpy()
    np.testing.assert_allclose(y[0], x[0] @ w.T, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(y[2], x[2] @ w.T + (x[2] @ a[2:].T) @ b[:, 2:].T, rtol=1e-5, atol=1e-4)
    assert not np.isfinite(y[1]).any()
