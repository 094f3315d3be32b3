# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: further layers that predict tokens beyond the next one. Source: arXiv:2412.19437 section 2.2;
the order of the concatenation and the hidden state before the final norm are those of the released Pangu models; after it,
as `mtp_input` says, those of DeepSeek-V3 in vLLM and Megatron-LM."""

from mindspore import Parameter, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.blocks import BLOCKS
from sporeloom.nn.linear import Linear
from sporeloom.nn.norm import build_norm


class StateCache(nn.Cell):
    """States that a layer of multi-token prediction reads, of every row's tokens, (R, 1, S, D): R rows of S slots, written in
    place. Slots are (B, 1, T, 3) or (B, KV, T, 3), as for `KVCache`."""

    def __init__(self, num_rows: int, capacity: int, width: int, dtype: mstype.Type):
        super().__init__()
        self.width = width
        self.states = Parameter(initializer("zeros", (num_rows, 1, capacity, width), dtype), requires_grad=False)
        self.by_row, self.first_head, self.append = ops.Reshape(), ops.StridedSlice(), ops.ScatterNdUpdate()
        self.read, self.flat = ops.GatherNd(), ops.Reshape()

    def construct(self, x, slots):
        """Write x (B*T, D)."""
        batch, heads, length, _ = slots.shape
        if heads > 1:
            slots = self.first_head(slots, (0, 0, 0, 0), (batch, 1, length, 3), (1, 1, 1, 1))
        return self.append(self.states, slots, self.by_row(x, (batch, 1, length, self.width)))

    def at(self, slots):
        """Read (B*T, D)."""
        return self.flat(self.read(self.states, slots), (-1, self.width))


class MTPLayer(nn.Cell):
    """A layer on project([norm(embedding of a later token); norm(h)]), where h (B*T, D) is the last layer's output or that of
    the depth before, or what the head reads of it. `head_norm` of its output goes to the model's head."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type, depth: int):
        super().__init__()
        self.embedding_norm = build_norm(config, specs.within("embedding_norm"), dtype)
        self.hidden_norm = build_norm(config, specs.within("hidden_norm"), dtype)
        self.both, self.project = ops.Concat(1), Linear(specs.within("project"), dtype)
        self.layer = BLOCKS[config.block](config, specs.within("layer"), dtype, config.num_layers + depth)
        self.head_norm = build_norm(config, specs.within("head_norm"), dtype)
        self.has_experts = config.experts is not None

    def attach_states(self, config: ModelConfig, num_rows: int, capacity: int, name: str) -> None:
        """Keep the states that it reads of `capacity` tokens for each of `num_rows` rows."""
        self.states = StateCache(num_rows, capacity, config.hidden_size, getattr(mstype, config.compute_dtype))
        self.states.update_parameters_name(f"{name}.states.cache.")

    def construct(
        self, x, embedded, bias, angles, tokens, shares=None, losses=None, groups=None, of_tokens=None, slots=None
    ):
        x = self.project(self.both((self.embedding_norm(embedded), self.hidden_norm(x))))
        if self.has_experts or of_tokens is not None:
            return self.layer(
                x, bias, angles, slots, None, tokens, shares, losses, groups, kept=None, of_tokens=of_tokens
            )
        return self.layer(x, bias, angles, slots, None), losses


class MTPLosses(nn.Cell):
    """Loss of the depths: mtp_loss_weight times their mean."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.factor = config.mtp_loss_weight / config.num_mtp_layers
        self.scale, self.add = ops.Mul(), ops.Add()

    def construct(self, total, loss_of_depth):
        return self.add(total, self.scale(loss_of_depth, self.factor))
