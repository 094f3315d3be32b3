# SPDX-License-Identifier: Apache-2.0
"""Every name of MindSpore that it does not promise to keep: Python's, and C++'s as its libraries export them.

Tried with the versions below. Whatever needs another such name adds it here.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms

from sporeloom.mindspore_compat.protobuf import compiled_messages

SUPPORTED_VERSIONS = ("2.9", "2.10")

try:
    from mindspore._c_expression.typing import type_to_type_id
    from mindspore.common.dtype import _dtype_to_nptype as numpy_type
    from mindspore.graph import api as graph_api  # whose collections of garbage `without_collection` leaves out
    from mindspore.graph._parse import compile_config
    from mindspore.graph.api import _cell_graph_executor as cell_graph_executor
    from mindspore.ops.operations._pyfunc_registry import add_pyfunc
    from mindspore.train import mind_ir_pb2, node_strategy_pb2
except ImportError as missing:
    raise ImportError(
        f"MindSpore {ms.__version__} lacks names that partitioning needs: {missing}; use "
        f"{' or '.join(SUPPORTED_VERSIONS)}"
    ) from None

try:  # its own partitioner, which MindSpore retires after 2.11
    from mindspore import reset_auto_parallel_context, set_auto_parallel_context
    from mindspore.parallel._auto_parallel_context import auto_parallel_context
    from mindspore.parallel.nn import GradAccumulation, MicroBatchInterleaved
except ImportError as missing:
    reset_auto_parallel_context = set_auto_parallel_context = auto_parallel_context = None
    GradAccumulation = MicroBatchInterleaved = None
    NO_PARTITIONER = (
        f"MindSpore {ms.__version__} has no partitioner of its own ({missing}): training and inference on CPU "
        "processes, dry runs and certificates need none; `engine: mindspore` does, "
        f"with MindSpore {' or '.join(SUPPORTED_VERSIONS)}"
    )
else:
    NO_PARTITIONER = ""

mind_ir, node_strategy = compiled_messages(mind_ir_pb2), compiled_messages(node_strategy_pb2)

__all__ = [
    "NO_PARTITIONER",
    "GradAccumulation",
    "MicroBatchInterleaved",
    "add_pyfunc",
    "auto_parallel_context",
    "cell_graph_executor",
    "compile_config",
    "graph_api",
    "mind_ir",
    "node_strategy",
    "numpy_type",
    "own_parameters",
    "own_primitives",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "type_to_type_id",
]

SEARCH_COSTS = "_ZN9mindspore8parallel16entire_costgraphE"  # a shared_ptr: the object, and its reference counter
RELEASE_OWNER = (
    "_ZNSt16_Sp_counted_baseILN9__gnu_cxx12_Lock_policyE2EE10_M_releaseEv"  # of such a counter: one owner less
)


def own_primitives(cell: Any) -> dict[str, Any]:
    """Primitives that a Cell holds as attributes, by name."""
    found: dict[str, Any] = cell._primitives
    return found


def own_parameters(cell: Any) -> dict[str, Any]:
    """Parameters that a Cell holds itself, by name."""
    found: dict[str, Any] = cell._params
    return found
