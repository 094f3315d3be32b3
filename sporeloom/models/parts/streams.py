# SPDX-License-Identifier: Apache-2.0
"""Residual streams of hyper-connections (mHC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Natural, number_problems
from sporeloom.models.parts import norm
from sporeloom.models.parts.spec import MATRIX, ONES, ZEROS, InitialValue, ParameterSpec, Specs
from sporeloom.models.parts.work import Values, Work

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig


SINKHORN_PASSES = 26
"""Values read and written backward for each entry of a mixing matrix and division of Sinkhorn's normalization."""


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

    def mixing(self, hidden_size: int) -> int:
        """Multiplications of a token for the mixing of the streams before and after a part of a layer, besides gates."""
        return self.num_streams**2 * hidden_size


def parameters(config: ModelConfig, layer: int) -> Specs:
    """Parameters of a layer; those of multi-token prediction have none."""
    if (streams := config.streams) and layer < config.num_layers:
        for part in ("attention", "mlp"):
            yield from _gates(f"{part}_streams", config, streams, streams.num_gates, 3)
        if layer in streams.norm_layers:
            yield ParameterSpec("block_norm.weight", (streams.num_streams * config.hidden_size,), ONES)


def output_parameters(config: ModelConfig) -> Specs:
    """Parameters behind the last layer, where the streams become one."""
    if config.streams:
        yield from _gates("streams_out", config, config.streams, config.streams.num_streams, 1)


def _gates(name: str, config: ModelConfig, streams: StreamsConfig, count: int, kinds: int) -> Specs:
    width = streams.num_streams * config.hidden_size
    yield ParameterSpec(f"{name}.norm.weight", (width,), ONES)
    yield ParameterSpec(f"{name}.gates.weight", (count, width), MATRIX, "matrix")
    yield ParameterSpec(f"{name}.alpha", (kinds,), InitialValue("constant", 0.01))
    yield ParameterSpec(f"{name}.beta", (count,), ZEROS)


def problems(config: ModelConfig, streams: StreamsConfig) -> Iterator[str]:
    """Describe what does not fit the model."""
    if config.block != "sandwich":
        yield f"streams is for block sandwich, not {config.block}"
    if wrong := [layer for layer in streams.norm_layers if layer >= config.num_layers]:
        yield f"streams.norm_layers: there is no layer {wrong[0]}; the last one is {config.num_layers - 1}"


def work(streams: StreamsConfig, hidden_size: int, num_layers: int) -> Work:
    """Work of a layer, mean of all layers.

    In float32 the streams are normed, weighed for the gates, read and mixed, each from a copy of its own; the result of the
    layer's part is there in float32, too. Sinkhorn's rounds keep their sums.
    """
    n, width = streams.num_streams, streams.num_streams * hidden_size
    sums = (2 * streams.rounds - 1) * n
    gates = Values(0, sums + 3 * streams.num_gates)
    part = Work(
        kept=Values(0, 3 * width + hidden_size, 8 * width) + gates,
        forward=Values(width, 6 * width - 2 * hidden_size, 8 * width) + gates,
        backward=Values(width, 8 * width + SINKHORN_PASSES * sums * n),
    )
    return part.times(2) + norm.work(width, False).times(len(streams.norm_layers) / num_layers)


def work_of_output(streams: StreamsConfig, hidden_size: int) -> Work:
    """Work behind the last layer, where the streams become one."""
    width = streams.num_streams * hidden_size
    return Work(
        kept=Values(0, 2 * width, 8 * width),
        forward=Values(0, 3 * width, 8 * width),
        backward=Values(width, 5 * width),
    )


def float32_products(streams: StreamsConfig, hidden_size: int) -> tuple[float, float]:
    """Multiplications of a token in a layer's products, all in float32, and bytes that they read and write."""
    width = streams.num_streams * hidden_size
    gates, mixing = width * streams.num_gates, streams.mixing(hidden_size)
    return 2.0 * (gates + mixing), 2 * 4.0 * (width + 2 * width)
