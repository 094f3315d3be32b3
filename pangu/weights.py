# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha's published parameter names <-> ours, as data.

Source: PanguAlpha pytorch tools/change_MspCkpt_ToMgt.py, pcl_pangu src/pangu_alpha.py.
"""

from mindloom.naming import decoder_tables

TABLES = decoder_tables(word_and_position="backbone.")

# Other spellings seen in published files, rewritten before the table is read.
ALIASES = {
    "mindspore": {
        "backbone.embedding.word_embedding.": "backbone.word_embedding.",
        "backbone.embedding.position_embedding.": "backbone.position_embedding.",
    },
    "megatron": {"module.": "", "model.": ""},
}
