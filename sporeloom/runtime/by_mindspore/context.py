# SPDX-License-Identifier: Apache-2.0
"""Settings of MindSpore's partitioner for a strategy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import (
    NO_PARTITIONER,
    RELEASE_OWNER,
    SEARCH_COSTS,
    reset_auto_parallel_context,
)
from sporeloom.mindspore_compat.names import auto_parallel_context as mindspores_context
from sporeloom.mindspore_compat.names import set_auto_parallel_context as set_mindspores_context
from sporeloom.mindspore_compat.symbols import lacks, library
from sporeloom.runtime.by_mindspore.sums import add_by_add_n, add_by_pairs
from sporeloom.strategy.axes import ROWS
from sporeloom.strategy.config import Strategy


@contextlib.contextmanager
def auto_parallel_context(strategy: Strategy, rank: int, layouts_file: Path | None = None) -> Iterator[None]:
    """Set MindSpore's parallel context for `strategy` within the block, and reset it afterwards."""
    set_auto_parallel_context(strategy, rank, layouts_file)
    try:
        yield
    finally:
        reset_auto_parallel_context()
        add_by_add_n()


def set_auto_parallel_context(strategy: Strategy, rank: int, layouts_file: Path | None = None) -> None:
    """Set MindSpore's parallel context for `strategy`. `layouts_file`: the file to which MindSpore writes the layouts.

    Raises:
        ConfigError: this MindSpore has no partitioner.
    """
    if NO_PARTITIONER:
        raise ConfigError(NO_PARTITIONER)
    mesh, zero = strategy.mesh, strategy.optimizer_parallel
    settings: dict[str, Any] = {}
    if zero:
        level = 3 if zero.reshard_after_forward else 2 if zero.shard_accumulated_gradients else 1
        config = {"parallel_optimizer_threshold": zero.threshold_kb, "optimizer_level": f"level{level}"}
        if zero.shard_size:
            config["optimizer_weight_shard_size"] = zero.shard_size
        settings = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    if any(axis.uses_alltoall and mesh.degree(axis.name) > 1 for axis in ROWS):
        settings["enable_alltoall"] = True  # else resharding to another dim uses all-gathers
    if strategy.pipeline.virtual_stages > 1:
        settings["pipeline_config"] = {"pipeline_interleave": True, "pipeline_scheduler": strategy.pipeline.schedule}
    if layouts_file:
        settings["strategy_ckpt_config"] = {"save_file": str(layouts_file)}
    forget_search()
    set_mindspores_context(
        # Propagation derives the layout of an operator without a rule from those with one.
        parallel_mode="auto_parallel" if mesh.derives_layouts else "semi_auto_parallel",
        search_mode="sharding_propagation",
        full_batch=True,  # every rank receives the full batch; the graph slices it
        device_num=mesh.size,
        pipeline_stages=mesh.pp,
        **settings,
    )
    mindspores_context()._context_handle.set_global_rank(rank)  # MindSpore's Python refuses ranks from 4096 on
    add_by_pairs(mesh.pp > 1)  # last: failures before it leave MindSpore's sums unchanged


def forget_search() -> None:
    """Let the next compilation derive its layouts from its own graph alone.

    MindSpore caches redistribution costs across compilations, without tensor sizes: layouts would depend on
    earlier compilations of this process, and differ between ranks with other histories (tests/cli/test_train.py).

    Raises:
        MissingSymbolError: this MindSpore lacks the required symbols.
    """
    try:
        frontend = library("frontend")
        kept = (ctypes.c_void_p * 2).in_dll(frontend, SEARCH_COSTS)
        release = frontend[RELEASE_OWNER]
    except (OSError, AttributeError, ValueError) as error:
        raise lacks(error) from None
    owners, kept[0], kept[1] = kept[1], None, None
    if owners:
        release.restype, release.argtypes = None, [ctypes.c_void_p]
        release(owners)
