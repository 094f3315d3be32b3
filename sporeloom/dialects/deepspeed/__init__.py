# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration, a JSON file; read only, every key translated, reported as without effect, or refused
by name.

It knows no pipelines: devices are replicas, but for `tensor_parallel.autotp_size` and `sequence_parallel_size`.
"""

from sporeloom.dialects.deepspeed.reader import read

__all__ = ["read"]
