# SPDX-License-Identifier: Apache-2.0
"""The records of skipped steps, of steps after a spike, and of a step that an error follows."""

from types import SimpleNamespace

import numpy as np
import pytest

from sporeloom.checkpoint.sharded import LocalTensor
from sporeloom.train.audit_chain import Chain
from sporeloom.train.audit_writer import AuditWriter


class OneRank:
    """An engine that counts the values it broadcasts."""

    is_log_rank, rank, strategy = True, 0, SimpleNamespace(mesh=SimpleNamespace(size=1))

    def __init__(self):
        self.num_broadcasts = 0

    def broadcast_value(self, value, source):
        self.num_broadcasts += 1
        return value


@pytest.fixture
def writer(tmp_path):
    config = SimpleNamespace(audit_every=4, save_every=2, save_minutes=0.0, steps=6, output_dir=tmp_path)
    return AuditWriter(SimpleNamespace(config=config), OneRank(), {"train": {}}, slices, lambda step: [step], 0)


def slices():
    return {"w": LocalTensor(np.ones(3, np.float32), (0,), (3,))}


def metrics(step):
    return SimpleNamespace(step=step, loss=1.0, grad_norm=0.5)


def records(folder):
    """Step, whether it was skipped, has a state, was saved."""
    chain = Chain.read(folder)
    assert chain.problems == []
    return [(r["step"], "skipped" in r, "state" in r, "saved" in r) for r in chain.records[1:]]


def test_a_skipped_step_that_is_saved_has_a_state(writer, tmp_path):
    for step in range(1, 7):
        if step in (2, 4, 6):
            writer.skip(step)
        else:
            writer.begin(metrics(step))
        if step == 2:
            writer.before_saving(step, slices())
        writer.end(step == 6)
    assert records(tmp_path) == [
        *[(1, False, False, False), (2, True, True, True), (3, False, False, False)],
        *[(4, True, True, False), (5, False, False, False), (6, True, True, True)],
    ]


@pytest.mark.parametrize("step", [5, 6])
def test_the_last_step_that_is_taken_back_is_saved_with_a_state(writer, tmp_path, step):
    for number in range(1, step + 1):
        writer.begin(metrics(number))
        if number == 2:
            writer.before_saving(number, slices())
        if number < step:
            writer.end(False)
    writer.rewind(2, step)
    if step == 5:
        writer.begin(metrics(6))
    writer.before_saving(6, slices())
    found = records(tmp_path)[2:]  # step 2 has two records then, of which one is a start
    assert found[0] == (2, False, True, False)
    assert [each[0] for each in found[1:]] == [3, 4, 5, 6]
    assert found[-1] == (6, step == 6, True, True) and found[2] == (4, True, True, False)


def test_after_an_error_a_record_is_written_by_this_rank_alone(writer, tmp_path):
    writer.begin(metrics(1))
    before = writer.engine.num_broadcasts
    writer.before_saving(1, None)
    assert writer.engine.num_broadcasts == before
    assert records(tmp_path) == [(1, False, False, False)]
