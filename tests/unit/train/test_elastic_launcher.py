# SPDX-License-Identifier: Apache-2.0
"""What an elastic run refuses, and how it reads the number of devices. Runs that lose ranks: tests/parity/test_elastic.py."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, in_process

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.runtime.launch import FORK, Jobs, run_job
from sporeloom.train import elastic
from sporeloom.train.checks import check
from sporeloom.train.elastic import Devices, run_elastic
from sporeloom.train.elastic_start import ElasticStart, memory_dir
from sporeloom.train.plain_text import TrainConfig

TRAIN = ("tools/train.py", "--data", ROOT / "examples" / "small_town.txt", "--steps", 2)
LAUNCHED = ("--strategy", "pangu_tiny_dp2_tp2", "--launch", "--elastic")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--strategy", "pangu_tiny_dp2_tp2", "--elastic"),
            "--elastic needs --launch, which starts the processes again",
        ),
        (("--launch", "--elastic"), "--elastic needs --strategy: one device leaves none"),
        (("--min-devices", 2), "--min-devices is for elastic runs; give --elastic, too"),
        ((*LAUNCHED, "--memory-save-every", 0), "--memory-save-every 0: a lost rank would cost all steps"),
        ((*LAUNCHED, "--min-devices", 8), "--min-devices 8 is more than pp 1 x dp 2 x tp 2 = 4"),
        ((*LAUNCHED, "--max-restarts", -1), "--max-restarts must be at least 0, got -1"),
        ((*LAUNCHED, "--devices-file", "nowhere"), "nowhere: "),
        ((*LAUNCHED, "--elastic-strategies", "pangu_tiny_tp4"), "are not fewer devices than pp 1 x dp 2 x tp 2 = 4"),
        ((*LAUNCHED, "--elastic-strategies", "pangu_tiny_tp3"), "no built-in strategy of that name"),
        (
            (*LAUNCHED, "--batch-size", 2, "--elastic-strategies", "pangu_tiny_pp2"),
            "a batch of 2 sequences is not divisible",
        ),
        ((*LAUNCHED, "--certificate", "c.json"), "--certificate c.json: it covers one strategy"),
        ((*LAUNCHED, "--save-every", 1, "--launch-command", "msrun"), "write {devices} where the number of processes"),
        ((*LAUNCHED, "--launch-command", "srun {devices}"), "give --save-every or --save-minutes"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(flags, told, tmp_path):
    outcome = in_process(*TRAIN, "--output-dir", tmp_path / "out", *flags)
    assert outcome.code == 2 and told in outcome.output, outcome.output
    assert not list(tmp_path.glob("out/*"))


def test_the_number_of_devices_is_that_of_the_file_until_some_are_lost(write, capsys):
    path = write("devices", "4\n")
    devices = Devices(8, path)
    assert devices.number == 4 and not devices.look()
    devices.number -= 1
    assert not devices.look() and devices.number == 3
    for text, number, is_new in (("4\n", 4, True), ("2", 2, True), ("two", 2, False), ("-1", 2, False), ("0", 0, True)):
        path.write_text(text)
        os.utime(path, ns=(0, hash(text) % 10**9))  # as if some time had passed
        assert (devices.look(), devices.number) == (is_new, number)
    assert "the number of devices is expected, got 'two'; still 2" in capsys.readouterr().err
    path.unlink()
    assert not devices.look() and devices.number == 0
    with pytest.raises(ConfigError, match=r"devices: the number of devices is expected, got '9{10}'"):
        Devices(8, write("devices", "9" * 10))


def test_the_processes_read_what_the_launcher_wrote(monkeypatch):
    assert ElasticStart.of_environment() is None and memory_dir() is None
    start = ElasticStart("/dev/shm/somewhere", [{"time": 1.5, "steps_done": 0}])
    for name, value in start.environment().items():
        monkeypatch.setenv(name, value)
    assert ElasticStart.of_environment() == start and str(memory_dir()) == "/dev/shm/somewhere"


RANK = """
import json, os, signal, sys, time
from pathlib import Path

