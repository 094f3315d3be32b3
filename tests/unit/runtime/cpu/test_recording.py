# SPDX-License-Identifier: Apache-2.0
"""Recordings as files: the last steps are kept, and what was changed is refused."""

import json
from importlib.metadata import version

import ml_dtypes
import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu.recording import (
    FOLDER,
    FORMAT,
    PROGRAMS,
    RecordedCall,
    RecordedMessage,
    RecordedTransfer,
    Recording,
    StepRecord,
    sha256_of,
    store,
    write_programs,
    write_step,
)

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
NARROW = np.array([1.5, -2], ml_dtypes.bfloat16)
NUMBER = np.array(7, np.int64)


def write(run, rank, step, keep=2):
    root = run / FOLDER / f"rank-{rank}"
    root.mkdir(parents=True, exist_ok=True)
    write_programs(root, {"program 0": "0.mindir"})
    (root / "0.mindir").write_bytes(b"graph")
    arrays = root / "arrays"
    with arrays.open("wb") as file:
        record = StepRecord(rank, step, {"w": store(WEIGHT + step, file)})
        call = RecordedCall("program 0", [store(NUMBER, file)], outputs=["0"])
        call.messages["node"] = RecordedMessage("tag", "AllReduce of mlp", "1", store(NARROW, file))
        record.calls.append(call)
    record.transfers.append(
        RecordedTransfer(0, True, "tag 2", "Receive of microbatch 1 from rank 2", sha256_of(NARROW))
    )
    record.after = {"w": sha256_of(WEIGHT)}
    write_step(root, record, arrays, keep)


def test_what_is_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    write(tmp_path, 0, 3)
    recording = Recording(tmp_path)
    record = recording.read(0, 3)
    (call,) = record.calls
    message = call.messages["node"]
    for stored, expected in ((record.state["w"], WEIGHT + 3), (call.inputs[0], NUMBER), (message.received, NARROW)):
        found = record.array(stored)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert record.transfers == [
        RecordedTransfer(0, True, "tag 2", "Receive of microbatch 1 from rank 2", sha256_of(NARROW))
    ]
    assert (message.tag, message.place, message.sent) == ("tag", "AllReduce of mlp", "1")
    assert record.after == {"w": sha256_of(WEIGHT)}
    assert recording.program(0, "program 0") == b"graph"
    assert recording._about(0)["environment"] == {"OMP_NUM_THREADS": "3"}
    assert recording.other_versions() == []


def test_the_last_steps_are_kept(tmp_path):
    for step in (1, 2, 4, 5):
        write(tmp_path, 0, step)
    write(tmp_path, 1, 4)
    recording = Recording(tmp_path)
    assert recording.steps(0) == [4, 5]
    assert recording.common_steps() == [4]
    assert sorted(path.name for path in (tmp_path / FOLDER / "rank-0").glob("step*")) == [
        "step-00000004",
        "step-00000005",
    ]


def test_what_is_absent_is_named(tmp_path):
    with pytest.raises(ConfigError, match="has no recording; train with --record 2"):
        Recording(tmp_path)
    write(tmp_path, 0, 3)
    with pytest.raises(ConfigError, match=r"--step 2: the recording of .* has steps 3 of rank 0"):
        Recording(tmp_path).read(0, 2)
    with pytest.raises(ConfigError, match=r"--rank 5: the recording of .* has ranks 0"):
        Recording(tmp_path).read(5, 3)


def test_a_changed_file_is_refused(tmp_path):
    write(tmp_path, 0, 3)
    record = Recording(tmp_path).read(0, 3)
    path = record.folder / "arrays.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="was changed or truncated after it was recorded"):
        record.array(record.state["w"])


def test_another_version_is_named(tmp_path):
    write(tmp_path, 0, 3)
    path = tmp_path / FOLDER / "rank-0" / PROGRAMS
    about = json.loads(path.read_text())
    about["versions"]["mindspore"] = "1.0"
    path.write_text(json.dumps(about))
    assert Recording(tmp_path).other_versions() == [f"mindspore 1.0, now {version('mindspore')}"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps({"format": FORMAT + 1}), f"was written in form {FORMAT + 1}, this version reads form {FORMAT}"),
        (json.dumps({}), "was written in form None"),
        ("{", "cannot be read as a recording"),
    ],
)
def test_a_recording_in_another_form_is_refused(tmp_path, content, problem):
    write(tmp_path, 0, 3)
    (tmp_path / FOLDER / "rank-0" / PROGRAMS).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        Recording(tmp_path)


def test_a_record_that_is_not_complete_is_refused(tmp_path):
    write(tmp_path, 0, 3)
    (tmp_path / FOLDER / "rank-0/step-00000003/step.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a recording"):
        Recording(tmp_path).read(0, 3)
