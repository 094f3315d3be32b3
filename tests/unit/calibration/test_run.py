# SPDX-License-Identifier: Apache-2.0
"""Logs of the processes that measure."""

import tempfile
from pathlib import Path

import pytest

from sporeloom.calibration import run
from sporeloom.calibration.config import CalibrateConfig


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Folders of logs; a launch of 2 processes fails, and one of 1 measures nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = []

    def launch(script, arguments, processes, log_dir, *others):
        (log_dir / "worker_0.log").write_text("why", encoding="utf-8")
        found.append(log_dir)
        Path(arguments[0]).write_text("[]", encoding="utf-8")
        return 3 if processes == 2 else 0

    monkeypatch.setattr(run, "launch", launch)
    return found


def test_logs_are_kept_of_processes_that_fail(tmp_path, logs):
    levels = run.levels(CalibrateConfig(out=tmp_path / "here.yaml", launch=2))
    assert next(levels) == (1, [])
    with pytest.raises(run.WorkerError) as failed:
        next(levels)
    assert failed.value.code == 3
    of_one, of_two = logs
    assert not of_one.exists()
    assert (of_two / "worker_0.log").read_text(encoding="utf-8") == "why"
