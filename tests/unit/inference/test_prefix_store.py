# SPDX-License-Identifier: Apache-2.0
"""Blocks of the prefix cache on disk: a later process finds them, and nothing that is not exactly what was written."""

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from recalling import ENGINE, VOCAB, Recalling, alone, answers, request

from sporeloom.inference.prefix_cache import PrefixCache
from sporeloom.inference.prefix_store import BlockStore, computation_hash
from sporeloom.inference.sampling import SamplingConfig
from sporeloom.inference.scheduler import Scheduler

PROMPT = [token % VOCAB for token in range(40)]


def owner_key(owner):
    """As a server's: adapters beyond 0 are loaded at runtime."""
    slot, adapter, client, salt = owner
    return None if adapter else json.dumps([slot, client, salt])


def open_store(folder, max_bytes=10**6, computation="a", block=4):
    folder.mkdir(exist_ok=True)
    return BlockStore(folder, max_bytes, computation, owner_key, [np.zeros(block, np.int64)])


def open_scheduler(folder, num_blocks=100, block=4, reusable=1, **of_store):
    decoding = Recalling(1, reusable)
    cache = PrefixCache(decoding, num_blocks, block)
    cache.store = open_store(folder, block=block, **of_store)
    return Scheduler(decoding, ENGINE, cache)


def num_cached(folder, each=None, **more):
    """Number of the prompt's tokens that a process reuses, which then ends."""
    scheduler = open_scheduler(folder, **more)
    answers(scheduler, [each or request(PROMPT, 1)])
    scheduler.cache.close()
    return scheduler.reused_tokens


def files(folder):
    return sorted(folder.glob("*.block"))


def test_a_later_process_finds_what_was_kept_at_the_end(tmp_path):
    assert [num_cached(tmp_path) for _ in range(2)] == [0, 36]
    assert num_cached(tmp_path, request([*PROMPT, 3, 4, 5], 1)) == 40
    assert num_cached(tmp_path, request([*PROMPT[:11], 0, 0, 0], 1)) == 8
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}


@pytest.mark.parametrize("reusable", [1, 4])
@pytest.mark.parametrize("num_blocks", [2, 5, 100])
def test_answers_are_those_of_a_cold_start_to_the_bit(reusable, num_blocks, tmp_path):
    draw, found, expected, loaded = np.random.default_rng(3), [], [], 0
    for process in range(3):
        scheduler, requests = open_scheduler(tmp_path, num_blocks, reusable=reusable), []
        for i in range(12):
            prompt = [*PROMPT[: int(draw.integers(40))], *draw.integers(VOCAB, size=draw.integers(1, 9)).tolist()]
            sampling = SamplingConfig(temperature=1.0, seed=i) if i % 2 else SamplingConfig(temperature=0.0)
            requests.append(request(prompt, 6, sampling, client=i % 2, num_top=2))
        found += answers(scheduler, requests)
        expected += [alone(Recalling(1), each) for each in requests]
        scheduler.cache.close()
        loaded += scheduler.cache.store.num_loaded if process else 0
    assert found == expected and loaded > 10


def test_what_leaves_the_memory_is_written_and_found_again(tmp_path):
    scheduler = open_scheduler(tmp_path, num_blocks=10)
    answers(scheduler, [request(PROMPT, 1), request([9] * 40, 1)])
    store = scheduler.cache.store
    deadline = time.monotonic() + 30
    while store.num_blocks < 10:  # another thread writes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = scheduler.reused_tokens
    answers(scheduler, [request(PROMPT, 1)])
    assert scheduler.reused_tokens - before == 36 and store.num_loaded == 9 and len(scheduler.cache) == 10


@pytest.mark.parametrize(
    "other",
    [{"computation": "b"}, {"each": request(PROMPT, 1, client=1)}, {"each": request(PROMPT, 1, cache_salt="s")}],
)
def test_nothing_is_shared_with_another_model_client_or_salt(other, tmp_path):
    num_cached(tmp_path)
    assert num_cached(tmp_path, **other) == 0
    assert num_cached(tmp_path, **other) == 36 and num_cached(tmp_path) == 36


def test_prompts_of_adapters_that_are_loaded_at_runtime_are_not_written(tmp_path):
    assert num_cached(tmp_path, request(PROMPT, 1, adapter=1, adapter_id=7)) == 0
    assert files(tmp_path) == []


def damage(path, how):
    content = path.read_bytes()
    if how == "bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "version":
        path.write_bytes(content.replace(b" 1\n", b" 2\n", 1))
    elif how == "writable":
        path.chmod(0o666)
    elif how == "link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))


@pytest.mark.parametrize("how", ["bit", "cut", "empty", "version", "writable", "link"])
def test_a_file_that_is_not_as_it_was_written_is_not_used(how, tmp_path, capsys):
    num_cached(tmp_path, request(PROMPT[:5], 1))
    (path,) = files(tmp_path)
    damage(path, how)
    capsys.readouterr()
    assert num_cached(tmp_path, request(PROMPT[:5], 1)) == 0
    lines = [line for line in capsys.readouterr().err.split("\n") if "not used, but recomputed" in line]
    assert len(lines) == 1 and str(path) in lines[0]
    assert num_cached(tmp_path, request(PROMPT[:5], 1)) == 4  # it was written again


