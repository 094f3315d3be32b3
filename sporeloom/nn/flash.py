# SPDX-License-Identifier: Apache-2.0
"""Attention in one kernel that stores no scores: MindSpore's FlashAttentionScore, which Ascend has.

On several CPU processes the graph has it as well, and NumPy computes it (`sporeloom.runtime.cpu.flash`): what is counted and
proved there is what devices run. One CPU device computes plain attention.
"""

import math

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.operations.nn_ops import FlashAttentionScore

from sporeloom.models.cells import HeadCopier
from sporeloom.models.config import ModelConfig

NO_MASK_COMPRESSION = 0  # sparse_mode: the mask marks each pair of query and key that counts


@ops.constexpr
def runs_flash(on_cpu):
    """Whether the graph that is being compiled has FlashAttention: on Ascend, and `on_cpu` on CPUs; GPUs have no kernel."""
    target = ms.get_context("device_target")
    return target == "Ascend" or (on_cpu and target == "CPU")


def chooses_flash(config: ModelConfig) -> bool:
    """Whether a model that is built now has FlashAttention."""
    if config.attention == "auto":
        return config.attention_on_ascend == "flash" and ms.get_context("device_target") == "Ascend"
    return config.attention == "flash"


def has_flash(net: nn.Cell) -> bool:
    """Whether `net` has FlashAttention."""
    return any(isinstance(cell, FlashAttention) for _, cell in net.cells_and_names())


class FlashAttention(nn.Cell):
    """Softmax(scale Q K^T) V of q (B, H, T, D/H) and k, v (B, KV, keys, D/H), except where `hidden` (B, 1, T, keys), uint8,
    is 1."""

    def __init__(self, num_heads: int, scale: float):
        super().__init__()
        self.attend = FlashAttentionScore(num_heads, 1.0, scale, sparse_mode=NO_MASK_COMPRESSION, input_layout="BNSD")

    def construct(self, q, k, v, hidden):
        return self.attend(q, k, v, None, None, None, hidden, None)[3]


class GroupedFlashAttention(FlashAttention, HeadCopier):
    """The same with scale 1 / sqrt(head_dim), where several ranks may share a head of keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.num_heads, 1.0 / math.sqrt(config.head_size))
        self.num_heads, self.head_dim = config.num_heads, config.head_size
        self.num_kv_heads, self.group_size = config.kv_heads, config.num_heads // config.kv_heads
        self.split_keys, self.split_values, self.merge = ops.ExpandDims(), ops.ExpandDims(), ops.Reshape()
        self.repeat_keys, self.repeat_values = ops.Tile(), ops.Tile()

    def construct(self, q, k, v, hidden):
        if self.repeats_heads:
            shape, copies = (k.shape[0], self.num_heads, k.shape[2], self.head_dim), (1, 1, self.group_size, 1, 1)
            k = self.merge(self.repeat_keys(self.split_keys(k, 2), copies), shape)
            v = self.merge(self.repeat_values(self.split_values(v, 2), copies), shape)
        return self.attend(q, k, v, None, None, None, hidden, None)[3]
