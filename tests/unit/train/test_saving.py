# SPDX-License-Identifier: Apache-2.0
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from sporeloom.checkpoint.manifest import checkpoints, read_manifest
from sporeloom.checkpoint.sharded import CheckpointReader
from sporeloom.core.errors import ConfigError
from sporeloom.parallel.report import ParameterReport, Report
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.tensor_slice import TensorSlice
from sporeloom.train import saving
from sporeloom.train.loading import load_state, newest_complete
from sporeloom.train.saving import Saver

ABOUT = {"state": {}, "model": {}, "strategy": {}, "versions": {}}


class State(nn.Cell):
    def __init__(self):
        super().__init__()
        for name in ("model.a", "adam_m.model.a", "optimizer_rate"):
            parameter = Parameter(Tensor(np.zeros((2, 3), np.float32)), name=name)
            self.insert_param_to_cell(name.replace(".", "_"), parameter, check_name_contain_dot=False)
            parameter.name = name

    def fill(self, value):
        for parameter in self.get_parameters():
            parameter.set_data(Tensor(np.full((2, 3), value, np.float32)))


@pytest.fixture
def make_saver(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    engine = Engine.start(SINGLE_DEVICE)
    parameter = ParameterReport("model.a", (2, 3), (2, 3), ((), ()), 1, 0, "")
    report = Report(Mesh(), [parameter], [], [], False)

    def make(**options):
        saver = Saver(State(), engine, report, tmp_path / "checkpoints", lambda: ABOUT, lambda _: None, **options)
        saver.cell.fill(1.0)
        return saver

    return make


def steps(saver):
    return sorted(read_manifest(folder).step for folder in checkpoints(saver.root))


def test_every_few_steps_and_the_newest_are_kept(make_saver):
    saver = make_saver(every=2, keep_last=2)
    for step in range(1, 8):
        assert not saver.after_step(step)
    assert steps(saver) == [4, 6]


def test_after_minutes(make_saver, monkeypatch):
    saver = make_saver(minutes=5.0)
    now = time.monotonic()
    for step, minutes in enumerate((1, 4.9, 5.1, 6, 10.2), 1):
        monkeypatch.setattr(saving.time, "monotonic", lambda m=minutes: now + 60 * m)
        saver.after_step(step)
    assert steps(saver) == [3, 5]


def test_told_to_stop_it_saves_once(make_saver):
    saver = make_saver(every=3)
    saver.request_stop()
    assert saver.after_step(3)
    assert steps(saver) == [3]


def test_in_the_background_the_state_is_that_of_the_step(make_saver):
    saver = make_saver(in_background=True)
    saver.save(1)
    saver.cell.fill(2.0)  # training goes on
    saver.wait()
    (folder,) = checkpoints(saver.root)
    manifest = read_manifest(folder)
    assert set(manifest.tensors) == {"a", "adam_m.a"}
    assert CheckpointReader(folder, manifest).read("a", TensorSlice.full((2, 3))).tolist() == [[1.0] * 3] * 2


def test_an_error_in_the_background_is_not_lost(make_saver, tmp_path):
    saver = make_saver(in_background=True)
    saver.root = tmp_path / "file"
    saver.root.write_text("x")
    saver.save(1)
    with pytest.raises(ConfigError, match="the state of step 1 cannot be saved"):
        saver.wait()
    saver.wait()  # told once


def test_an_error_between_steps_saves_first(make_saver):
    saver = make_saver()
    with pytest.raises(KeyError), saver.saving_after_an_error(7):
        raise KeyError("x")
    assert steps(saver) == [7]


def test_what_was_saved_is_loaded(make_saver):
    saver = make_saver()
    saver.cell.fill(3.0)
    saver.save(1)
    saver.cell.fill(4.0)
    folder, manifest = newest_complete(Path(saver.root), saver.engine, lambda *_: None)
    load_state(saver.cell, saver.engine, saver.report, folder, manifest)
    values = {p.name: float(p.asnumpy()[0, 0]) for p in saver.cell.get_parameters()}
    assert values == {"model.a": 3.0, "adam_m.model.a": 3.0, "optimizer_rate": 4.0}


def test_a_state_that_is_not_finite_is_not_gone_on_from(make_saver, capsys):
    saver = make_saver()
    for step, value in ((1, 3.0), (2, np.inf)):
        saver.cell.fill(value)
        saver.save(step)
    newest = checkpoints(saver.root)[0]
    with pytest.raises(
        ConfigError, match=r"not finite: a \(6 infinite of 6, the first at \[0, 0\]\), adam_m\.a \(6 infinite"
    ):
        load_state(saver.cell, saver.engine, saver.report, newest, read_manifest(newest))
    folder, manifest = newest_complete(Path(saver.root), saver.engine, lambda *_: None)
    assert manifest.step == 1 and "skipped: " in capsys.readouterr().err
    load_state(saver.cell, saver.engine, saver.report, folder, manifest)


def test_before_saving_takes_no_slices_after_an_error(make_saver):
    seen = []
    saver = make_saver(before_saving=lambda step, slices: seen.append((step, slices is None)))
    saver.save(1)
    with pytest.raises(KeyError), saver.saving_after_an_error(2):
        raise KeyError
    assert seen == [(1, False), (2, True)] and steps(saver) == [1, 2]
