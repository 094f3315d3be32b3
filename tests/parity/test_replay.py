# SPDX-License-Identifier: Apache-2.0
"""The recorded step of a rank runs again alone, bit for bit; two runs that differ in one bit are told apart by its rank and
operator."""

import json
import re

import pytest
from conftest import CONFIGS, call, tool

WORKER, KEPT = "tests/parity/record_worker.py", (2, 3)
FAULTS = [
    None,
    {"rank": 1, "kind": "message", "which": 0.3, "at": 0.5, "bit": 23},
    {"rank": 0, "kind": "weight", "which": 0.4, "at": 0.5, "bit": 3},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, the same with a bit flipped in a message that rank 1 receives, and in a weight of rank 0."""
    root = tmp_path_factory.mktemp("runs")
    folders = [root / str(number) for number in range(len(FAULTS))]
    call(WORKER, "train", CONFIGS / "pangu_tiny_tp2.yaml", [str(folder) for folder in folders], FAULTS, processes=2)
    return folders


def weights(run):
    values = json.loads((run / "record/rank-0/step-00000002/step.json").read_text())
    return {name: each["sha256"] for name, each in values["state"].items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process."""
    root = tmp_path_factory.mktemp("alone")
    (root / "alone.yaml").write_text("mesh: {dp: 1}\nrules: decoder\n")
    call(WORKER, "train", root / "alone.yaml", [str(root)], [None])
    return root


def replay(*arguments):
    return tool("tools/replay.py", *arguments)


def bisect(a, b):
    return call(WORKER, "bisect", str(a), str(b))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_runs_again_alone_bit_for_bit(runs, rank):
    outcome = replay(runs[0], "--step", 3, "--rank", rank)
    assert outcome.code == 0, outcome.output
    found = re.search(
        rf"step 3 of rank {rank}: (\d+) messages; (\d+) values are bit for bit those of the recording", outcome.output
    )
    assert int(found[1]) > 10
    assert int(found[2]) > 50


def test_a_result_that_was_not_computed_so_is_found(runs):
    """As if the machine had made a mistake when it was recorded."""
    path = runs[1] / "record/rank-0/step-00000003/step.json"
    written = path.read_text()
    values = json.loads(written)
    name = list(values["after"])[3]
    values["after"][name] = "0" * 64
    path.write_text(json.dumps(values))
    outcome = replay(runs[1], "--step", 3, "--rank", 0)
    path.write_text(written)
    assert outcome.code == 1
    assert f"step 3 of rank 0 differs from the recording: parameter {name} after the step" in outcome.output


def test_equal_runs_are_equal(runs):
    code, said = bisect(runs[0], runs[0])
    assert code == 0
    assert "steps 2 to 3 of all 2 ranks are equal bit for bit" in said


def test_a_flipped_bit_of_a_message_is_found_where_it_arrived(runs):
    code, said = bisect(runs[0], runs[1])
    assert code == 1, said
    assert re.search(
        r"first difference: step 2, rank 1: AllReduce of .*, ranks 0, 1, tensor .*, which was received", said
    )


def test_a_flipped_bit_of_a_weight_is_found(runs):
    code, said = bisect(runs[0], runs[2])
    assert code == 1, said
    right, wrong = weights(runs[0]), weights(runs[2])
    (name,) = (name for name in right if right[name] != wrong[name])
    assert f"first difference: step 2, rank 0: parameter {name}, tensor {name}, before the first common step" in said


def test_the_same_steps_on_another_mesh_are_equal(runs, alone):
    code, said = bisect(alone, runs[0])
    assert code == 0, said
    found = re.findall(
        r"step [23]: (\d+) parameters and (\d+) results of operators are equal(?:; (\d+) results)?", said
    )
    assert len(found) == 2
    for parameters, results, others in found:
        assert int(parameters) > 50 and int(results) > 100 and int(others or 0) < int(results) / 20


def test_a_flipped_bit_is_found_by_a_run_on_another_mesh(runs, alone):
    code, said = bisect(alone, runs[1])
    assert code == 1, said
    assert re.search(r"first difference: step 2, rank 1 of b( \(rank 0 of a\))?: \w+ of model\..*, tensor .*", said), (
        said
    )


def test_runs_without_a_recording_are_refused(runs, tmp_path):
    outcome = replay(tmp_path, "--step", 3)
    assert outcome.code == 2
    assert "has no recording; train with --record 2" in outcome.output
    outcome = replay(runs[0], "--step", -1)
    assert outcome.code == 2 and "--step must be at least 0, got -1" in outcome.output
    outcome = replay(runs[0], "--step", 1)
    assert outcome.code == 2
    assert "--step 1: the recording of" in outcome.output
    assert "has steps 2, 3 of rank 0" in outcome.output
