# SPDX-License-Identifier: Apache-2.0
"""A decoder with the parts of its configuration, and the network that trains it.

Shapes: B batch, T tokens, D hidden, V vocabulary. The residual stream is (B*T, D) from the embedding to the head.
"""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.core.errors import ConfigError
from sporeloom.models.cells import ClippedAttention, TyingCell
from sporeloom.models.config import NO_LABEL, ModelConfig
from sporeloom.models.parameters import decoder_specs
from sporeloom.models.parts.multi_token_prediction import PREFIX
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.models.parts.tables import value_head
from sporeloom.nn.attention import Attention, DocumentMask, SlotMask, WindowMask
from sporeloom.nn.blocks import BLOCKS
from sporeloom.nn.causal_conv import CausalConv, ConvPlaces
from sporeloom.nn.dropout import number_dropouts
from sporeloom.nn.embedding import TokenEmbedding
from sporeloom.nn.flash import chooses_flash
from sporeloom.nn.head import HeadInput, ValueHead, build_head
from sporeloom.nn.hyper_connections import StreamLayer, StreamReader
from sporeloom.nn.indexer import Indexer
from sporeloom.nn.latent_attention import LatentAttention
from sporeloom.nn.loss import CrossEntropy
from sporeloom.nn.mtp import MTPLayer, MTPLosses
from sporeloom.nn.norm import build_norm
from sporeloom.nn.rotary import Angles
from sporeloom.nn.routing import TokenGroups

HIDDEN = -1e9
"""Added to the largest attention logits of padding."""


