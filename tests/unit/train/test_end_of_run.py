# SPDX-License-Identifier: Apache-2.0
"""However a run ends, its last weights are sampled, and what was profiled is written."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_updates import SAVER, saver_after_errors, training_of

from sporeloom.core.errors import ConfigError
from sporeloom.runtime.trace import TRACE
from sporeloom.train import trainer
from sporeloom.train.profile import Profile
from sporeloom.train.samples import Samples
from sporeloom.train.validation import BestLoss

FOLDER = Path("unused")


@pytest.fixture
def run(monkeypatch):
    """Run of five steps; returns the steps after which it sampled, and those of each profile it wrote."""

    def make(saver=SAVER, skipped=(), profiled=range(2, 3), losses=(), guard=None, done=0):
        training, sampled, written = training_of([1.0] * 5, monkeypatch, scaled=False), [], []
        config = training.run.config
        config.skip_steps = skipped
        training.guard, training.say = guard, lambda _: None
        engine = SimpleNamespace(refresh=lambda *_: None, is_log_rank=False, target="CPU")
        net = SimpleNamespace(parallel_report=None)
        sampler = SimpleNamespace(sample=lambda step: sampled.append(step))
        training.samples = Samples(engine, net, sampler, [], FOLDER, 2)
        training.profile = Profile(engine, FOLDER, profiled)
        steps_of = lambda spans: [span.name for span in spans if span.name.startswith("step ")]  # noqa: E731
        monkeypatch.setattr(training.profile, "_write", lambda spans: written.append(steps_of(spans)))
        if losses:
            training.validation = SimpleNamespace(best=BestLoss(patience=1), is_due=lambda *_: True)
            told = iter(losses)

            def validated(training, validation, metrics, saver):
                validation.best.follow(metrics.step, next(told))
                return metrics

            monkeypatch.setattr(trainer, "_validated", validated)
        monkeypatch.setattr(trainer, "rewind", lambda *_: None)
        trainer.run_steps(training, None, saver, done)
        assert not TRACE.is_on
        return sampled, written

    return make


def stopping_after(last):
    return SimpleNamespace(
        saving_after_an_error=lambda _: contextlib.nullcontext(), after_step=lambda step: step == last
    )


def test_a_run_samples_after_its_last_step_and_writes_a_profile_after_the_last_of_its_steps(run):
    assert run() == ([2, 4, 5], [["step 2"]])


def test_a_run_that_stops_early_samples_its_last_weights_and_writes_its_profile(run):
    assert run(losses=[3.0, 2.0, 4.0], profiled=range(2, 5)) == ([2, 3], [["step 2", "step 3"]])


def test_a_run_that_is_told_to_stop_writes_its_profile_and_samples_when_it_is_resumed(run):
    assert run(stopping_after(3), profiled=range(2, 5)) == ([2], [["step 2", "step 3"]])
    assert run(done=3, profiled=range(2, 5)) == ([4, 5], [["step 4"]])


def test_a_last_step_that_is_skipped_leaves_weights_to_sample_and_a_profile(run):
    assert run(skipped=("4-5",), profiled=range(2, 6)) == ([2, 5], [["step 2", "step 3"]])


def test_a_spike_at_the_last_step_leaves_the_weights_of_before_to_sample(run):
    is_spike = iter([False] * 4 + [True])
    assert run(guard=SimpleNamespace(is_spike=lambda _: next(is_spike)))[0] == [2, 4, 5]


def test_a_run_without_steps_left_samples_nothing_again(run):
    assert run(done=5) == ([], [])


def test_a_spike_at_the_last_step_leaves_the_weights_of_before_to_evaluate(monkeypatch):
    training = training_of([1.0] * 3, monkeypatch, scaled=False)
    is_spike, calls, written = iter([False, False, True]), [], []
    training.guard, training.say = SimpleNamespace(is_spike=lambda _: next(is_spike)), lambda _: None
    training.evaluations = SimpleNamespace(
        is_due=lambda step, last: step == last, metrics=lambda: calls.append("evaluated") or {"evaluation/x/acc": 0.5}
    )
    monkeypatch.setattr(trainer, "rewind", lambda *_: calls.append("back"))
    trainer.run_steps(training, SimpleNamespace(write=written.append), SAVER, 0)
    assert calls == ["back", "evaluated"]
    assert [(metrics.step, dict(metrics.more)) for metrics in written] == [
        *((1, {}), (2, {})),
        (3, {"evaluation/x/acc": 0.5}),
    ]


def test_an_evaluation_that_fails_after_a_spike_at_the_last_step_saves_the_run_first(monkeypatch):
    training, saved = training_of([1.0], monkeypatch, scaled=False), []
    training.guard, training.say = SimpleNamespace(is_spike=lambda _: True), lambda _: None

    def fail():
        raise ConfigError("the benchmark has no answer")

    training.evaluations = SimpleNamespace(is_due=lambda step, last: step == last, metrics=fail)
    monkeypatch.setattr(trainer, "rewind", lambda *_: None)
    saver = saver_after_errors(saved)
    with pytest.raises(ConfigError, match="the benchmark has no answer"):
        trainer.run_steps(training, SimpleNamespace(write=lambda _: None), saver, 0)
    assert saved == [1]
