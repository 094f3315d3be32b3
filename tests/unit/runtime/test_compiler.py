# SPDX-License-Identifier: Apache-2.0
"""Compiling without garbage collection leaves a process as it was."""

import gc

import pytest

from sporeloom.mindspore_compat.names import graph_api
from sporeloom.runtime.compiler import without_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_left_out_within_the_block_only(enabled, monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with without_collection():
            with without_collection():
                graph_api.gc.collect()
            graph_api.gc.collect()
            assert not collected and not gc.isenabled()
        assert gc.isenabled() == enabled
        graph_api.gc.collect()
        assert collected == [True]
    finally:
        (gc.enable if before else gc.disable)()


def test_frozen_objects_stay_frozen():
    gc.freeze()  # as the tests' processes are
    with without_collection():
        pass
    assert gc.get_freeze_count() > 0


def test_mindspore_collects_by_the_name_that_is_replaced():
    assert graph_api.gc is gc and "gc" in graph_api._CellGraphExecutor.compile.__code__.co_names
