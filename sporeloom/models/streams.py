# SPDX-License-Identifier: Apache-2.0
"""Dimensions of parts that openPangu 2.0 has besides latent attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, Positive, number_problems

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Hyper-connections (mHC): the residual stream is n streams, which gates of each layer read, mix and write. Source:
    arXiv:2512.24880."""

    num_streams: Count
    """n."""
    rounds: Count = 20
    """Rounds of Sinkhorn's normalization of the mixing matrix."""
    norm_layers: tuple[Natural, ...] = ()
    """Numbers of the layers whose output is normed over all streams."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm_layers", tuple(self.norm_layers))  # a list in JSON
        if problems := list(number_problems(self, lambda name: f"streams.{name}")):
            raise ConfigError(problems)

    @property
    def num_gates(self) -> int:
        """Number of gates of a part of a layer: n to read, n to write, n^2 to mix."""
        return self.num_streams * (self.num_streams + 2)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sparse attention (DSA): of the visible tokens a query attends to those whose scores by small heads of their own are
    highest. Source: DeepSeek-V3.2-Exp."""

    layers: tuple[Natural, ...]
    """Numbers of the layers that have it."""
    top_k: Count
    """Number of tokens that a query attends to; equal scores at the limit all count."""
    num_heads: Count
    head_dim: Count
    norm_epsilon: Positive = 1e-6
    """Epsilon of the norm of its keys."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if problems := list(number_problems(self, lambda name: f"indexer.{name}")):
            raise ConfigError(problems)


def further_problems(config: ModelConfig) -> Iterator[str]:
    """Describe each value of `windows`, `indexer` and `streams` that does not fit the model."""
    latent, indexer, streams = config.latent, config.indexer, config.streams
    for name in ("windows", "indexer"):
        if getattr(config, name) and latent is None:
            yield f"{name} is for models with latent"
    if config.windows and len(config.windows) != config.num_layers + config.num_mtp_layers:
        yield (
            f"windows has {len(config.windows)} entries for num_layers {config.num_layers} and num_mtp_layers "
            f"{config.num_mtp_layers}"
        )
    if indexer:
        if wrong := [layer for layer in indexer.layers if layer >= config.num_layers]:
            yield f"indexer.layers: there is no layer {wrong[0]}; the last one is {config.num_layers - 1}"
        if latent and not latent.query_width:
            yield "indexer needs latent.query_width"
        if latent and indexer.head_dim < latent.rope_dim:
            yield f"indexer.head_dim {indexer.head_dim} is less than latent.rope_dim {latent.rope_dim}"
    if streams and config.block != "sandwich":
        yield f"streams is for block sandwich, not {config.block}"
    if streams and (wrong := [layer for layer in streams.norm_layers if layer >= config.num_layers]):
        yield f"streams.norm_layers: there is no layer {wrong[0]}; the last one is {config.num_layers - 1}"
    if latent and latent.conv_width == 1:
        yield "latent.conv_width 1 sees no token before; the least is 2, and 0 is none"


def fields_of_layers(config: ModelConfig, count: int) -> dict[str, Any]:
    """The fields of this model with the first `count` of its layers, that depend on their number."""
    indexer, streams = config.indexer, config.streams
    windows = (*config.windows[: config.num_layers][:count], *config.windows[config.num_layers :])
    if indexer:
        layers = tuple(layer for layer in indexer.layers if layer < count)
        indexer = dataclasses.replace(indexer, layers=layers) if layers else None
    if streams:
        normed = tuple(layer for layer in streams.norm_layers if layer < count)
        streams = dataclasses.replace(streams, norm_layers=normed)
    return {"num_layers": count, "windows": windows, "indexer": indexer, "streams": streams}
