# SPDX-License-Identifier: Apache-2.0
"""Trackers against modules with the calls that the packages document, which note what they are told."""

import importlib.machinery
import sys
import types

import mindspore  # noqa: F401  before TensorBoard, see train.tensorboard
import pytest
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sporeloom.core.errors import ConfigError
from sporeloom.train.checks import check
from sporeloom.train.metrics import MetricsWriter, StepMetrics
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.tensorboard import TensorBoard
from sporeloom.train.trackers import TrackedRun, mark_failed, open_trackers, reporting_to

SETTINGS = {"train": {"steps": 5, "tracker": ["wandb"], "tokenizer": None}, "model": {"hidden_size": 64}}
NAMES = ("wandb", "mlflow", "swanlab", "trackio")


def run_in(folder, **changes):
    told = {"project": "town", "name": "tiny-dp2", "id": "00c0ffee", "folder": folder, "settings": SETTINGS}
    return TrackedRun(**{**told, **changes})


class Calls(list):
    """What a fake was called with."""

    def of(self, name, result=None):
        def call(*args, **values):
            self.append((name, *args, values) if values else (name, *args))
            return result

        return call


def fake(monkeypatch, package, **functions):
    module = types.ModuleType(package)
    module.__spec__ = importlib.machinery.ModuleSpec(package, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, package, module)


@pytest.fixture
def calls(monkeypatch):
    """The packages, each with the functions that its documentation has."""
    noted = {name: Calls() for name in NAMES}
    wandb, mlflow, swanlab, trackio = noted.values()
    run = types.SimpleNamespace(log=wandb.of("log"), finish=wandb.of("finish"))
    fake(monkeypatch, "wandb", init=wandb.of("init", run))
    mlflow.found = []
    client = types.SimpleNamespace(
        search_runs=lambda experiments, text: mlflow.append(("search", experiments, text)) or mlflow.found
    )
    names = ("start_run", "log_params", "log_metrics", "end_run")
    experiment = types.SimpleNamespace(experiment_id="7")
    fake(
        monkeypatch,
        "mlflow",
        set_experiment=mlflow.of("set_experiment", experiment),
        MlflowClient=lambda: client,
        **{name: mlflow.of(name) for name in names},
    )
    for package, its in (("swanlab", swanlab), ("trackio", trackio)):
        fake(monkeypatch, package, **{name: its.of(name) for name in ("init", "log", "finish")})
    return noted


def report(name, folder, has_failed=False, **changes):
    (tracker,) = open_trackers([name], run_in(folder, **changes))
    tracker.log(1, {"loss": 2.5})
    tracker.log(2, {"loss": 2.0, "validation/loss": 3.0})
    tracker.finish(has_failed)


def test_wandb_gets_the_run_its_steps_and_its_end(calls, tmp_path):
    report("wandb", tmp_path)
    assert calls["wandb"] == [
        (
            "init",
            {
                **{"project": "town", "name": "tiny-dp2", "id": "00c0ffee", "resume": "allow"},
                **{"dir": str(tmp_path), "config": SETTINGS},
            },
        ),
        ("log", {"loss": 2.5}, {"step": 1}),
        ("log", {"loss": 2.0, "validation/loss": 3.0}, {"step": 2}),
        ("finish", {"exit_code": 0}),
    ]


def test_mlflow_gets_settings_as_flat_parameters(calls, tmp_path):
    report("mlflow", tmp_path)
    params = {"train.steps": "5", "train.tracker": "['wandb']", "train.tokenizer": "None", "model.hidden_size": "64"}
    assert calls["mlflow"] == [
        ("set_experiment", "town"),
        ("search", ["7"], "tags.`sporeloom.run` = '00c0ffee'"),
        ("start_run", {"run_name": "tiny-dp2", "tags": {"sporeloom.run": "00c0ffee"}}),
        ("log_params", params),
        ("log_metrics", {"loss": 2.5}, {"step": 1}),
        ("log_metrics", {"loss": 2.0, "validation/loss": 3.0}, {"step": 2}),
        ("end_run", "FINISHED"),
    ]


def test_mlflow_takes_parameters_in_batches_and_no_long_ones(calls, tmp_path):
    report("mlflow", tmp_path, settings={f"key{n}": "x" * 900 for n in range(230)})
    batches = [call[1] for call in calls["mlflow"] if call[0] == "log_params"]
    assert [len(batch) for batch in batches] == [100, 100, 30]
    assert {len(value) for batch in batches for value in batch.values()} == {500}


