# SPDX-License-Identifier: Apache-2.0
"""What an engine refuses on a GPU, without one."""

import mindspore as ms
import pytest
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.backend import Backend
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE


class Narrow(nn.Cell):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype


def test_bfloat16_is_refused_on_a_gpu_and_not_on_ascend():
    on_gpu, on_ascend = (Engine(SINGLE_DEVICE, target, Backend(SINGLE_DEVICE)) for target in ("GPU", "Ascend"))
    with pytest.raises(ConfigError, match=r"bfloat16: .* give --compute-dtype float16 or float32"):
        on_gpu.backend_of(nn.SequentialCell(Narrow(ms.bfloat16)))
    assert on_gpu.backend_of(nn.SequentialCell(Narrow(ms.float16))) is on_gpu.backend
    assert on_ascend.backend_of(nn.SequentialCell(Narrow(ms.bfloat16))) is on_ascend.backend
