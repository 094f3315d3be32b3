# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm."""

from __future__ import annotations

from sporeloom.models.parts.spec import ONES, ZEROS, InitialValue, LayerSizes, ParameterSpec, Specs
from sporeloom.models.parts.work import NO_WORK, Values, Work

OF_BLOCK = {
    "sequential": ("attention_norm", "mlp_norm"),
    "parallel": ("attention_norm",),
    "sandwich": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
}
"""Structure of a layer -> its norms."""
GAINS = {
    "attention_output_norm": InitialValue("constant", "attention_gain"),
    "mlp_output_norm": InitialValue("constant", "mlp_gain"),
}
"""Initial weight of the norms behind attention and MLP; of all others 1."""
LLAMA_NAMES = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
"""Published name of Llama and similar models -> name here."""


def parameters(name: str, sizes: LayerSizes) -> Specs:
    yield ParameterSpec(f"{name}.weight", (sizes.hidden_size,), GAINS.get(name, ONES))
    if sizes.has_norm_bias:
        yield ParameterSpec(f"{name}.bias", (sizes.hidden_size,), ZEROS)


def kept_features(sizes: LayerSizes) -> int:
    """Number of values that a norm and the product after it keep of a token for the backward pass: their inputs."""
    return 2 * sizes.hidden_size


def work(width: int, feeds_products: bool) -> Work:
    """Work of an RMSNorm of operators in float32, the addition to the residual stream included. It keeps its input and the
    normalized one, and its result for the products that read it."""
    return Work(
        kept=Values(width * feeds_products, 2 * width),
        forward=Values(2 * width, 2 * width, 4 * width),
        backward=Values((3 if feeds_products else 2) * width, 3 * width),
    )


def work_of_block(block: str, hidden_size: int) -> Work:
    """Work of a layer's norms."""
    feed, behind = work(hidden_size, True), work(hidden_size, False)
    total = NO_WORK
    for name in OF_BLOCK[block]:
        total += behind if name in GAINS else feed
    if block == "sandwich":  # whose second norms are fused with the additions
        return total
    return total + Work(forward=Values(2 * hidden_size), backward=Values(hidden_size)).times(2)
