# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens, positions and top queries, and the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sporeloom.models.parts.spec import MATRIX, ZEROS, InitialValue, ParameterSpec, Specs

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig

LLAMA_NAMES = {"model.embed_tokens": "embedding.word", "model.norm": "final_norm", "lm_head": "head"}
"""Published name of Llama and similar models -> name here, of what belongs to no layer."""

TOKENS = InitialValue("normal", "embedding_std")
POSITIONS = InitialValue("truncated_normal", "embedding_std")


def parameters(config: ModelConfig) -> Specs:
    yield ParameterSpec("embedding.word.weight", (config.vocab_size, config.hidden_size), TOKENS, "table", "tp")
    if config.position == "learned":
        yield ParameterSpec("embedding.position.weight", (config.seq_len, config.hidden_size), POSITIONS, "table")
    if config.query_layer:
        yield ParameterSpec("query_embedding.table.weight", (config.seq_len, config.hidden_size), POSITIONS, "table")
    if config.value_head:
        yield value_head("head", config.hidden_size)
    elif not config.tied_embedding:
        yield ParameterSpec("head.weight", (config.vocab_size, config.hidden_size), MATRIX, "matrix", "tp")


def value_head(name: str, hidden_size: int) -> ParameterSpec:
    """The matrix of a value head, whose values are 0 at first."""
    return ParameterSpec(f"{name}.weight", (1, hidden_size), ZEROS, "matrix", "tp")
