# SPDX-License-Identifier: Apache-2.0
"""Random layerwise token dropping: a layer processes some tokens of each sequence, the others bypass it unchanged.

Source: arXiv:2211.11586. What a layer sees is drawn outside (`sporeloom.data.random_ltd`), so it is the same on every mesh.
"""

from collections.abc import Sequence

from mindspore import nn, ops

from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.nn.attention import Mask
from sporeloom.nn.flash import chooses_flash
from sporeloom.nn.rotary import Angles


class KeptMask(Mask):
    """Mask of the kept tokens of each sequence: each attends to those before it in its document."""

    def __init__(self, flash=False):
        super().__init__(flash)
        self.expand_places, self.expand_keys, self.first = ops.ExpandDims(), ops.ExpandDims(), ops.Sub()
        self.not_before, self.not_after, self.both = ops.LessEqual(), ops.LessEqual(), ops.LogicalAnd()

    def construct(self, places, positions):  # (B, K) in the sequence, and in the document -> (B, 1, K, K)
        queries, keys = self.expand_places(places, -1), self.expand_keys(places, 1)  # (B, K, 1), (B, 1, K)
        first = self.first(queries, self.expand_positions(positions, -1))
        return self.bias(self.both(self.not_before(first, keys), self.not_after(keys, queries)))


class TokenDrop(nn.Cell):
    """Selects the inputs of one layer, by the `number`-th of `count` draws, and merges its outputs.

        a sequence of T = 4 tokens, of which the layer sees K = 2: b and d

        x       (T,)      a b c d
        places  (K,)      1 3              the tokens that are kept
        input   (K,)      b d
        y       (K,)      b' d'            the output of the layer
        joined  (K + T,)  b' d' a b c d
        back    (T,)      2 0 4 1          where each token is among these
        result  (T,)      a b' c d'

    `kept`: places (B, count*K) and ways back (B, count*T) as `draw_kept` gives them, and positions (B, T).
    """

    def __init__(self, config: ModelConfig, number: int, count: int):
        super().__init__()
        self.number, self.count, self.hidden_size = number, count, config.hidden_size
        self.cut_places, self.cut_back = ops.StridedSlice(), ops.StridedSlice()
        self.by_sequence, self.rows = ops.Reshape(), ops.Reshape()
        self.all_by_sequence, self.all_rows = ops.Reshape(), ops.Reshape()
        self.pick, self.pick_position, self.pick_key = ops.Gather(1), ops.Gather(1), ops.Gather(1)
        self.kept_by_sequence, self.join, self.put_back = ops.Reshape(), ops.Concat(1), ops.Gather(1)
        self.kept_mask = KeptMask(chooses_flash(config))
        self.has_rotary = config.position == "rotary"
        if self.has_rotary:
            self.angles = Angles(config)

    def construct(self, x, kept, dropout_keys):
        """x (B*T, D) -> those that are kept (B*K, D), with their bias, angles and keys of dropout."""
        places, _, positions = kept
        batch, length = positions.shape
        width = places.shape[1] // self.count  # K
        mine = self.cut_places(places, (0, self.number * width), (batch, (self.number + 1) * width), (1, 1))  # (B, K)
        x = self.by_sequence(x, (batch, length, self.hidden_size))  # (B*T, D) -> (B, T, D)
        x = self.pick(x, mine, 1)  # (B, K, D)
        positions = self.pick_position(positions, mine, 1)  # (B, T) -> (B, K)
        angles = self.angles(positions) if self.has_rotary else None
        keys = None if dropout_keys is None else self.pick_key(dropout_keys, mine, 1)  # (B, T) -> (B, K)
        return self.rows(x, (-1, self.hidden_size)), self.kept_mask(mine, positions), angles, keys

    def joined(self, y, x, kept):
        """y (B*K, D), the output of the layer, and x (B*T, D), its input -> (B*T, D)."""
        _, back, positions = kept
        batch, length = positions.shape
        mine = self.cut_back(back, (0, self.number * length), (batch, (self.number + 1) * length), (1, 1))  # (B, T)
        y = self.kept_by_sequence(y, (batch, -1, self.hidden_size))  # (B*K, D) -> (B, K, D)
        x = self.all_by_sequence(x, (batch, length, self.hidden_size))  # (B*T, D) -> (B, T, D)
        y = self.put_back(self.join((y, x)), mine, 1)  # (B, K + T, D) -> (B, T, D)
        return self.all_rows(y, (-1, self.hidden_size))


def attach_token_drop(model: nn.Cell, layers: Sequence[int]) -> None:
    """Let these layers of a decoder process only the sampled tokens.

    Raises:
        ConfigError: the model's attention depends on which tokens are neighbours.
    """
    config = model.config
    if (
        layers
        and config.latent
        and (config.windows or config.indexer or config.latent.num_sinks or config.latent.conv_width)
    ):
        raise ConfigError(
            "random_ltd drops tokens, which windows, indexer, latent.num_sinks and latent.conv_width do not allow"
        )
    for number, layer in enumerate(layers):
        model.layers[layer].token_drop = TokenDrop(model.config, number, len(layers))
        model.layers[layer].drops_tokens = True
