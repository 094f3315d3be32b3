# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's flags, in a shell script or on a line; both ways for what overlaps.

Names: Megatron-LM megatron/training/arguments.py. The data parallel degree is what is left of the devices, which torchrun's
--nproc_per_node and --nnodes or our own --devices give.
"""

from sporeloom.dialects.megatron.reader import read
from sporeloom.dialects.megatron.writer import write

__all__ = ["read", "write"]
