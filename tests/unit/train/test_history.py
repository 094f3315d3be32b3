# SPDX-License-Identifier: Apache-2.0
"""The goodput of a run over its restarts and rewinds, by lines of metrics.jsonl that the test writes."""

import json

import pytest

from sporeloom.train.history import FILE, History


def write_steps(folder, seconds):
    lines = [json.dumps({"step": step, "step_time_s": s}) for step, s in seconds.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_start_is_recorded(tmp_path):
    History.begin(tmp_path, 1000.0, 0, is_resumed=False)
    found = json.loads((tmp_path / FILE).read_text())
    assert found["starts"] == [{"time": 1000.0, "steps_done": 0}] and found["rewinds"] == []
    assert len(found["id"]) == 8


def test_goodput_counts_the_time_of_all_restarts_and_between_them(tmp_path):
    first = History.begin(tmp_path, 1000.0, 0, is_resumed=False)
    second = History.begin(tmp_path, 1060.0, 2, is_resumed=True)
    write_steps(tmp_path, {1: 10.0, 2: 10.0, 3: 5.0, 4: 5.0})
    assert second.id == first.id and len(second.starts) == 2
    assert second.goodput(tmp_path, now=1100.0) == pytest.approx(30 / 100)


def test_steps_that_were_taken_back_are_not_productive(tmp_path):
    history = History.begin(tmp_path, 0.0, 0, is_resumed=False)
    history.rewind(tmp_path, 3, 4)
    write_steps(tmp_path, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0})
    assert History.read(tmp_path).productive_seconds(tmp_path) == 3.0
    assert history.goodput(tmp_path, now=6.0) == 0.5


def test_a_run_that_is_not_resumed_begins_anew(tmp_path):
    first = History.begin(tmp_path, 1.0, 0, is_resumed=False)
    second = History.begin(tmp_path, 2.0, 0, is_resumed=False)
    assert second.first_start == 2.0 and first.id != second.id


def test_a_run_that_an_earlier_release_began_has_no_goodput(tmp_path):
    history = History.begin(tmp_path, 1000.0, 2, is_resumed=True)
    write_steps(tmp_path, {1: 1.0})
    assert history.goodput(tmp_path, now=2000.0) is None
    assert History.begin(tmp_path, 1500.0, 2, is_resumed=True).goodput(tmp_path) is None


def test_a_damaged_file_is_no_history(tmp_path):
    (tmp_path / FILE).write_text("{")
    assert History.read(tmp_path) is None
