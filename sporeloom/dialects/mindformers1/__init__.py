# SPDX-License-Identifier: Apache-2.0
"""MindFormers 1.x YAML: `parallel_config`, `parallel`, `recompute_config` and the other sections that
tools/train.py has flags for.

Names and defaults: mindformers 1.9.0 tools/register/template.py; what it forces silently: core/parallel_config.py.
"""

from sporeloom.dialects.mindformers1.reader import read
from sporeloom.dialects.mindformers1.writer import write

__all__ = ["read", "write"]
