# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.x YAML: `parallelism`, `recompute`, `training` and the other sections.

Names: mindformers 1.9.0 and 2.1.0 pynative/config/config.py, and the 2.0 documentation; since then `data_parallel_shard`
takes the place of `hsdp_shard_size`. The data parallel degree is what is left of the devices.
"""

from sporeloom.dialects.mindformers2.reader import read
from sporeloom.dialects.mindformers2.writer import write

__all__ = ["read", "write"]
