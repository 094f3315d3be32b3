# SPDX-License-Identifier: Apache-2.0
"""Names of weights in other projects: the tables that the published decoders share."""

from typing import NamedTuple


class Name(NamedTuple):
    """Name in another project."""

    name: str
    transposed: bool = False
    """The other project stores this matrix as (in, out); here it is (out, in)."""


def names(table: dict[str, Name], num_layers: int) -> dict[str, Name]:
    """Parameter name here -> there, for a model of `num_layers`, including the query layer."""
    result = {}
    for ours, other in table.items():
        for i in range(num_layers - 1) if "{i}" in ours else (0,):
            result[ours.replace("{i}", str(i))] = Name(other.name.replace("{i}", str(i)), other.transposed)
    return result


_LAYER = {  # here: (Megatron's, MindSpore's leaf, whether MindSpore stores it as (in, out))
    "attention_norm.weight": ("input_layernorm.weight", "layernorm1.gamma", False),
    "attention_norm.bias": ("input_layernorm.bias", "layernorm1.beta", False),
    "attention.query.weight": ("attention.query.weight", "attention.dense1.weight", False),
    "attention.query.bias": ("attention.query.bias", "attention.dense1.bias", False),
    "attention.key.weight": ("attention.key.weight", "attention.dense2.weight", False),
    "attention.key.bias": ("attention.key.bias", "attention.dense2.bias", False),
    "attention.value.weight": ("attention.value.weight", "attention.dense3.weight", False),
    "attention.value.bias": ("attention.value.bias", "attention.dense3.bias", False),
    "attention.output.weight": ("attention.dense.weight", "attention.projection.weight", True),
    "attention.output.bias": ("attention.dense.bias", "attention.projection.bias", False),
    "mlp_norm.weight": ("post_attention_layernorm.weight", "layernorm2.gamma", False),
    "mlp_norm.bias": ("post_attention_layernorm.bias", "layernorm2.beta", False),
    "mlp.up.weight": ("mlp.dense_h_to_4h.weight", "output.mapping.weight", True),
    "mlp.up.bias": ("mlp.dense_h_to_4h.bias", "output.mapping.bias", False),
    "mlp.down.weight": ("mlp.dense_4h_to_h.weight", "output.projection.weight", True),
    "mlp.down.bias": ("mlp.dense_4h_to_h.bias", "output.projection.bias", False),
}
_WHOLE = {
    "embedding.word.weight": ("embedding.word_embeddings.weight", "word_embedding.embedding_table", False),
    "embedding.position.weight": ("embedding.position_embeddings.weight", "position_embedding.embedding_table", False),
    "query_embedding.table.weight": (
        "topQueryEmbedding.top_query_embeddings.weight",
        "top_query_embedding.embedding_table",
        False,
    ),
    "final_norm.weight": ("transformer.final_layernorm.weight", "layernorm.gamma", False),
    "final_norm.bias": ("transformer.final_layernorm.bias", "layernorm.beta", False),
}


def decoder_tables(word_and_position: str) -> dict[str, dict[str, Name]]:
    """Dialect -> name here -> name there, {i} standing for the layer number.

    `word_and_position`: what MindSpore's names of these two embeddings begin with. The transposed matrices are as in the
    originals' own converters (PanguAlpha pytorch change_MspCkpt_ToMgt.py, CodeGeeX mindspore_to_megatron.py).
    """

    def table(which: int, prefixes: tuple[str, str, str]) -> dict[str, Name]:
        def name(prefix: str, entry: tuple[str, str, bool]) -> Name:
            text = str(entry[which])
            if which == 1 and text.startswith(("word_", "position_")):
                prefix = word_and_position
            return Name(prefix + text, transposed=which == 1 and entry[2])

        whole, layer, query = prefixes
        names = {ours: name(whole, entry) for ours, entry in _WHOLE.items()}
        for leaf, entry in _LAYER.items():
            names["layers.{i}." + leaf] = name(layer, entry)
            names["query_layer." + leaf] = name(query, entry)
        return names

    transformer = "language_model.transformer."
    megatron = table(0, ("language_model.", transformer + "layers.{i}.", transformer + "topQueryLayer."))
    mindspore = table(1, ("backbone.", "backbone.blocks.{i}.", "backbone.top_query_layer."))
    return {"megatron": megatron, "mindspore": mindspore, "ours": {ours: Name(ours) for ours in megatron}}
