# SPDX-License-Identifier: Apache-2.0
"""MindSpore's compiler: its settings for a strategy, and what makes it faster."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sporeloom.errors import ConfigError
from sporeloom.parallel.sums import add_by_add_n, add_by_pairs
from sporeloom.private_names import (
    NO_PARTITIONER,
    RELEASE_OWNER,
    SEARCH_COSTS,
    compile_config,
    reset_auto_parallel_context,
)
from sporeloom.private_names import auto_parallel_context as mindspores_context
from sporeloom.private_names import set_auto_parallel_context as set_mindspores_context
from sporeloom.runtime.gradients import decided_branches
from sporeloom.runtime.symbols import lacks, library
from sporeloom.strategy.config import Strategy

FASTER = {"GREED_PARSE": "1", "COMPILE_DEBUG_MODE": "release"}
"""Switches of MindSpore's compiler; a version without one is slower, no more."""

gc.freeze()  # MindSpore collects garbage before every compilation; what importing it made is none


@contextlib.contextmanager
def auto_parallel_context(strategy: Strategy, rank: int, layouts_file: Path | None = None) -> Iterator[None]:
    """MindSpore's own settings for `strategy`, and none again afterwards."""
    set_auto_parallel_context(strategy, rank, layouts_file)
    try:
        yield
    finally:
        reset_auto_parallel_context()
        add_by_add_n()


def set_auto_parallel_context(strategy: Strategy, rank: int, layouts_file: Path | None = None) -> None:
    """MindSpore's settings for `strategy`. `layouts_file`: where it writes the layouts in its own format.

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
    if mesh.ep > 1 or mesh.cp > 1:
        settings["enable_alltoall"] = True  # else a change of the cut dim is made of all-gathers
    if strategy.pipeline.virtual_stages > 1:
        settings["pipeline_config"] = {"pipeline_interleave": True, "pipeline_scheduler": strategy.pipeline.schedule}
    if layouts_file:
        settings["strategy_ckpt_config"] = {"save_file": str(layouts_file)}
    forget_search()
    set_mindspores_context(
        # By propagation an operator without a rule takes its layout from those that have one.
        parallel_mode="auto_parallel" if mesh.derives_layouts else "semi_auto_parallel",
        search_mode="sharding_propagation",
        full_batch=True,  # every rank is given the whole batch; the graph takes its part
        device_num=mesh.size,
        pipeline_stages=mesh.pp,
        **settings,
    )
    mindspores_context()._context_handle.set_global_rank(rank)  # MindSpore's Python refuses ranks from 4096 on
    add_by_pairs(mesh.pp > 1)  # last: what fails before it leaves MindSpore's sums alone


@contextlib.contextmanager
def faster_compilation() -> Iterator[None]:
    """The same graph in half the time (benchmarks/results/compile_passes.md): MindSpore's own switches, which resolve
    attributes while it parses and keep no history of nodes, gradients without dead branches, and no garbage collection.
    """
    before = {name: getattr(compile_config, name) for name in FASTER if hasattr(compile_config, name)}
    for name, value in before.items():
        setattr(compile_config, name, value or FASTER[name])  # a user's own setting stays
    try:
        with decided_branches(), without_collection():
            yield
    finally:
        for name, value in before.items():
            setattr(compile_config, name, value)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection, where many small objects are made and none of them in cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def forget_search() -> None:
    """Let the next compile derive its layouts from its own graph alone.

    MindSpore keeps the costs of moving tensors from one compile to the next, without their sizes: layouts would depend on
    what this process compiled before, and so differ between ranks that came another way (tests/cli/test_train.py).

    Raises:
        TargetError: this MindSpore lacks the symbols this leans on.
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
