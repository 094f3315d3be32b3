# SPDX-License-Identifier: Apache-2.0
"""Refusals of `sporeloom calibrate`, before anything is measured."""

import pytest

from sporeloom.calibration.config import CalibrateConfig, check
from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError


def refused(*flags):
    with pytest.raises(ConfigError) as error:
        check(parse_args(CalibrateConfig, "", flags, check))
    return str(error.value)


def test_all_problems_are_named_at_once(tmp_path):
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    said = refused("--out", str(file / "here.txt"), "--launch", "500")
    for part in ("name it", f"--out {file}: no file can be written there", "--launch: 500 processes"):
        assert part in said


def test_a_file_is_replaced_on_request_only(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text("kept", encoding="utf-8")
    assert f"{path}" in refused("--out", str(path))
    assert check(parse_args(CalibrateConfig, "", ["--out", str(path), "--overwrite"], check)).out == path


def test_a_folder_that_is_missing_is_made_when_the_file_is_written(tmp_path):
    path = tmp_path / "new/here.yaml"
    assert check(parse_args(CalibrateConfig, "", ["--out", str(path)], check)).out == path
    assert not path.parent.exists()


def test_what_cannot_be_written_is_refused_before_minutes_of_measurements(tmp_path):
    assert "--out /proc: no file can be written there" in refused("--out", "/proc/here.yaml")
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    assert f"--out {folder}: a folder" in refused("--out", str(folder), "--overwrite")


def test_processes_are_started_by_the_command_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    assert "give it --launch N in place of msrun" in refused("--out", str(tmp_path / "here.yaml"))


def test_a_device_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sporeloom.calibration.config.devices", lambda: {"GPU": "/dev/nvidiactl"})
    assert "/dev/nvidiactl: calibrate measures CPU processes" in refused("--out", str(tmp_path / "here.yaml"))


@pytest.mark.parametrize(("launch", "levels"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 3, 6])])
def test_half_as_many_processes_are_measured_too(tmp_path, launch, levels):
    config = CalibrateConfig(out=tmp_path / "here.yaml", launch=launch)
    assert config.levels == levels
