# SPDX-License-Identifier: Apache-2.0
"""Communication between the processes of a job on Ascend or GPU devices."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.backend import Backend
from sporeloom.strategy.checks import launch_problems
from sporeloom.strategy.config import Strategy


def meet(strategy: Strategy) -> int:
    """Join the other processes of a job on devices. Returns this process's rank; MindSpore's scheduler exits here.

    Raises:
        ConfigError: the number of processes differs from the ranks of the strategy's mesh.
    """
    init()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit(0)  # inside the exit, MindSpore's scheduler waits for the workers
    if get_group_size() != strategy.mesh.size:
        raise ConfigError(launch_problems(strategy, get_group_size()))
    if strategy.offload:
        ms.set_context(memory_optimize_level="O0")  # required for offloading to the host
    return int(get_rank())


class DeviceBackend(Backend):
    """One of several devices: communication between the processes of a job on devices."""

    def broadcast(self, array: NDArray[Any], source: int) -> NDArray[Any]:
        result: NDArray[Any] = ops.Broadcast(source)((Tensor(array),))[0].asnumpy()
        return result

    def broadcast_value(self, value: Any, source: int) -> Any:
        return json.loads(self.share_bytes(json.dumps(value).encode(), source))

    def share_bytes(self, content: bytes, source: int) -> bytes:
        """Broadcast the content of rank `source`; that of other ranks is ignored."""
        length = int(self.broadcast(np.asarray([len(content)], np.int32), source)[0])
        padded = np.zeros(max(1024, 1 << (length - 1).bit_length()), np.uint8)  # few lengths: each is compiled once
        if self.rank == source:
            padded[:length] = np.frombuffer(content, np.uint8)
        return self.broadcast(padded.view(np.int32), source).tobytes()[:length]

    def max_over_ranks(self, value: int) -> int:
        return int(ops.AllReduce(ops.ReduceOp.MAX)(Tensor([value], ms.int32)).asnumpy()[0])

    def sum_over_ranks(self, value: float) -> float:
        return float(ops.AllReduce()(Tensor([value], ms.float32)).asnumpy()[0])
