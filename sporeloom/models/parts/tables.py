# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens, positions and top queries, and the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sporeloom.models.parts.spec import ParameterSpec, Specs

if TYPE_CHECKING:
    from sporeloom.models.config import ModelConfig

LLAMA_NAMES = {"model.embed_tokens": "embedding.word", "model.norm": "final_norm", "lm_head": "head"}
"""Published name of Llama and similar models -> name here, of what belongs to no layer."""


def parameters(config: ModelConfig) -> Specs:
    yield ParameterSpec("embedding.word.weight", (config.vocab_size, config.hidden_size), "table", "tp")
    if config.position == "learned":
        yield ParameterSpec("embedding.position.weight", (config.seq_len, config.hidden_size), "table")
    if config.query_layer:
        yield ParameterSpec("query_embedding.table.weight", (config.seq_len, config.hidden_size), "table")
    if not config.tied_embedding:
        outputs = 1 if config.value_head else config.vocab_size
        yield ParameterSpec("head.weight", (outputs, config.hidden_size), "matrix", "tp")
