# SPDX-License-Identifier: Apache-2.0
"""The architecture of a model in one picture, an SVG drawn from its configuration: the model on the left, one of its
layers on the right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.norm import OF_BLOCK

STYLE = """<style>
.box { fill: #f0f2f4; stroke: #455a64 }
.tinted { fill: #b2dfdb; stroke: #455a64 }
.line { fill: none; stroke: #455a64 }
text { fill: #20262b; font: 13px sans-serif }
.small { font-size: 11px; fill: #4b5a63 }
@media (prefers-color-scheme: dark) {
  .box { fill: #2b3640; stroke: #b0bec5 }
  .tinted { fill: #1c5c56; stroke: #b0bec5 }
  .line { stroke: #b0bec5 }
  text { fill: #eceff1 }
  .small { fill: #b0bec5 }
}
</style>"""
WIDTH, GAP, TITLE, LINE, TOP = 420, 14, 26, 15, 34
"""Of a column, between boxes, of a box's first line, of a further one, and above the first box; in pixels."""
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU", "fast_gelu": "FastGELU", "silu": "SiLU"}
ROUTERS = {
    "softmax": "softmax router",
    "grouped": "grouped router: one expert of each group",
    "sigmoid": "sigmoid router",
    "hash": "router by token id",
}


@dataclass(frozen=True)
class Box:
    """A part of the model: its name and what is particular about it."""

    title: str
    details: tuple[str, ...] = ()
    tinted: bool = False

    @property
    def height(self) -> int:
        return TITLE + LINE * len(self.details)


Row = tuple[Box, ...]
"""Boxes side by side."""


def norm_of(config: ModelConfig) -> str:
    name = "RMSNorm" if config.norm == "rms" else "LayerNorm"
    return name if config.norm == "rms" or config.has_norm_bias else f"{name} without bias"


def attention_of(config: ModelConfig) -> Box:
    rotation = f"RoPE on {config.rotated} of {config.head_size} features" if config.position == "rotary" else ""
    if config.latent is None:
        heads, kv = config.num_heads, config.kv_heads
        kind = "Multi-query" if kv == 1 else "Multi-head" if kv == heads else "Grouped-query"
        of_keys = f"{kv} of keys and values" if kv > 1 else "1 head of keys and values"
        found = [f"{heads} query heads of {config.head_size} features", of_keys, rotation]
        return Box(f"{kind} attention", tuple(filter(None, found)), True)
    latent = config.latent
    query = f"latents: queries {latent.query_width}, " if latent.query_width else "latents: "
    found = [
        f"{config.num_heads} heads: {latent.nope_dim} + {latent.rope_dim} features of keys, {latent.value_dim} of values",
        f"{query}keys and values {latent.kv_width}",
        rotation,
    ]
    if latent.num_sinks:
        found.append(f"{latent.num_sinks} learned sinks in front of each sequence")
    if latent.conv_width:
        found.append(f"causal convolutions over {latent.conv_width} tokens, on latents and output")
    if indexer := config.indexer:
        found.append(f"sparse attention: {indexer.num_heads} indexer heads choose {indexer.top_k} tokens")
    return Box("Latent attention (MLA)", tuple(found), True)


def mlp_of(config: ModelConfig) -> Box:
    activation = ACTIVATIONS[config.activation]
    kind = "SwiGLU" if (activation, config.gated_mlp) == ("SiLU", True) else activation
    if config.experts is None:
        return Box(f"MLP, {kind}", (f"width {config.ffn_size}",), True)
    mixture = config.experts
    router = ROUTERS[mixture.router] + (" with a correction bias" if mixture.has_bias else "")
    found = [f"{mixture.num_experts} of width {config.expert_size}, {mixture.experts_per_token} for each token", router]
    if mixture.shared_ffn_hidden_size:
        found.append(f"a shared one of width {mixture.shared_ffn_hidden_size} for every token")
    if dense := config.num_layers - sum(map(config.has_experts, range(config.num_layers))):
        found.append(f"{dense} of {config.num_layers} layers: an MLP of width {config.ffn_size} instead")
    return Box(f"Experts, {kind}", tuple(found), True)


def layer_of(config: ModelConfig) -> list[Row]:
    """The parts of a layer, from its input to its output."""
    norm, attention, mlp = Box(norm_of(config)), attention_of(config), mlp_of(config)
    if config.block == "parallel":
        return [(norm,), (attention, mlp), (Box("Add both to the input"),)]
    after = [(norm,)] if config.block == "sandwich" else []
    streams = config.streams
    added = Box(f"Write to {streams.num_streams} residual streams (mHC)" if streams else "Add to the input")
    read = [(Box(f"Read {streams.num_streams} residual streams (mHC)"),)] if streams else []
    assert len(OF_BLOCK[config.block]) == 2 + 2 * len(after)
    half = [*read, (norm,)], [*after, (added,)]
    return [*half[0], (attention,), *half[1], *half[0], (mlp,), *half[1]]


def layers_of(config: ModelConfig) -> Box:
    """The layers of the model, counted by kind."""
    found = [f"{config.block} blocks, hidden size {config.hidden_size}"]
    if config.indexer:
        found.append(f"{len(config.indexer.layers)} with sparse attention")
    for width, count in Counter(config.windows[: config.num_layers]).items():
        if width:
            found.append(f"{count} with sliding windows of {width} tokens")
    if config.streams and (normed := config.streams.norm_layers):
        found.append(f"a norm over all streams behind {len(normed)} of them")
    return Box(f"{plain_layers(config)} layers", tuple(found), True)


def plain_layers(config: ModelConfig) -> int:
    """Number of layers besides the top query layer."""
    return config.num_layers - config.query_layer


def query_layer_of(config: ModelConfig) -> Box:
    queries = f"its queries: an embedding of the position, {config.seq_len} rows,"
    return Box("Top query layer", (queries, "neither normed nor added; all else as in a layer"), True)


def top_of(config: ModelConfig) -> list[Row]:
    """The parts between the layers and the head. Multi-token prediction reads hidden states beside the path to the head,
    which reads its output, too."""
    norm = Box(f"Final {norm_of(config)}")
    if config.query_layer:
        rows: list[Row] = [(norm,), (query_layer_of(config),)]
        return rows if config.final_norm == "before_query" else rows[::-1]
    if not (count := config.num_mtp_layers):
        return [(norm,)]
    layers, read = ("layer", "reads") if count == 1 else ("layers", "read")
    found = (f"{count} further {layers}, in training,", f"which {read} later tokens, too")
    prediction = Box("Multi-token prediction", found)
    if config.mtp_input == "after_norm":
        return [(norm,), (Box("Next token"), prediction)]
    return [(norm, prediction)]


def model_of(config: ModelConfig) -> list[Row]:
    """The parts of the model, from tokens to logits."""
    rows: list[Row] = [(Box("Token embedding", (f"{config.vocab_size} rows",)),)]
    if config.position == "learned":
        rows.append((Box("Position embedding", (f"{config.seq_len} rows, added",)),))
    rows.append((layers_of(config),))
    if config.streams:
        rows.append((Box(f"{config.streams.num_streams} residual streams become one"),))
    head = "the token embedding again" if config.tied_embedding else "a matrix of its own"
    return [*rows, *top_of(config), (Box("Head", (head,)),)]


def column(rows: list[Row], left: int, title: str) -> tuple[list[str], int]:
    """The elements of a column, and where it ends."""
    found, top, above = [f'<text x="{left}" y="22">{escape(title)}</text>'], TOP, []
    for row in rows:
        width = (WIDTH - GAP * (len(row) - 1)) // len(row)
        lefts = [left + number * (width + GAP) for number in range(len(row))]
        height, middles = max(box.height for box in row), [start + width // 2 for start in lefts]
        for x in max(above, middles, key=len) if above else ():
            found.append(f'<path class="line" d="M{x} {top - GAP} L{x} {top}"/>')
        for box, start in zip(row, lefts, strict=True):
            found += _box(box, start, top, width, height)
        top, above = top + height + GAP, middles
    return found, top - GAP


def _box(box: Box, left: int, top: int, width: int, height: int) -> list[str]:
    kind = "tinted" if box.tinted else "box"
    found = [f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>']
    found.append(f'<text x="{left + 12}" y="{top + 18}">{escape(box.title)}</text>')
    for number, detail in enumerate(box.details, 1):
        y = top + 18 + LINE * number
        found.append(f'<text class="small" x="{left + 12}" y="{y}">{escape(detail)}</text>')
    return found


def picture(config: ModelConfig, title: str) -> str:
    """The SVG of a model."""
    (model, end), (layer, end_of_layer) = (
        column(model_of(config), 10, "The model"),
        column(layer_of(config), WIDTH + 30, f"One of the {plain_layers(config)} layers"),
    )
    height, width = max(end, end_of_layer) + 12, 2 * WIDTH + 40
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{escape(title)}</title>", STYLE]
    return "\n".join([*head, *model, *layer, "</svg>"]) + "\n"
