# SPDX-License-Identifier: Apache-2.0
"""The goodput of a run over its restarts and rewinds, by lines of metrics.jsonl that the test writes."""

import json

import pytest

from sporeloom.train.history import FILE, History


def write_steps(folder, seconds):
    lines = [json.dumps({"step": step, "step_time_s": s, "grad_norm": 1.0}) for step, s in seconds.items()]
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


def test_steps_after_the_state_that_a_run_is_resumed_from_count_again(tmp_path):
    history = History.begin(tmp_path, 0.0, 0, is_resumed=False)
    history.rewind(tmp_path, 3, 4)
    history.rewind(tmp_path, 11, 14)
    assert History.begin(tmp_path, 20.0, 10, is_resumed=True).rewinds == [{"first": 3, "last": 4}]


def test_a_step_that_updated_nothing_is_not_productive(tmp_path):
    history = History.begin(tmp_path, 0.0, 0, is_resumed=False)
    lines = [{"step": 1, "step_time_s": 4.0}, {"step": 2, "step_time_s": 1.0, "grad_norm": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert history.productive_seconds(tmp_path) == 1.0


@pytest.mark.parametrize(
    "damage",
    [
        {"starts": [1]},
        {"starts": [{"time": "now"}]},
        {"starts": [{"time": 1e400}]},
        {"rewinds": [{"first": 1}]},
        {"x": 1},
    ],
)
def test_a_file_of_another_form_is_no_history(tmp_path, damage):
    (tmp_path / FILE).write_text(json.dumps({"id": "a", "starts": [], "rewinds": [], **damage}))
    assert History.read(tmp_path) is None
