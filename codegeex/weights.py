# SPDX-License-Identifier: Apache-2.0
"""CodeGeeX's published parameter names <-> ours, as data.

Source: THUDM/CodeGeeX codegeex/megatron/mindspore_to_megatron.py, codegeex/mindspore/src/pangu_alpha.py.
"""

from mindloom.naming import decoder_tables

TABLES = decoder_tables(word_and_position="backbone.embedding.")

# Other spellings seen in published files, rewritten before the table is read.
ALIASES = {
    "mindspore": {
        "backbone.word_embedding.": "backbone.embedding.word_embedding.",
        "backbone.position_embedding.": "backbone.embedding.position_embedding.",
    },
    "megatron": {"module.": "", "model.": ""},
}