rank, size, words = int(os.environ["RANK_ID"]), os.environ["MS_WORKER_NUM"], sys.argv[1:]
out = Path(words[words.index("--output-dir") + 1])
if rank == 0:
    (out / "metrics.jsonl").write_text(json.dumps({"step": int(size)}) + '\\n{"step": 99')
    with (out / "given.jsonl").open("a") as file:
        print(json.dumps([words, json.loads(os.environ["SPORELOOM_ELASTIC"])]), file=file)
    if os.environ.get("SAVES") == size:
        state = Path(json.loads(os.environ["SPORELOOM_ELASTIC"])["memory"], "step-00000007")
        state.mkdir()
        for name in ("rank.safetensors", "manifest.json"):
            (state / name).write_text("{}")
if os.environ.get("RESIZES") == size:
    def stop(*_):
        if os.environ["HOW"] == "gone":
            time.sleep(0.3 * (rank == 0))
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["HOW"] == "fails":
            raise SystemExit("error: nothing could be saved")
        print("[sporeloom] stopped after step 4", flush=True)
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, stop)
    if rank == 0:
        time.sleep(0.3)
        Path(words[words.index("--devices-file") + 1]).write_text("2")
    time.sleep(20)
    raise SystemExit("error: nobody asked for the end")
killed = json.loads(os.environ["KILLED"])
if size in killed:
    while not (out / "given.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.4 if rank == killed[size] else 60)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("FAILS") == size:
    raise SystemExit("error: the run itself")
"""
"""Stands for a rank of a run. KILLED has the rank that is killed, by the number of processes."""


@pytest.fixture
def trained(write, tmp_path, monkeypatch):
    """Launch processes that only die. Returns the exit code, the events, and what the first ranks were given."""
    monkeypatch.setattr(elastic, "SPORELOOM", str(write("rank.py", RANK)))
    monkeypatch.chdir(ROOT)

    def train(killed, *flags, **environment):
        for name, value in {"KILLED": json.dumps(killed), **environment}.items():
            monkeypatch.setenv(name, value)
        out = tmp_path / "out"
        words = [*map(str, (*TRAIN[1:], *LAUNCHED, "--output-dir", out, *flags))]
        run = check(parse_args(TrainConfig, "", words), None)
        code = run_elastic(["train", *words], run, "json")
        events = [json.loads(line) for line in (out / elastic.EVENTS).read_text().splitlines()]
        given = (out / "given.jsonl").read_text().splitlines()
        return (
            code,
            [tuple(map(event.get, ("event", "devices", "ranks"))) for event in events],
            [*map(json.loads, given)],
        )

    return train


def test_ranks_are_lost_until_one_is_left(trained, capsys):
    code, events, given = trained({"4": 1, "2": 0}, "--overwrite")
    assert (code, events) == (
        0,
        [
            *[("start", 4, None), ("lost", 3, [1])],
            *[("start", 3, None), ("lost", 2, [0])],
            *[("start", 2, None), ("lost", 1, [0])],
            *[("start", 1, None), ("end", None, None)],
        ],
    )
    names = [Path(words[-2]).name for words, _ in given]
    assert names[1:] == [f"{name}.yaml" for name in ("pp1_dp1_tp2", "pp1_dp1_tp2", "pp1_dp1_tp1")]
    assert all("--overwrite" in words and "--resume" not in words for words, _ in given)  # there was no state
    assert [len(start["earlier"]) for _, start in given] == [0, 1, 2, 3]
    told = capsys.readouterr().err
    assert "lost rank 1 (SIGKILL) after step 4; 3 devices are left: restart 1 of at most 3 from step 0" in told
    assert "lost rank 0 (SIGKILL) after step 2; 1 device is left: restart 3 of at most 3 from step 0" in told


@pytest.mark.parametrize(
    ("killed", "flags", "environment", "code", "events", "told"),
    [
        ({"4": 1}, ("--max-restarts", 0), {}, 1, ["start", "lost", "end"], "no restart is left of --max-restarts 0"),
        (
            {"4": 1},
            ("--min-devices", 4),
            {},
            1,
            ["start", "lost", "end"],
            "no mesh for 3 devices, with --min-devices 4",
        ),
        ({}, (), {"FAILS": "4"}, 2, ["start", "end"], "error: the run itself"),
        ({"4": 0}, (), {"FAILS": "2"}, 2, ["start", "lost", "start", "end"], "error: the run itself"),
    ],
)
def test_an_end_that_a_restart_would_not_change(trained, killed, flags, environment, code, events, told, capfd):
    found, happened, _ = trained(killed, *flags, **environment)
    assert (found, [event for event, *_ in happened]) == (code, events)
    assert told in "".join(capfd.readouterr())


def test_the_newest_state_in_memory_outlives_a_run_that_ends_early(trained, tmp_path, capsys):
    code, _, _ = trained({"4": 1}, "--min-devices", 4, SAVES="4")
    assert code == 1 and "copied the state after step 7 from memory" in capsys.readouterr().err
    kept = tmp_path / "out" / "checkpoints" / "step-00000007"
    assert sorted(file.name for file in kept.iterdir()) == ["manifest.json", "rank.safetensors"]
    assert sorted(kept.parent.iterdir()) == [kept.parent / "latest", kept]


@pytest.mark.parametrize(
    ("how", "code", "wanted"),
    [
        ("saves", 0, [("start", 4), ("resize", 2), ("start", 2), ("end", None)]),
        ("fails", 2, [("start", 4), ("resize", 2), ("end", None)]),
        ("gone", 0, [("start", 4), ("resize", 2), ("lost", 2), ("start", 2), ("end", None)]),
    ],
)
def test_a_smaller_number_of_devices(trained, write, how, code, wanted):
    found, events, _ = trained({}, "--devices-file", write("devices", "4"), RESIZES="4", HOW=how)
    assert (found, [event[:2] for event in events]) == (code, wanted)


def test_a_signal_before_the_workers_are_there_reaches_them(write, tmp_path):
    """While the starter loads a module, it has no workers."""
    script = write("rank.py", "import time\ntime.sleep(20)\n")
    with Jobs("json", are_several=True) as jobs:
        asked = []

        def look():
            if not asked:
                asked.append(time.monotonic())
                jobs.terminate_workers()

        ended = run_job(jobs, str(script), [], 2, tmp_path / "logs", 0, look=look)
    assert ended.code and ended.ends and {status for _, status in ended.ends} == {-signal.SIGTERM}
    assert time.monotonic() - asked[0] < 15


def test_given_strategies_are_used_in_place_of_smaller_degrees(trained):
    code, _, given = trained({"4": 0}, "--elastic-strategies", "pangu_tiny_pp2")
    assert code == 0 and [words[-2:] for words, _ in given][1] == ["pangu_tiny_pp2", "--overwrite"]


def test_a_command_of_ones_own_starts_the_processes(trained, capsys):
    command = f"{sys.executable} {FORK} json {{devices}} {{port}} {{log_dir}}"
    code, events, _ = trained({"4": 2}, "--launch-command", command, "--save-every", 1)
    assert (code, events) == (0, [("start", 4, None), ("lost", 3, []), ("start", 3, None), ("end", None, None)])
    assert "lost the processes after step 4; 3 devices are left" in capsys.readouterr().err


@pytest.mark.parametrize(("fails", "code"), [("4", 2), ("", 0)])
def test_an_error_of_the_run_is_no_lost_device_of_a_command(trained, fails, code):
    command = f"{sys.executable} {FORK} json {{devices}} {{port}} {{log_dir}}"
    found, events, _ = trained({}, "--launch-command", command, "--save-every", 1, FAILS=fails)
    assert (found, [event for event, *_ in events]) == (code, ["start", "end"])


def test_devices_whose_losses_are_not_reported_need_a_command(trained, monkeypatch):
    monkeypatch.setattr(elastic, "attached", lambda: {"Ascend": "/dev/davinci_manager"})
    with pytest.raises(ConfigError, match=r"--elastic on Ascend: .* give --launch-command"):
        trained({})


def test_moments_in_bfloat16_take_half_the_room():
    sizes = []
    for dtype in ("float32", "bfloat16"):
        words = [*map(str, (*TRAIN[1:], "--optimizer-state-dtype", dtype))]
        sizes.append(check(parse_args(TrainConfig, "", words), None).state_bytes())
    assert sizes[0] * 2 == sizes[1] * 3
