# SPDX-License-Identifier: Apache-2.0
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from conftest import ROOT, msrun

from sporeloom.runtime.cpu.transport import Collectives, Transport, TransportError


@pytest.mark.slow
def test_every_collective_of_a_graph_equals_numpy(tmp_path):
    outcome = msrun(4, tmp_path, Path(__file__).with_name("collectives_worker.py"))
    assert outcome.code == 0, outcome.output[-3000:]
    for rank, log in outcome.logs.items():
        assert log.count("right: ") == 11, f"rank {rank}:\n{log}"


@pytest.fixture
def pair(tmp_path):
    both = [Transport(rank, 2, tmp_path.name) for rank in (0, 1)]
    yield both
    for one in both:
        one.close()


def test_messages_keep_their_order_within_a_tag_and_do_not_mix_between_tags(pair):
    for value in (1, 2):
        pair[0].send(1, "a", np.array([value]))
        pair[0].send(1, "b", np.array([10 * value]))
    assert [pair[1].receive(0, tag).item() for tag in ("b", "a", "a", "b")] == [10, 1, 2, 20]


def test_numbers_arrive_as_they_are_and_nothing_else_is_sent(pair):
    second = ms.Tensor([1.5], ms.bfloat16).asnumpy()  # of MindSpore's own type of that name
    assert second.dtype != ml_dtypes.bfloat16
    for array in (second, np.array([1.5], ml_dtypes.bfloat16), np.array([True]), np.array([3], ">i2")):
        pair[0].send(1, "a", array)
        received = pair[1].receive(0, "a", timeout_s=5.0)
        assert received.dtype.name == array.dtype.name and received.tobytes() == array.tobytes()
    with pytest.raises(TypeError, match="messages hold numbers, not <U1"):
        pair[0].send(1, "a", np.array(["x"]))


def test_a_message_and_its_receiver_find_each_other_however_close_they_come(tmp_path, monkeypatch):
    """Both ask for the queue of a new tag: the one whose queue is thrown away must not wait in it."""
    make = queue.Queue

    def slowly(*args):
        time.sleep(0.002)  # as when another thread gets its turn in between
        return make(*args)

    monkeypatch.setattr(queue, "Queue", slowly)
    pair = [Transport(rank, 2, tmp_path.name) for rank in (0, 1)]
    for tag in range(100):
        pair[0].send(1, tag, np.array([tag]))
        assert pair[1].receive(0, tag, timeout_s=5.0).item() == tag
    for one in pair:
        one.close()


def test_a_receive_that_gets_nothing_names_rank_and_tag(pair, capfd):
    with pytest.raises(TransportError, match=r"rank 0 waited 0 s for rank 1, message nothing"):
        pair[0].receive(1, "nothing", timeout_s=0.05)
    assert "rank 0 waited" in capfd.readouterr().err


def test_a_large_sum_is_the_same_bits_on_every_rank(tmp_path):
    ranks = range(4)
    transports = [Transport(rank, 4, tmp_path.name) for rank in ranks]
    arrays = [np.random.RandomState(rank).randn(1001, 33).astype(np.float32) for rank in ranks]
    results = [None] * 4

    def reduce(rank):
        results[rank] = Collectives(transports[rank], list(ranks), "sum").all_reduce(arrays[rank])

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    expected = ((arrays[0] + arrays[1]) + arrays[2]) + arrays[3]
    for result in results:
        assert (result == expected).all()
    for transport in transports:
        transport.close()


def test_when_one_waits_long_in_a_collective_all_say_where_they_are(pair, capsys):
    def reduce(one):
        return one.watched("AllReduce of a.b, forward, ranks 0, 1", Collectives(one, [0, 1], "x").all_reduce)

    for one in pair:
        one.watchdog_s = 0.3
    one, waiting = np.ones(3), threading.Thread(target=lambda: reduce(pair[0])(np.ones(3)))
    waiting.start()
    time.sleep(1.0)  # rank 1 is late
    np.testing.assert_array_equal(reduce(pair[1])(one), 2 * one)
    waiting.join(timeout=10)
    told = capsys.readouterr().err
    assert "rank 0: in AllReduce of a.b, forward, ranks 0, 1, for rank 1, for 0 s; no step done yet" in told
    assert "rank 1: before its first collective, for " in told


def test_outside_of_graphs_a_rank_may_wait_for_long(pair, capsys):
    pair[0].watchdog_s = 0.1
    late = threading.Timer(0.5, lambda: pair[1].send(0, "request", np.ones(1)))
    late.start()
    pair[0].receive(1, "request")
    assert capsys.readouterr().err == ""


def test_connections_that_are_closed_leave_no_thread_and_no_open_file(tmp_path):
    """A process may join one job after another, as those of these tests do hundreds of times."""

    def held():
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    def join_and_leave(number):
        pair = [Transport(rank, 2, f"{tmp_path.name}-{number}") for rank in (0, 1)]
        for transport in pair:
            transport.send_value(1 - transport.rank, "number", number)
        assert [transport.receive(1 - transport.rank, "number", 10) for transport in pair] == [number, number]
        for transport in pair:
            transport.close()

    before, deadline = held(), time.monotonic() + 30
    for number in range(3):
        join_and_leave(number)
    while held() > before and time.monotonic() < deadline:  # what is left closes after its last message
        time.sleep(0.05)
    assert held() <= before


LEAVING = """
import sys, time
from itertools import repeat
from sporeloom.runtime.cpu.transport import Transport

rank, transport = int(sys.argv[1]), Transport(int(sys.argv[1]), 2, sys.argv[2])
transport.send_value(1 - rank, "ready", 0)
transport.receive(1 - rank, "ready", 30)
if rank == 1:
    for number in range(300):
        transport.send_value(0, "number", number)
    transport.close()
    time.sleep(3)
else:
    sum(repeat(1, 200_000_000))  # in C, so that no other thread runs meanwhile, as when MindSpore compiles
    time.sleep(1)
    print([transport.receive(1, "number", 30) for _ in range(300)] == [*range(300)])
    transport.close_at_exit()
"""


@pytest.mark.slow
def test_a_rank_that_is_busy_when_another_leaves_does_not_take_it_for_lost(tmp_path):
    command = [sys.executable, "-c", LEAVING]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path.name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0] == "True\n"