def test_a_resumed_run_is_the_same_run_of_mlflow(calls, tmp_path):
    calls["mlflow"].found = [types.SimpleNamespace(info=types.SimpleNamespace(run_id="their id"))]
    report("mlflow", tmp_path)
    assert ("start_run", {"run_id": "their id"}) in calls["mlflow"]
    assert "log_params" not in {call[0] for call in calls["mlflow"]}  # they cannot be changed


def test_swanlab_writes_into_the_folder_of_the_run(calls, tmp_path):
    report("swanlab", tmp_path)
    first, *_, last = calls["swanlab"]
    assert first[1]["log_dir"] == str(tmp_path / "swanlog") and first[1]["id"] == "00c0ffee"
    assert last == ("finish", {"state": "success"})


def test_trackio_names_a_run_once(calls, tmp_path):
    report("trackio", tmp_path)
    told = {"project": "town", "name": "tiny-dp2-00c0ffee", "resume": "allow", "config": SETTINGS}
    assert calls["trackio"][0] == ("init", told)
    assert calls["trackio"][-1] == ("finish",)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("wandb", ("finish", {"exit_code": 1})),
        ("mlflow", ("end_run", "FAILED")),
        ("swanlab", ("finish", {"state": "crashed"})),
    ],
)
def test_a_run_that_failed_is_reported_so(calls, tmp_path, name, end):
    report(name, tmp_path, has_failed=True)
    assert calls[name][-1] == end


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_cannot_begin_is_reported_once(calls, tmp_path, capsys, monkeypatch, name):
    def refuse(*_, **__):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(sys.modules[name], "set_experiment" if name == "mlflow" else "init", refuse)
    report(name, tmp_path)
    said = capsys.readouterr().err
    assert said.count(f"{name}: no route to host; the run continues without it") == 1
    assert not calls[name]


def test_a_tracker_that_fails_later_is_left_alone(calls, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["trackio"], "log", fail)
    report("trackio", tmp_path)
    assert capsys.readouterr().err.count("trackio: disk full") == 1
    assert [call[0] for call in calls["trackio"]] == ["init", "finish"]


def test_tensorboard_shows_the_run_by_its_name_and_hides_what_was_taken_back(tmp_path):
    def steps(folder, done, losses):
        tracker = TensorBoard(run_in(folder, steps_done=done))
        with reporting_to([tracker]) as trackers, MetricsWriter(folder, 9, done, trackers) as writer:
            for step, loss in enumerate(losses, done + 1):
                writer.write(StepMetrics(step, loss, 1e-3, 0.5, 0.1, 10.0))

    steps(tmp_path, 0, [4.0, 3.0, 2.0, 1.0])
    steps(tmp_path, 2, [2.5, 1.5])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "tiny-dp2"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.5)]


def problems(tmp_path, **flags):
    with pytest.raises(ConfigError) as caught:
        check(TrainConfig(data=ROOT / "examples" / "small_town.txt", output_dir=tmp_path / "out", **flags), None)
    return caught.value.problems


def test_a_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems(tmp_path, tracker=("wandb", "trackio")) == [
        "--tracker wandb: the package is not installed: pip install -e '.[wandb]'",
        "--tracker trackio: the package is not installed: pip install -e '.[trackio]'",
    ]


def test_names_that_cannot_be_used_are_refused(tmp_path):
    found = problems(tmp_path, run_name="../up", project="a b")
    assert found == [
        "--project a b: only trackers have projects; give --tracker, too",
        "--run-name '../up': give letters, digits and _.+=,@- only; it names a folder",
        "--project 'a b': give letters, digits and _.- only",
    ]


def test_a_tracker_twice_is_refused(tmp_path, calls):
    assert problems(tmp_path, tracker=("wandb", "wandb")) == ["--tracker wandb wandb: a tracker twice"]


class Recorder:
    def __init__(self):
        self.ended = []

    def finish(self, has_failed):
        self.ended.append(has_failed)


def test_a_run_is_ended_once_as_failed_if_it_raises_or_stops_early():
    for how, expected in (("done", [False]), ("stopped", [True]), ("raises", [True])):
        recorder = Recorder()
        try:
            with reporting_to([recorder]) as trackers:
                if how == "raises":
                    raise OSError("disk full")
                if how == "stopped":
                    mark_failed(trackers)
        except OSError:
            assert how == "raises"
        assert recorder.ended == expected, how
