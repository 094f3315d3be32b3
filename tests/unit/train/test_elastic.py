# SPDX-License-Identifier: Apache-2.0
"""What an elastic run refuses, and how it reads the number of devices. Runs that lose ranks: tests/parity/test_elastic.py."""

import os

import pytest
from conftest import ROOT, in_process

from sporeloom.core.errors import ConfigError
from sporeloom.train.elastic import Devices
from sporeloom.train.elastic_start import ElasticStart, memory_dir

TRAIN = ("tools/train.py", "--data", ROOT / "examples" / "small_town.txt", "--steps", 2)
LAUNCHED = ("--strategy", "pangu_tiny_dp2_tp2", "--launch", "--elastic")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--strategy", "pangu_tiny_dp2_tp2", "--elastic"), "--elastic needs --launch, which starts the processes again"),
        (("--launch", "--elastic"), "--elastic needs --strategy: one device leaves none"),
        (("--min-devices", 2), "--min-devices is for elastic runs; give --elastic, too"),
        ((*LAUNCHED, "--memory-save-every", 0), "--memory-save-every 0: a lost rank would cost all steps"),
        ((*LAUNCHED, "--min-devices", 8), "--min-devices 8 is more than pp 1 x dp 2 x tp 2 = 4"),
        ((*LAUNCHED, "--max-restarts", -1), "--max-restarts must be at least 0, got -1"),
        ((*LAUNCHED, "--devices-file", "nowhere"), "nowhere: "),
        ((*LAUNCHED, "--elastic-strategies", "pangu_tiny_tp4"), "are not fewer devices than pp 1 x dp 2 x tp 2 = 4"),
        ((*LAUNCHED, "--elastic-strategies", "pangu_tiny_tp3"), "no built-in strategy of that name"),
        ((*LAUNCHED, "--batch-size", 2, "--elastic-strategies", "pangu_tiny_pp2"), "a batch of 2 sequences is not divisible"),
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
