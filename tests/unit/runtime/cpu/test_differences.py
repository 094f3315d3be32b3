# SPDX-License-Identifier: Apache-2.0
"""The cause of a difference between two recordings is told from what it spread to."""

import json

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu import differences
from sporeloom.runtime.cpu.recording import (
    FOLDER,
    RecordedCall,
    RecordedMessage,
    RecordedTransfer,
    Recording,
    StepRecord,
    store,
    write_programs,
    write_shards,
    write_step,
)
from sporeloom.runtime.cpu.replay import NodeResult, Replay

STEP = 7


def array_of(value):
    return np.atleast_1d(np.array(value, np.float32))


def write(run, ranks, steps=(STEP,)):
    """Record ranks, of each the weight, the input, what it gave to the collective, what it got, and its output."""
    for step in steps:
        for rank, (weight, given, sent, received, output) in enumerate(ranks):
            root = run / FOLDER / f"rank-{rank}"
            root.mkdir(parents=True, exist_ok=True)
            write_programs(root, {"program 0": "0.mindir"})
            write_shards(root, "0.mindir", {}, {})
            with (root / "arrays").open("wb") as file:
                record = StepRecord(rank, step, {"w": store(array_of(weight), file)})
                call = RecordedCall("program 0", [store(array_of(given), file)], outputs=[str(output)])
                message = RecordedMessage("AllReduce 0", "AllReduce of mlp", str(sent), store(array_of(received), file))
                call.messages["sum"] = message
                record.calls.append(call)
            write_step(root, record, root / "arrays", 2)
    return Recording(run)


RIGHT = [(1, 5, 10, 30, 60), (2, 5, 20, 30, 61)]


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The cause that is found if a recording has other values, whose operators give what they show."""

    def replay(recording, rank, step, traced):
        values = json.loads((recording.run / "values.json").read_text())[rank]
        _, _, sent, received, output = values
        trace = [
            NodeResult("up", "MatMul of up", str(sent)),
            NodeResult("sum", "", str(received), str(sent)),
            NodeResult("down", "MatMul of down", str(output)),
        ]
        return Replay(trace=[trace])

    monkeypatch.setattr(differences, "replay", replay)

    def compare(ranks, steps=(STEP,), again=None, right=RIGHT):
        recordings = []
        for name, values in (("a", right), ("b", ranks)):
            recordings.append(write(tmp_path / name, values, steps if name == "b" else (STEP,)))
            (tmp_path / name / "values.json").write_text(json.dumps((again if name == "b" else None) or values))
        return differences.first_difference(*recordings, differences.common_steps(*recordings))

    return compare


def test_equal_recordings_have_no_difference(found):
    assert found(RIGHT) is None


def test_a_weight_comes_before_what_it_spreads_to(found):
    cause = found([(1, 5, 10, 31, 70), (3, 5, 21, 31, 71)])
    assert (cause.rank, cause.kind, cause.tensor) == (1, "parameter", "w")


def test_an_operator_of_equal_inputs_comes_before_the_messages_that_it_spreads_by(found):
    cause = found([(1, 5, 10, 31, 70), (2, 5, 21, 31, 71)])
    assert str(cause) == "step 7, rank 1: MatMul of up, tensor up"


def test_a_message_of_which_all_gave_the_same_is_the_cause_where_it_arrived(found):
    cause = found([(1, 5, 10, 30, 60), (2, 5, 20, 34, 66)])
    assert str(cause) == "step 7, rank 1: AllReduce of mlp, tensor sum, which was received"


def test_an_operator_after_the_messages_is_found(found):
    cause = found([(1, 5, 10, 30, 62), (2, 5, 20, 30, 61)])
    assert str(cause) == "step 7, rank 0: MatMul of down, tensor down"


def test_an_operator_that_is_right_when_it_runs_again_is_found_where_its_result_was_sent(found):
    cause = found([(1, 5, 10, 31, 60), (2, 5, 21, 31, 61)], again=[(1, 5, 10, 31, 60), (2, 5, 20, 31, 61)])
    assert str(cause) == (
        "step 7, rank 1: value given to AllReduce of mlp, tensor sum, which is another when the step runs again"
    )


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 6])
def test_a_part_of_a_sum_that_is_wrong_on_all_ranks_is_that_of_the_rank_which_sums_it(found, at):
    """Of 7 numbers 3 ranks sum 3, 2 and 2."""
    right, wrong = list(range(7)), [number + 50 * (number == at) for number in range(7)]
    cause = found([(1, 5, 10, wrong, 60)] * 3, right=[(1, 5, 10, right, 60)] * 3)
    assert (cause.rank, cause.kind) == ([0, 0, 0, 1, 1, 2, 2][at], "message")


@pytest.mark.parametrize(("sent", "rank"), [("10", 1), ("11", 0)])
def test_a_value_from_another_stage_is_the_cause_if_it_was_sent_right(tmp_path, monkeypatch, sent, rank):
    recordings = []
    for run, values in (("a", ("10", "10")), ("b", (sent, "11"))):
        for number, value in enumerate(values):
            root = tmp_path / run / FOLDER / f"rank-{number}"
            root.mkdir(parents=True)
            write_programs(root, {f"stage {number}": "0.mindir"})
            write_shards(root, "0.mindir", {}, {})
            with (root / "arrays").open("wb") as file:
                given = array_of(5 if number == 0 else float(value))
                call = RecordedCall(f"stage {number}", [store(given, file)], outputs=[value])
                transfer = RecordedTransfer(
                    1 - number, number == 1, "tag", "Receive of microbatch 0 from rank 0", value
                )
                record = StepRecord(number, STEP, {}, [call], [transfer])
            write_step(root, record, root / "arrays", 2)
        recordings.append(Recording(tmp_path / run))
    monkeypatch.setattr(differences, "replay", lambda *_, **__: Replay(trace=[[]]))
    cause = differences.first_difference(*recordings, differences.common_steps(*recordings))
    assert (cause.rank, cause.kind) == (rank, "message" if rank else "operator")
    assert ("Receive of microbatch 0 from rank 0, tensor tag, which was received" in str(cause)) == bool(rank)


def test_an_input_that_no_rank_computed_is_the_cause(found):
    cause = found([(1, 6, 11, 31, 70), (2, 5, 20, 31, 71)])
    assert (cause.rank, cause.kind) == (0, "input")


def test_another_mesh_is_no_matter_of_bits(found):
    with pytest.raises(differences.OtherProgramError):
        found(RIGHT[:1])


def test_runs_without_a_common_step_are_refused(found):
    with pytest.raises(ConfigError, match="none is in both: record more with --record"):
        found(RIGHT, steps=(8, 9))
