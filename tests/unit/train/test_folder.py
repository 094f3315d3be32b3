# SPDX-License-Identifier: Apache-2.0
"""A run's folder: its own by default, an earlier one with --resume, never another run's."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.train.checks import check
from sporeloom.train.folder import OWN, clear, point_to, settled
from sporeloom.train.plain_text import TrainConfig

TEXT = ["--data", str(ROOT / "examples/small_town.txt")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*words):
    return parse_args(TrainConfig, "", [*TEXT, *words])


def checked(*words):
    return check(config(*words), 1).config


def finished(folder, *names):
    """A run that left `names`."""
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if "." not in name else path.write_text("old")
    return Path(folder)


def test_a_run_gets_a_folder_of_its_own(here):
    first = checked().output_dir
    assert re.fullmatch(r"out/\d{8}-\d{6}-pangu-tiny", str(first))
    first.mkdir(parents=True)
    second = settled(config(), "pangu tiny", False).output_dir
    assert second != first and not second.exists()


def test_two_in_one_second_are_two(here, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    names = []
    for _ in range(3):
        names.append(settled(config(), "pangu/tiny x", False).output_dir)
        names[-1].mkdir(parents=True)
    assert [path.name for path in names] == [f"20260102-030405-pangu-tiny-x{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize("name", OWN)
def test_an_earlier_run_is_not_replaced(here, name):
    finished("old", name)
    with pytest.raises(
        ConfigError, match=re.escape(f"--output-dir old: contains {name} of an earlier run; continue it with --resume")
    ):
        checked("--output-dir", "old")
    assert checked("--output-dir", "old", "--overwrite").output_dir == Path("old")


def test_logs_and_other_files_are_no_run(here):
    finished("old", "logs", "data", "notes.txt")
    assert checked("--output-dir", "old").output_dir == Path("old")


def test_what_a_run_begins_with_is_not_removed(here):
    finished("old", "checkpoints", "tokenizer.model")
    finished("old/checkpoint", "corpus.txt")
    (here / "old/checkpoint/corpus.txt").write_text("a text\n\nanother one\n" * 99)
    words = ["--data", "old/checkpoint/corpus.txt", "--output-dir", "old", "--overwrite"]
    with pytest.raises(ConfigError, match=r"--overwrite would remove old/checkpoint/corpus\.txt, which the run reads"):
        check(parse_args(TrainConfig, "", words), 1)


def test_to_replace_clears_the_run_and_nothing_else(here):
    folder = finished("old", *OWN, "reference-0123456789abcdef.npy", "logs", "notes.txt", "my_samples.jsonl")
    clear(folder)
    assert sorted(os.listdir(folder)) == ["logs", "my_samples.jsonl", "notes.txt"]


def step(folder):
    """Make `folder` look as if it held a checkpoint."""
    manifest = Path(folder, "checkpoints/step-00000002/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--resume"], "out/20260101-000000-x"),
        (["--resume", "out/latest"], "20260101-000000-x"),
        (["--resume", "other"], "other"),
        (["--resume=other"], "other"),
        (["--resume", "--output-dir", "other"], "other"),
        (["--output-dir", "other", "--resume", "other"], "other"),
    ],
)
def test_resume_finds_the_run(here, words, folder):
    step("out/20260101-000000-x")
    step("other")
    point_to(Path("out/20260101-000000-x"))
    found = settled(made := config(*words), "x", made.resume).output_dir
    assert found == Path(folder) or (found.name == folder and found.is_dir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--resume"], "--resume: out/latest is not there; name the run's folder: --resume PATH"),
        (["--resume", "a", "--output-dir", "b"], "--resume a and --output-dir b name two folders"),
        (["--resume", "a", "--overwrite"], "--resume continues a run, --overwrite replaces it"),
        (["--resume", "a"], "a/checkpoints holds no checkpoint; start without --resume"),
        (["--resume", "begun"], "begun/checkpoints holds no checkpoint; start with --overwrite instead of --resume"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_told(here, words, told):
    finished("begun", "config.json")  # killed before it saved
    with pytest.raises(ConfigError, match=told) as error:
        checked(*words)
    assert len(error.value.problems) == (1 if len(words) == 2 or words == ["--resume"] else 2)


def test_latest_is_the_newest_that_got_its_folder_by_default(here):
    for name in ("out/20260101-000000-a", "out/20260101-000001-b", "out/mine", "elsewhere/20260101-000002-c"):
        Path(name).mkdir(parents=True)
        point_to(Path(name))
    assert os.readlink("out/latest") == "20260101-000001-b"


def test_a_folder_called_latest_stays(here, capsys):
    finished("out/latest", "mine.txt")
    Path("out/20260101-000000-a").mkdir()
    point_to(Path("out/20260101-000000-a"))
    assert Path("out/latest/mine.txt").read_text() == "old"
    assert "this run is in out/20260101-000000-a" in capsys.readouterr().err


def test_other_processes_of_a_job_wait_for_the_name(here, monkeypatch):
    monkeypatch.setenv("RANK_ID", "1")
    assert check(config(), 1).config.output_dir == dataclasses.replace(config()).output_dir