class Decoder(nn.Cell, TyingCell):
    """Tokens (B, T) and their positions within documents (B, T) -> logits (B*T, V), or values (B*T, 1), float32.

    `rows` picks the rows of (B*T) to give logits for, counted among those this device holds. With caches attached the
    tokens continue what the caches hold, and `slots` says where their keys and values belong (see `KVCache`).
    `dropout_keys` (B, T) are needed while training with dropout; a network for inference with several adapters is given
    each token's adapter in their place (see `sporeloom.nn.multi_lora`).
    """

    num_kernels = 0
    """Number of parts that compute by compiled kernels, in a network for inference (`sporeloom.inference.model`)."""
    has_several_adapters = False
    """Whether each token may have an adapter of its own."""
    rows_are_alone = False
    """Whether what a row gets is the same to the bit however many rows there are."""
    places_are_alike = False
    """Whether it is the same at each place in a batch of one size."""
    num_drafts = 0
    """Maximum number of drafted tokens of a row, for which other places in the batch compute; 0: none do."""
    drafts = False
    """Whether layers of multi-token prediction draft tokens, with caches of their own (`DraftStep`)."""
    kv_cache = "auto"
    """Number type of the caches, as `--kv-cache` names it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dtype, specs = getattr(mstype, config.compute_dtype), decoder_specs(config)
        self.config, self.tied_embedding = config, config.tied_embedding
        self.has_experts = config.experts is not None
        self.has_attention_losses, self.counts_max_logits = config.trains_indexer, False
        self.embedding = TokenEmbedding(config, specs.within("embedding"), dtype)
        self.num_sinks = config.latent.num_sinks if config.latent else 0
        self.mask = DocumentMask(chooses_flash(config), self.num_sinks)
        self.has_rotary = config.position == "rotary"
        if self.has_rotary:
            self.angles = Angles(config)
        plain = [path for path in config.layers if path.startswith("layers.")]
        block = StreamLayer if config.streams else BLOCKS[config.block]
        self.layers = nn.CellList([block(config, specs.within(path), dtype, layer) for layer, path in enumerate(plain)])
        self.build_further(config, specs)
        if config.num_mtp_layers:
            self.mtp = nn.CellList(
                [MTPLayer(config, specs.within(f"{PREFIX}{n}"), dtype, n) for n in range(config.num_mtp_layers)]
            )
            self.known_token, self.mtp_reads_normed = ops.Maximum(), config.mtp_input == "after_norm"
        self.build_top(config, specs, dtype)
        self.final_norm = build_norm(config, specs.within("final_norm"), dtype)
        self.head = build_head(config, specs.within("head"), dtype)
        number_dropouts(self)

    def build_further(self, config, specs):
        """Streams, windows, and what convolutions need of positions."""
        self.has_streams, self.has_windows = config.streams is not None, any(config.windows)
        if config.streams:
            self.num_streams, self.repeat = config.streams.num_streams, ops.Tile()
            self.streams_out = StreamReader(config, specs.within("streams_out"), reads_only=True)
        if self.has_windows:
            windows = sorted(set(config.windows) - {0})
            self.window_masks = nn.CellList(
                [WindowMask(window, self.num_sinks, chooses_flash(config)) for window in windows]
            )
            self.mask_of_layer = tuple(1 + windows.index(window) if window else 0 for window in config.windows)
        width = config.latent.conv_width if config.latent else 0
        self.has_conv, self.first_inside = width > 0, width - 1
        if self.has_conv:
            self.is_inside, self.inside_number, self.inside_column = ops.GreaterEqual(), ops.Cast(), ops.ExpandDims()
            self.conv_dtype = getattr(mstype, config.compute_dtype)

    def biases(self, positions):
        """The mask of each layer."""
        masks = (self.mask(positions),)
        if self.has_windows:
            masks += tuple([mask(positions) for mask in self.window_masks])
        return masks

    def build_top(self, config, specs, dtype):
        """Parts that `top` uses besides the final norm; a decoder has none."""

    @nn.Cell.compile_phase.setter
    def compile_phase(self, value):
        """Set train or inference mode only when it changes: MindSpore sets it at each call, in hundreds of parts,
        which takes a millisecond."""
        if value != self._compile_phase:
            nn.Cell.compile_phase.fset(self, value)

    def attach_caches(
        self, num_rows: int, capacity: int, is_int8: bool = False, num_drafts: int = 0, drafts: bool = False
    ) -> None:
        """Let attention keep the keys and values of `capacity` tokens for each of `num_rows` rows, in place of any
        before; `is_int8`: in int8, for attention with keys and values of its own; `num_drafts`: maximum number of tokens
        that are taken back; `drafts`: in the layers of multi-token prediction, too, which keep the states that they read."""
        scaling = self.config.rope_scaling
        if scaling and scaling.kind == "dynamic":
            if min(capacity - 1, self.config.seq_len) > scaling.original:
                raise ConfigError(
                    f"rope_scaling dynamic: texts of up to seq_len {self.config.seq_len} tokens are longer than "
                    f"original_seq_len {scaling.original}, beyond which each token changes the keys of all earlier ones, "
                    f"which a cache holds; give seq_len {scaling.original}, or scale with ntk or yarn"
                )
            self.angles.is_dynamic = False
        self.mask = SlotMask(capacity, self.num_sinks)
        if self.has_windows:
            windows = [mask.window for mask in self.window_masks]
            self.window_masks = nn.CellList([SlotMask(capacity, self.num_sinks, window) for window in windows])
        if self.has_conv:
            self.conv_places = ConvPlaces(self.first_inside + 1, capacity, self.first_inside + 1 + num_drafts)
        for name, cell in self.cells_and_names():
            if not isinstance(cell, Attention | LatentAttention | Indexer | CausalConv):
                continue
            if drafts or not name.startswith(PREFIX):
                if isinstance(cell, CausalConv):
                    cell.attach_cache(num_rows, num_drafts)
                else:
                    cell.attach_cache(num_rows, capacity, *([True] if is_int8 else []))
                cell.cache.update_parameters_name(f"{name}.cache.")
        self.drafts = drafts
        for depth, layer in enumerate(self.mtp if drafts else ()):
            layer.attach_states(self.config, num_rows, capacity, f"{PREFIX}{depth}")

    def attach_max_logits(self) -> None:
        """Let training steps count the largest attention logit of each head."""
        self.has_attention_losses = self.counts_max_logits = True
        for _, cell in self.cells_and_names():
            if isinstance(cell, ClippedAttention):
                cell.attach_max_logits()

    def attach_head_input(self) -> None:
        """Let `HiddenStates` return the head's input."""
        self.head_input = HeadInput()

    def construct(self, tokens, positions, rows=None, slots=None, dropout_keys=None):
        return self.logits_and_losses(tokens, positions, rows, slots, dropout_keys)[0]

    def logits_and_losses(
        self,
        tokens,
        positions,
        rows=None,
        slots=None,
        dropout_keys=None,
        shares=None,
        groups=None,
        kept=None,
        of_tokens=None,
    ):
        """Logits, and the losses of layers, (1,), if there are any: with `shares` and `groups` (see `sporeloom.nn.moe`) those
        of routers, with `of_tokens` (see `sporeloom.nn.blocks`) those of attention."""
        x, losses = self.hidden(tokens, positions, slots, dropout_keys, shares, groups, kept, of_tokens)
        return self.head(x, self.embedding.word.weight, rows), losses

    def hidden(
        self, tokens, positions, slots=None, dropout_keys=None, shares=None, groups=None, kept=None, of_tokens=None
    ):
        """Input of the head (B*T, D), and the losses of layers. `kept`: the output of `draw_kept` of
        `sporeloom.data.random_ltd`, where layers drop tokens."""
        x, losses, masks, _ = self.stream(tokens, positions, slots, dropout_keys, shares, groups, kept, of_tokens)
        normed, losses = self.top(x, positions, masks[0], slots, dropout_keys, losses, of_tokens)
        if self.drafts:
            normed = ops.depend(normed, self.mtp[0].states(normed if self.mtp_reads_normed else x, slots))
        return normed, losses

    def stream(
        self, tokens, positions, slots=None, dropout_keys=None, shares=None, groups=None, kept=None, of_tokens=None
    ):
        """Output of the last of `layers`, the losses of layers, and the masks and angles of the positions."""
        kept = None if kept is None else (*kept, positions)
        masks = self.biases(positions)
        bias = masks[0]
        angles = self.angles(positions) if self.has_rotary else None
        if self.has_conv:
            angles = self.with_conv(angles, positions, slots)
        x, losses = self.embedding(tokens, positions, dropout_keys), None
        if self.has_streams:
            x = self.repeat(x, (1, self.num_streams))
        for number, layer in enumerate(self.layers):
            if self.has_windows:
                bias = masks[self.mask_of_layer[number]]
            if self.has_experts or self.has_attention_losses:
                x, losses = layer(
                    x, bias, angles, slots, dropout_keys, tokens, shares, losses, groups, kept=None, of_tokens=of_tokens
                )
            else:
                x = layer(x, bias, angles, slots, dropout_keys, kept=kept)
        if self.has_streams:
            x, _ = self.streams_out(x)
        return x, losses, masks, angles

    def with_conv(self, angles, positions, slots):
        """The angles, and what convolutions need (`CausalConv`)."""
        inside = self.inside_number(self.is_inside(positions, self.first_inside), self.conv_dtype)
        inside = self.inside_column(inside, 2)
        return (*angles, inside) if slots is None else (*angles, inside, *self.conv_places(slots))

    def logits_of_depths(
        self, tokens, positions, later, dropout_keys=None, shares=None, groups=None, kept=None, of_tokens=None
    ):
        """Logits of the next token and of each depth of multi-token prediction, (B*T, V) each, and the losses of layers.

        `later`: for each depth d the tokens d positions on, (B, T); any token below 0 where there is none.
        """
        x, losses, masks, angles = self.stream(tokens, positions, None, dropout_keys, shares, groups, kept, of_tokens)
        bias = masks[0]
        normed, losses = self.top(x, positions, bias, None, None, losses)
        logits = (self.head(normed, self.embedding.word.weight),)
        for depth, layer in enumerate(self.mtp):
            if self.has_windows:
                bias = masks[self.mask_of_layer[self.config.num_layers + depth]]
            embedded = self.embedding(self.known_token(later[depth], 0), positions)
            x = normed if self.mtp_reads_normed else x
            x, losses = layer(x, embedded, bias, angles, tokens, shares, losses, groups, of_tokens)
            normed = layer.head_norm(x)
            logits = (*logits, self.head(normed, self.embedding.word.weight))
        return logits, losses

    def logits_of_depth(self, depth, later, positions, rows, slots, sources, targets):
        """Logits (len(rows), V) of a depth of multi-token prediction, for tokens whose states its cache holds.

        `later` (B, T): the tokens depth + 1 positions on. `sources`, `targets`: `slots` of states, (B, 1, T, 3): those it
        reads, and those of the next depth, or of the last one itself, that its own are written to.
        """
        layer, masks = self.mtp[depth], self.biases(positions)
        bias = masks[self.mask_of_layer[self.config.num_layers + depth]] if self.has_windows else masks[0]
        angles = self.angles(positions) if self.has_rotary else None
        if self.has_conv:
            angles = self.with_conv(angles, positions, slots)
        embedded = self.embedding(later, positions)
        x, _ = layer(layer.states.at(sources), embedded, bias, angles, later, slots=slots)
        normed = layer.head_norm(x)
        reader = self.mtp[min(depth + 1, self.config.num_mtp_layers - 1)]
        normed = ops.depend(normed, reader.states(normed if self.mtp_reads_normed else x, targets))
        return self.head(normed, self.embedding.word.weight, rows)

    def top(self, x, positions, bias, slots, dropout_keys, losses=None, of_tokens=None):
        """Compute the part from the last of `layers` to the head. Returns the head's input and the losses."""
        return self.final_norm(x), losses


