# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os

import pytest

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.spmd import compilation_cache
from sporeloom.runtime.spmd.compilation_cache import SUFFIX, SWITCH, cached_model

KEY = {"network": {"family": "pangu"}, "rank": 1, "inputs": [[[2, 3], "<f4"]]}


def graph(size=10):
    model = mind_ir.ModelProto(producer_name="x" * size)
    model.graph.node.add(name="a\nb", op_type="REF::c")
    return model


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, str(tmp_path / "graphs"))
    return tmp_path / "graphs"


def never():
    raise AssertionError("it was to be read")


def test_what_was_kept_is_what_was_made(folder):
    made = cached_model(KEY, graph)
    assert cached_model(KEY, never).SerializeToString() == made.SerializeToString()
    (path,) = folder.iterdir()
    assert path.suffix == SUFFIX
    path.write_bytes(path.read_bytes()[:-1])
    assert cached_model(KEY, lambda: graph(11)).producer_name == "x" * 11  # a damaged one is dropped


@pytest.mark.parametrize("change", [{"rank": 2}, {"network": {"family": "codegeex"}}, {"inputs": []}, {"more": 1}])
def test_another_key_is_another_graph(change):
    cached_model(KEY, graph)
    calls = []
    cached_model({**KEY, **change}, lambda: calls.append(1) or graph())
    assert calls == [1]


def test_other_sources_or_another_mindspore_are_another_key(monkeypatch):
    cached_model(KEY, graph)
    for module, name, value in (
        (compilation_cache.ms, "__version__", "9.9"),
        (compilation_cache, "sources_hash", lambda: "changed"),
    ):
        with monkeypatch.context() as other:
            other.setattr(module, name, value)
            with pytest.raises(AssertionError, match="to be read"):
                cached_model(KEY, never)


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


HARM = {
    "cut off": cut,
    "flipped": flip,
    "empty": lambda c: b"",
    "pickled": lambda c: b"\x80\x04.",
    "older": lambda c: b"x" + c,
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_one_is_dropped_with_one_line_and_made_anew(folder, harm, capfd):
    cached_model(KEY, graph)
    (path,) = folder.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert cached_model(KEY, graph) == graph()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"dropped the cached graph {path}" in said[0]
    cached_model(KEY, never)


def test_the_least_recently_used_go_first(folder, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MAX_BYTES", 35_000)
    for rank in range(3):
        cached_model({**KEY, "rank": rank}, lambda: graph(10_000))
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (rank + 1, rank + 1))
    cached_model({**KEY, "rank": 0}, never)  # used: no longer the oldest
    cached_model({**KEY, "rank": 3}, lambda: graph(10_000))
    cached_model({**KEY, "rank": 0}, never)
    with pytest.raises(AssertionError, match="to be read"):
        cached_model({**KEY, "rank": 1}, never)


def test_they_can_be_switched_off_and_removed(folder, monkeypatch):
    cached_model(KEY, graph)
    assert compilation_cache.clear()[0] == 1
    assert list(folder.iterdir()) == []
    monkeypatch.setenv(SWITCH, "0")
    cached_model(KEY, graph)
    assert list(folder.iterdir()) == []


def test_a_full_disk_costs_the_graph_and_nothing_else(folder, capfd):
    folder.write_text("in the way")
    assert cached_model(KEY, graph) == graph()
    assert "the compiled graph is not kept" in capfd.readouterr().err


def keep_one(i):
    return cached_model({**KEY, "rank": i % 3}, lambda: graph(1000 + i % 3)).producer_name


def keep_many(number):
    return list(map(keep_one, range(number, 60)))


def test_many_processes_at_once():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for found in pool.map(keep_many, range(4)):
            assert {len(name) for name in found} == {1000, 1001, 1002}