def test_a_block_under_the_name_of_another_is_not_used(tmp_path, capsys):
    num_cached(tmp_path, request(PROMPT[:5], 1))
    (path,) = files(tmp_path)
    num_cached(tmp_path, request([7] * 5, 1))
    (other,) = {*files(tmp_path)} - {path}
    other.write_bytes(path.read_bytes())
    assert num_cached(tmp_path, request([7] * 5, 1)) == 0
    assert "it is another block" in capsys.readouterr().err


def test_the_folder_is_bounded_and_the_least_recently_used_leave_first(tmp_path):
    num_cached(tmp_path, request(PROMPT[:5], 1))
    size = files(tmp_path)[0].stat().st_size
    bound = {"max_bytes": 4 * size}
    for token in (5, 6, 7):
        num_cached(tmp_path, request([token] * 5, 1), **bound)
    assert num_cached(tmp_path, request(PROMPT[:5], 1), **bound) == 4  # used again: 5 is the oldest now
    num_cached(tmp_path, request([8] * 5, 1), **bound)
    assert len(files(tmp_path)) == 4
    store = open_store(tmp_path, **bound)
    names = [store.child(store.root((0, 0, 0, "")), tokens) for tokens in (PROMPT[:4], [5] * 4, [8] * 4)]
    assert [store.load(name) is not None for name in names] == [True, False, True]
    num_cached(tmp_path, max_bytes=2 * size)
    assert len(files(tmp_path)) == 2


def test_other_files_stay_and_what_a_killed_process_left_is_removed(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f".{'0' * 64}.partial").write_text("half")
    num_cached(tmp_path)
    assert "1 file of other kinds ignored" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").exists() and not list(tmp_path.glob(".*.partial"))


def test_another_weight_flag_or_number_of_threads_is_another_computation(monkeypatch):
    def net(*values, name="up", dtype=np.float32):
        array = np.asarray(values, dtype)
        parameters = [SimpleNamespace(name=name, asnumpy=lambda: array)]
        parameters += [SimpleNamespace(name="layer.cache.keys", asnumpy=lambda: np.zeros(len(values)))]
        return SimpleNamespace(num_kernels=0, get_parameters=lambda: parameters)

    flags = {"weights": "float32", "shape": (8, 128)}
    same = computation_hash(net(1, 2), flags)
    assert computation_hash(net(1, 2), dict(flags)) == same
    others = [net(1, 3), net(1, 2, name="down"), net(1, 2, dtype=np.float16), net(1, 2, 0)]
    found = {computation_hash(other, flags) for other in others}
    found |= {computation_hash(net(1, 2), {**flags, "weights": "int8"})}
    found |= {computation_hash(net(1, 2), {**flags, "shape": (4, 128)})}
    monkeypatch.setenv("OMP_NUM_THREADS", "63")
    found |= {computation_hash(net(1, 2), flags)}
    assert len(found) == 7 and same not in found


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_stops_no_answer(tmp_path, capsys):
    scheduler = open_scheduler(tmp_path)
    tmp_path.chmod(0o500)
    answers(scheduler, [request(PROMPT, 1)])
    scheduler.cache.close()
    tmp_path.chmod(0o700)
    assert capsys.readouterr().err.count("no more blocks are written") == 1


def test_a_disk_that_is_full_stops_no_answer(tmp_path, capsys, monkeypatch):
    scheduler = open_scheduler(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scheduler.cache.store, "_write", full)
    assert answers(scheduler, [request(PROMPT, 1)]) == [alone(Recalling(1), request(PROMPT, 1))]
    scheduler.cache.close()
    assert capsys.readouterr().err.count("no more blocks are written: No space left on device") == 1


@pytest.mark.parametrize("num_blocks", [50, 100])
def test_the_work_to_load_a_prompt_is_linear_in_its_blocks(num_blocks, tmp_path, monkeypatch):
    """50: all blocks of another prompt are dropped for it."""
    prompt, used = [token % VOCAB for token in range(200)], []
    num_cached(tmp_path, request(prompt, 1), num_blocks=num_blocks)
    scheduler = open_scheduler(tmp_path, num_blocks=num_blocks)
    answers(scheduler, [request([9] * 200, 1)])
    cache, use = scheduler.cache, BlockStore.use
    monkeypatch.setattr(BlockStore, "use", lambda store, name: (used.append(name), use(store, name)))
    assert cache.num_found(0, (0, 0, 0, ""), prompt) == 200
    assert 50 <= len(used) <= 3 * 50
    cache.close()


def test_what_is_not_a_regular_file_is_neither_counted_nor_removed(tmp_path, capsys):
    folder, target = tmp_path / "cache", tmp_path / "target"
    folder.mkdir()
    target.write_bytes(b"mine")
    (folder / f"{'a' * 64}.block").mkdir()
    (folder / f"{'b' * 64}.block").symlink_to(target)
    store = open_store(folder, max_bytes=1)
    assert store.num_blocks == 0 and len(list(folder.iterdir())) == 2 and target.read_bytes() == b"mine"
    assert "not a regular file" in capsys.readouterr().err
    store.close([])


def test_a_block_that_cannot_be_removed_is_reported(tmp_path, capsys, monkeypatch):
    num_cached(tmp_path)

    def refuse(path, missing_ok=False):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    store = open_store(tmp_path, max_bytes=1)
    assert store.num_blocks == 0
    assert "cannot be removed: Operation not permitted" in capsys.readouterr().err
    store.close([])
