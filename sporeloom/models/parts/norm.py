# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm."""

from __future__ import annotations

from sporeloom.models.parts.spec import ONES, ZEROS, InitialValue, LayerSizes, ParameterSpec, Specs

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
