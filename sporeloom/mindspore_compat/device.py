# SPDX-License-Identifier: Apache-2.0
"""The device that MindSpore uses in this process."""

from __future__ import annotations

import mindspore as ms


class DeviceError(RuntimeError):
    """MindSpore has used another device before."""


def pin_cpu() -> None:
    """Let MindSpore use the CPU. Call it before any kernel runs.

    Raises:
        DeviceError: kernels have run already without a device set.
    """
    try:
        ms.set_device("CPU")
    except RuntimeError:
        raise DeviceError(
            'MindSpore has run in this process before its device was set: call mindspore.set_device("CPU") first'
        ) from None
