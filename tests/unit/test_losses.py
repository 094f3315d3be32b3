# SPDX-License-Identifier: Apache-2.0
"""Losses are told with the same bits however often their kernels ran: a run that resumes tells what the whole one told."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from sporeloom.nn.loss import TokenLosses
from sporeloom.nn.objectives import Softplus


class OfTokens(nn.Cell):
    def __init__(self):
        super().__init__()
        self.loss = TokenLosses(z_loss=1e-2)

    def construct(self, logits, labels):
        return self.loss.of_tokens(logits, labels)


@pytest.mark.parametrize("count", [4, 5, 6, 12, 100])
def test_losses_do_not_depend_on_how_often_kernels_ran(count):
    draw = np.random.default_rng(count)
    logits = Tensor(draw.standard_normal((count, 7)).astype(np.float32))
    labels = Tensor(draw.integers(0, 7, (count,)).astype(np.int32))
    numbers = Tensor(draw.standard_normal(count).astype(np.float32) * 3)
    for network, inputs in ((OfTokens(), (logits, labels)), (Softplus(), (numbers,))):
        first, *later = (network(*inputs).asnumpy() for _ in range(20))
        assert all((each == first).all() for each in later)


def test_softplus_is_that_of_float64_and_its_gradient_is_right_at_zero():
    x = np.array([-100, -20, -3, -1e-3, 0, 1e-3, 3, 20, 100], np.float32)
    exact = np.logaddexp(0, x.astype(np.float64))
    np.testing.assert_allclose(Softplus()(Tensor(x)).asnumpy(), exact, rtol=1e-6, atol=1e-7)
    gradient = mindspore.grad(Softplus())(Tensor(x)).asnumpy()
    np.testing.assert_allclose(gradient, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6, atol=1e-7)
