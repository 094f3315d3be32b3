# SPDX-License-Identifier: Apache-2.0
import pytest

from sporeloom.runtime.cpu.ordering import Message, common_order
from sporeloom.runtime.cpu.transport import TransportError


def collective(tag, *ranks):
    return Message("collective", ranks, tag)


def message(kind, source, target, tag="0"):
    return Message(kind, (source, target), tag)


A, B, C = (collective(tag, 0, 1) for tag in "abc")


def test_the_order_suits_every_rank():
    order = common_order(dict(enumerate([{A: [], B: [A], C: []}, {C: [B], A: [], B: []}])))
    assert order.index(A) < order.index(B) < order.index(C)


def test_a_receive_comes_after_its_send():
    first = {message("receive", 1, 0): [], A: [message("receive", 1, 0)]}
    order = common_order(dict(enumerate([first, {A: [], message("send", 1, 0): []}])))
    assert order.index(message("send", 1, 0)) < order.index(message("receive", 1, 0)) < order.index(A)


def test_two_stages_that_send_before_they_receive_have_an_order():
    stages = [
        {message("send", r, 1 - r): [], message("receive", 1 - r, r): [message("send", r, 1 - r)]} for r in (0, 1)
    ]
    assert len(common_order(dict(enumerate(stages)))) == 4


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([{A: [B], B: []}, {A: [], B: [A]}], "wait for each other"),
        ([{A: []}, {}], r"only ranks \[0\] of \[0, 1\] do the a"),
        ([{message("receive", 1, 0): []}, {}], "rank 0 waits for message 0 of rank 1, which never sends it"),
    ],
)
def test_graphs_that_cannot_run_together_are_refused(ranks, words):
    with pytest.raises(TransportError, match=words):
        common_order(dict(enumerate(ranks)))