class HiddenStates(nn.Cell):
    """The input of a decoder's head in place of its logits, (len(rows), D) float32. Inputs are those of the decoder, whose
    parameters and caches it uses."""

    def __init__(self, model: Decoder):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, tokens, positions, rows, slots=None, adapter_ids=None):
        x, _ = self.model.hidden(tokens, positions, slots, adapter_ids)
        return self.model.head_input(x, rows)


class DraftStep(nn.Cell):
    """Logits of a depth of multi-token prediction, from 0 on (see `Decoder.logits_of_depth`), of a decoder whose parameters
    and caches it uses."""

    def __init__(self, model: Decoder, depth: int):
        super().__init__(auto_prefix=False)
        self.model, self.depth = model, depth

    def construct(self, later, positions, rows, slots, sources, targets):
        return self.model.logits_of_depth(self.depth, later, positions, rows, slots, sources, targets)


class DecoderWithLoss(nn.Cell):
    """Training network: from a batch to its loss.

    tokens, labels, positions: (B, T) int32; a label is `NO_LABEL` where there is padding, which experts do not see.
    loss_weights: (B, T) float32, each token's share of the loss (see `sporeloom.data.batch`). The weights already hold
        the denominator of the global batch, so that the losses of its microbatches simply add up. Further arrays: inputs
        of the loss, (B, T); dropout_keys, (B, T), int32, with a dropout rate above 0; and the two of
    `sporeloom.data.random_ltd.draw_kept` where layers drop tokens. With multi-token prediction and the cross-entropy: labels
    and loss weights of each depth instead, (B, T) each (`sporeloom.data.batch.mtp_targets`).

    Args:
        loss: of logits, labels, weights and its further inputs; without it, the cross-entropy. The losses of routers and
            indexers are added to the cross-entropy only, and only there do experts drop what is beyond their capacity.
    """

    def __init__(self, model: Decoder, loss: nn.Cell | None = None):
        super().__init__()
        self.model = model
        self.loss = CrossEntropy(model.config.z_loss) if loss is None else loss
        self.num_inputs = self.loss.num_inputs
        self.has_router_losses = model.has_experts and loss is None
        self.is_cross_entropy = loss is None
        self.is_padding, self.padding_number, self.padding_mask, self.over_heads = (
            ops.Equal(),
            ops.Cast(),
            ops.Mul(),
            ops.ExpandDims(),
        )
        self.num_mtp = model.config.num_mtp_layers if loss is None else 0
        if self.num_mtp:
            self.num_inputs += 2 * self.num_mtp
            self.mtp_losses = MTPLosses(model.config)
        if self.has_router_losses:
            self.token_groups = TokenGroups(model.config)
            self.by_group, self.share = ops.Reshape(), ops.ReduceSum()

    def construct(self, tokens, labels, positions, loss_weights, *more):
        inputs, rest = more[: self.num_inputs], more[self.num_inputs :]
        dropout_keys = rest[0] if len(rest) % 2 else None
        kept = rest[-2:] if len(rest) > 1 else None
        if self.num_mtp:
            return self.of_depths(tokens, labels, positions, loss_weights, inputs, dropout_keys, kept)
        if not self.is_cross_entropy or not (self.model.has_experts or self.model.has_attention_losses):
            logits, _ = self.model.logits_and_losses(tokens, positions, None, None, dropout_keys, kept=kept)
            return self.loss(logits, labels, loss_weights, *inputs)
        shares, groups = self.of_groups(tokens, labels, loss_weights)
        of_tokens = self.of_tokens(labels, loss_weights)
        logits, losses = self.model.logits_and_losses(
            tokens, positions, None, None, dropout_keys, shares, groups, kept=None, of_tokens=of_tokens
        )
        return self.loss(logits, labels, loss_weights, losses)

    def of_tokens(self, labels, loss_weights):
        """Tensors that the losses of attention need (see `sporeloom.nn.blocks`); None where it has none."""
        if not (self.is_cross_entropy and self.model.has_attention_losses):
            return None
        if not self.model.counts_max_logits:
            return loss_weights, None
        padding = self.padding_number(self.is_padding(labels, NO_LABEL), mstype.float32)
        return loss_weights, self.over_heads(self.padding_mask(padding, HIDDEN), 1)

    def of_groups(self, tokens, labels, loss_weights):
        """The parts of the loss that groups of tokens have, (G,), and the groups; None without routers' losses."""
        if not self.has_router_losses:
            return None, None
        groups = self.token_groups(labels, tokens)
        return self.share(self.by_group(loss_weights, groups[0].shape), 1), groups

    def of_depths(self, tokens, labels, positions, loss_weights, inputs, dropout_keys, kept):
        """The loss with that of multi-token prediction. `inputs`: labels and weights of each depth."""
        shares, groups = self.of_groups(tokens, labels, loss_weights)
        of_tokens = self.of_tokens(labels, loss_weights)
        targets = (labels, *inputs[0::2])
        logits, losses = self.model.logits_of_depths(
            tokens, positions, targets[:-1], dropout_keys, shares, groups, kept, of_tokens
        )
        total = self.loss(logits[0], labels, loss_weights, losses)
        for depth in range(self.num_mtp):
            of_depth = self.loss(logits[depth + 1], targets[depth + 1], inputs[2 * depth + 1])
            total = self.mtp_losses(total, of_depth)
        return total


class DecoderWithValues(nn.Cell):
    """Training network of a policy and its critic, which share all but their heads; see `DecoderWithLoss`."""

    def __init__(self, model: Decoder, loss: nn.Cell):
        super().__init__()
        self.model, self.loss = model, loss
        specs = ParameterSpecs.of([value_head("value_head", model.config.hidden_size)])
        self.value_head = ValueHead(specs.within("value_head"), None)
        self.num_inputs = loss.num_inputs

    def construct(self, tokens, labels, positions, loss_weights, *more):
        inputs, rest = more[: self.num_inputs], more[self.num_inputs :]
        x, _ = self.model.hidden(tokens, positions, dropout_keys=rest[0] if rest else None)
        logits = self.model.head(x, self.model.embedding.word.weight)
        return self.loss(logits, self.value_head(x, None), labels, loss_weights, *inputs)
