# SPDX-License-Identifier: Apache-2.0
import pytest

from sporeloom.runtime.cpu.ordering import common_order
from sporeloom.runtime.cpu.transport import TransportError
from sporeloom.runtime.spmd.message_chain import Message


def collective(tag, *ranks):
    return Message(ranks, tag)


A, B, C = (collective(tag, 0, 1) for tag in "abc")


def test_the_order_suits_every_rank():
    order = common_order(dict(enumerate([{A: [], B: [A], C: []}, {C: [B], A: [], B: []}])))
    assert order.index(A) < order.index(B) < order.index(C)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([{A: [B], B: []}, {A: [], B: [A]}], "wait for each other"),
        ([{A: []}, {}], r"only ranks \[0\] of \[0, 1\] do the a"),
    ],
)
def test_graphs_that_cannot_run_together_are_refused(ranks, words):
    with pytest.raises(TransportError, match=words):
        common_order(dict(enumerate(ranks)))
