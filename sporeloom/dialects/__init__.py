# SPDX-License-Identifier: Apache-2.0
"""Strategy files of other projects: MindFormers 1.x and 2.x files, Megatron-LM flags; both ways, DeepSpeed's
configurations one way, every key reported.

Each dialect is a module that reads a file into `Settings` and writes one, both with notes of what became of each key.
"""

from sporeloom.dialects.settings import Note, Settings
from sporeloom.dialects.translate import DIALECTS, Translation, recognize, translate

__all__ = ["DIALECTS", "Note", "Settings", "Translation", "recognize", "translate"]
