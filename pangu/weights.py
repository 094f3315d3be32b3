# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha's published parameter names <-> ours, as data. {i} stands for the layer number.

Source: PanguAlpha pytorch tools/change_MspCkpt_ToMgt.py, pcl_pangu src/pangu_alpha.py.
"""

from mindloom.model_config import DecoderConfig
from mindloom.naming import Name, expand

_LAYER = {  # ours: (Megatron's, MindSpore's leaf, whether MindSpore stores it as (in, out))
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


def _table(which: int, whole_prefix: str, layer_prefix: str, query_prefix: str) -> dict[str, Name]:
    def name(prefix: str, entry: tuple[str, str, bool]) -> Name:
        return Name(prefix + str(entry[which]), transposed=which == 1 and entry[2])

    table = {ours: name(whole_prefix, entry) for ours, entry in _WHOLE.items()}
    for leaf, entry in _LAYER.items():
        table["layers.{i}." + leaf] = name(layer_prefix, entry)
        table["query_layer." + leaf] = name(query_prefix, entry)
    return table


TABLES = {
    "megatron": _table(
        0, "language_model.", "language_model.transformer.layers.{i}.", "language_model.transformer.topQueryLayer."
    ),
    "mindspore": _table(1, "backbone.", "backbone.blocks.{i}.", "backbone.top_query_layer."),
}
TABLES["ours"] = {ours: Name(ours) for ours in TABLES["megatron"]}

# Other spellings seen in published files, rewritten before the table is read.
ALIASES = {
    "mindspore": {
        "backbone.embedding.word_embedding.": "backbone.word_embedding.",
        "backbone.embedding.position_embedding.": "backbone.position_embedding.",
    },
    "megatron": {"module.": "", "model.": ""},
}


def names(dialect: str, num_layers: int) -> dict[str, Name]:
    """Our parameter name -> its name (and transposition) in `dialect`, for a model of `num_layers` (query included)."""
    return expand(TABLES[dialect], num_layers - 1)


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each of our parameters."""
    d, ffn = config.hidden_size, config.ffn_hidden_size
    square, vector = (d, d), (d,)
    special = {
        "embedding.word.weight": (config.vocab_size, d),
        "embedding.position.weight": (config.seq_len, d),
        "query_embedding.table.weight": (config.seq_len, d),
        "mlp.up.weight": (ffn, d),
        "mlp.up.bias": (ffn,),
        "mlp.down.weight": (d, ffn),
    }

    def shape(name: str) -> tuple[int, ...]:
        leaf = name if name in special else ".".join(name.split(".")[-3:])
        if leaf in special:
            return special[leaf]
        return vector if name.endswith("bias") or "norm" in name else square

    return {name: shape(name) for name in names("ours", config.num_layers)}
