# SPDX-License-Identifier: Apache-2.0
"""All mistakes of a command line are told at once; a reader that leaves ends no work; warnings are quiet for users."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, TWO_LAYERS, in_process

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.runtime import launch
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig

TEXT = str(ROOT / "examples/small_town.txt")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sede", "1"], ["--sede 1; did you mean --seed?", "required: --data"]),
        (["--dta", "x"], ["--dta x; did you mean --data?"]),  # which is not asked for once more
        (["--data"], ["argument --data: expected one argument"]),
        (
            ["--steps", "--seed", "x", "--data", TEXT],
            ["--steps: expected one argument", "--seed: invalid int value: 'x'"],
        ),
        (
            ["--nonsense", "--batch-size", "0"],
            ["--nonsense", "required: --data", "--batch-size must be at least 1, got 0"],
        ),
        (
            [
                "--data",
                TEXT,
                "--zzz",
                "--steps",
                "many",
                "--batch-size",
                "0",
                "--strategy",
                "no_such",
                "--seed",
                "-1",
            ],
            [
                "--zzz",
                "--steps: invalid int value: 'many'",
                "--batch-size must be",
                "no_such: there is no",
                "--seed must be",
            ],
        ),
        (["--data", "no_such.txt", "--zzz"], ["--zzz", "no_such.txt"]),
        (["--data", TEXT, "--launch=yes", "--optimizer", "adm"], ["--launch: ignored explicit", "choice: 'adm'"]),
    ],
)
def test_all_mistakes_of_a_command_line_are_told(words, told):
    with pytest.raises(ConfigError) as raised:
        parse_args(TrainConfig, "", words, lambda config: check(config, None))
    problems = raised.value.problems
    assert len(problems) == len(told), problems
    for part in told:
        assert any(part in problem for problem in problems), (part, problems)


def test_verbs_tell_all_mistakes():
    outcome = in_process(
        "tools/plan.py", "--model", "pangu", "--size", "13b", "--cluster", "nowhere", "--devices", 8, "--zzz"
    )
    assert outcome.code == 2
    assert "--zzz" in outcome.output and "--global-batch-size" in outcome.output
    words = ("--strategy", "no_such", "--steps", 3, "--size", "tiny")
    outcome = in_process("tools/dry_run.py", *words)
    assert "--steps 3" in outcome.output and "no_such" in outcome.output


def piped(*words, cwd, env=None, lines=0):
    """Run a verb whose output is read for some lines only."""
    command = [sys.executable, "-m", "sporeloom", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    job = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(lines):
        job.stdout.readline()
    job.stdout.close()  # before anything, or most, is written
    error = job.stderr.read().decode()
    return job.wait(timeout=120), error


PLAN = (
    "plan",
    "--model",
    "pangu",
    "--size",
    "13b",
    "--cluster",
    "ascend910b",
    "--devices",
    64,
    "--global-batch-size",
    64,
)


def test_a_plan_whose_reader_leaves_is_written(tmp_path):
    code, error = piped(*PLAN, "--json", "--top", 500, "--out", "p.yaml", cwd=tmp_path)
    assert (code, error) == (0, "strategy in p.yaml\n")
    head = (tmp_path / "p.yaml").read_text().splitlines()[1]
    assert head.startswith("# sporeloom launch-script --strategy p.yaml --devices-per-server 8 -- train --model pangu ")
    assert (tmp_path / "p.yaml").read_text().count("mesh:") == 1


def test_a_translation_whose_reader_leaves_is_written(tmp_path):
    source = ROOT / "parallel_configs/mindformers/pangualpha_13b.yaml"
    code, error = piped("translate", source, "--to", "ours", "--out", "t.yaml", cwd=tmp_path)
    assert (code, error) == (0, "")
    assert "mesh:" in (tmp_path / "t.yaml").read_text()


def test_a_milestone_that_nobody_reads_ends_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from sporeloom.core.log import milestone; milestone('a'); milestone('b'); print('done')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], stderr=writing, stdout=subprocess.PIPE, env=env, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"done\n")


@pytest.mark.parametrize(
    ("processes", "cores", "free", "is_too_many"),
    [
        *((4, 1, 100.0, False), (4, 2, 100.0, False), (8, 2, 100.0, False), (9, 2, 100.0, True), (64, 2, 1000.0, True)),
        *((64, 16, 1000.0, False), (64, 16, 8.0, True), (2, 2, 0.3, True), (4, 2, None, False)),
    ],
)
def test_more_processes_than_a_machine_is_good_for_are_asked_about(monkeypatch, processes, cores, free, is_too_many):
    monkeypatch.setattr(launch, "devices", dict)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(launch, "free_memory_gb", lambda: free)
    told = launch.too_many(processes)
    assert (told is not None) == is_too_many
    if told:
        assert f"{processes} processes on {cores} cores" in told and "--oversubscribe" in told
        assert free is None or f"{free:.0f} GB of free memory" in told


def test_where_there_are_devices_they_are_not_counted(monkeypatch):
    monkeypatch.setattr(launch, "devices", lambda: {"Ascend": "/dev/davinci_manager"})
    assert launch.too_many(1000) is None


def test_so_many_processes_are_refused_before_any_starts(tmp_path):
    (tmp_path / "wide.yaml").write_text("mesh: {dp: 4096}\nrules: decoder\n")
    words = ("--data", TEXT, "--strategy", tmp_path / "wide.yaml", "--batch-size", 4096, "--launch")
    outcome = in_process("tools/train.py", *words, "--output-dir", tmp_path / "out")
    assert outcome.code == 2
    assert re.search(r"--launch: 4096 processes on \d+ cores and \d+ GB of free memory", outcome.output)


@pytest.mark.slow
def test_readme_commands_print_no_warning_without_glog_v(tmp_path):
    """As a user has it: no GLOG_v, one process, several, and a script of the user's own that loads MindSpore first."""
    env = {name: value for name, value in os.environ.items() if name != "GLOG_v"}
    env["PYTHONPATH"] = str(ROOT)
    train = ["-m", "sporeloom", "train", "--data", TEXT, "--steps", "1", "--config", str(TWO_LAYERS)]
    said = ""
    for words in (train, [*train, "--strategy", "pangu_tiny_tp2", "--launch"], [str(ROOT / "examples/own_network.py")]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout + done.stderr
    logs = sorted({log.resolve() for log in tmp_path.glob("out/*/logs/worker_*.log")})
    assert len(logs) == 2
    said += "".join(log.read_text() for log in logs)
    assert "[WARNING]" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["--skip-steps", "3", "5-7"],
        ["--skip-steps", "3", "--skip-steps", "5-7"],
        ["--skip-steps=3", "--skip-steps=5-7"],
    ],
    ids=["once", "repeated", "with signs"],
)
def test_a_flag_with_several_values_may_be_repeated(words):
    assert parse_args(TrainConfig, "", ["--data", TEXT, *words]).skip_steps == ("3", "5-7")


def test_a_repeated_flag_replaces_the_values_of_the_run_file(tmp_path):
    (tmp_path / "run.yaml").write_text(f"data: {TEXT}\nskip_steps: ['1', '2']\n")
    run = ["--run", str(tmp_path / "run.yaml")]
    assert parse_args(TrainConfig, "", run).skip_steps == ("1", "2")
    assert parse_args(TrainConfig, "", [*run, "--skip-steps", "8"]).skip_steps == ("8",)
